from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from realrl.algo.api import LossOutput
from realrl.algo.checks import check_loss, check_metrics, check_output, check_recorded
from realrl.data.sample import SequenceSample
from realrl.errors import CallError
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.sched.messages import KeySchema, Per
from tests.algo.batches import SEQUENCE, TOKEN, TRANSITION, token_batch
from tests.helpers.fake_engine import fake_context

BATCH = token_batch([[([0, 1], [2, 3]), ([0], [1])], [([1], [1, 2, 3])]])
CTX = fake_context("critic_inf", [BATCH.ids], step=7)
WHERE = r"critic_inf of role 'critic' at step 7: interface 'mine' "


def mfc(**changes: Any) -> MFCDef:
    fields = {
        "name": "critic_inf",
        "model_name": "critic",
        "interface_type": InterfaceType.INFERENCE,
        "interface_impl": "mine",
        "output_keys": ("values",),
    }
    return MFCDef(**{**fields, **changes})


def output(key: str, schema: KeySchema, tensor: torch.Tensor) -> SequenceSample:
    return BATCH.derive("input_ids", {key: (schema, tensor)})


GOOD = output("values", TOKEN, torch.arange(10.0))


def test_a_good_output_comes_back_with_the_asked_keys_only() -> None:
    result = GOOD.update(output("extra", SEQUENCE, torch.tensor([1.0, math.nan, 2.0])))
    assert check_output(CTX, mfc(), BATCH, result) == GOOD


def test_names_are_remapped() -> None:
    call = mfc(output_keys=("ref_logprobs",), output_key_remap={"logprobs": "ref_logprobs"})
    result = output("logprobs", TRANSITION, torch.arange(7.0))
    assert check_output(CTX, call, BATCH, result).keys == ("ref_logprobs",)
    with pytest.raises(CallError, match=r"did not return 'logprobs' \(for 'ref_logprobs'\), but 'values'"):
        check_output(CTX, call, BATCH, GOOD)


@pytest.mark.parametrize("name", ["logprobs", "unlike"])
def test_a_forgotten_remap_is_suggested(name: str) -> None:
    result = output(name, TRANSITION, torch.arange(7.0))
    expected = rf"output_key_remap=\{{'{name}': 'ref_logprobs'\}} in its MFCDef\?"
    with pytest.raises(CallError, match=f"Did you mean .*{expected}"):
        check_output(CTX, mfc(output_keys=("ref_logprobs",)), BATCH, result)
    both = mfc(output_keys=("ref_logprobs", name))
    with pytest.raises(CallError, match="did not return 'ref_logprobs'") as error:
        check_output(CTX, both, BATCH, result)
    assert "output_key_remap" not in str(error.value)


def test_a_dict_in_the_place_of_samples_learns_what_to_return() -> None:
    call = mfc(output_keys=("ref_values",), output_key_remap={"values": "ref_values"})
    told = "Return batch.derive('input_ids', {'values': (KeySchema('float32', Per.SEQUENCE), tensor)}), with Per.TOKEN"
    with pytest.raises(CallError, match="returned dict, not a SequenceSample") as error:
        check_output(CTX, call, BATCH, {"values": 1.0})
    assert error.value.remedy is not None
    assert error.value.remedy.startswith(told)
    without = output("rewards", SEQUENCE, torch.zeros(3))
    with pytest.raises(CallError, match=r"Return SequenceSample\.from_lists\(batch\.ids, \{'values': \(KeySchema"):
        check_output(CTX, mfc(), without, {"values": 1.0})


def with_lengths(values: tuple[tuple[int, ...], ...]) -> SequenceSample:
    n = sum(map(sum, values))
    return SequenceSample(BATCH.ids, {"values": TOKEN}, {"values": values}, {"values": torch.zeros(n)})


@pytest.mark.parametrize(
    ("result", "message", "blamed"),
    [
        (None, "returned NoneType, not a SequenceSample", ()),
        (GOOD.remap({"values": "value"}), r"did not return 'values', but 'value'\. Did you mean 'value'", ()),
        (GOOD.select(("0/0",)), "returned nothing for sample '0/1'", ("0/1",)),
        (GOOD.select(("0/1", "0/0")), "returned its samples in another order than it was given: '0/1'", ("0/1",)),
        (GOOD.meta(), "returned 'values' without its tensor", ()),
        (
            with_lengths(((4, 2), (5,))),
            r"returned 'values' with \[5\] rows for sample '0/1', .* have \[4\] tokens: a key per token needs \[4\]",
            ("0/1",),
        ),
        (
            with_lengths(((6,), (4,))),
            r"returned 'values' with \[6\] rows for sample '0/0', .* needs \[4, 2\]",
            ("0/0",),
        ),
        (
            output("values", TOKEN, torch.tensor([0.0] * 7 + [math.nan, 0.0, 0.0])),
            "returned 'values' = nan in row 1 of sample '0/1'",
            ("0/1",),
        ),
        (
            output("values", TOKEN, torch.tensor([math.inf] + [0.0] * 8 + [math.nan])),
            r"returned 'values' = inf in row 0 of sample '0/0' \(2 samples",
            ("0/0",),
        ),
    ],
)
def test_a_bad_output_is_named(result: Any, message: str, blamed: tuple[str, ...]) -> None:
    with pytest.raises(CallError, match=WHERE + message) as error:
        check_output(CTX, mfc(), BATCH, result)
    assert (error.value.call, error.value.step, error.value.sample_ids) == ("critic_inf", 7, blamed)


def test_a_sample_from_nowhere_is_named() -> None:
    other = SequenceSample(
        ("0/0", "0/1", "9/9"), {"values": TOKEN}, {"values": ((4, 2), (4,), (1,))}, {"values": torch.zeros(11)}
    )
    with pytest.raises(CallError, match="returned sample '9/9', which it was not given"):
        check_output(CTX, mfc(), BATCH, other)


def test_generated_lengths_are_checked_against_the_generated_tokens() -> None:
    prompts = BATCH.select(BATCH.ids, ("input_ids",)).remap({"input_ids": "prompt_ids"})
    call = mfc(output_keys=("input_ids", "old_logprobs"))
    good = BATCH.update(output("old_logprobs", TRANSITION, torch.zeros(7)))
    assert set(check_output(CTX, call, prompts, good).keys) == {"input_ids", "old_logprobs"}
    lengths = {"input_ids": BATCH.seqlens["input_ids"], "old_logprobs": ((4, 1), (3,))}
    schemas = {"input_ids": BATCH.schemas["input_ids"], "old_logprobs": TRANSITION}
    data = {"input_ids": BATCH["input_ids"], "old_logprobs": torch.zeros(8)}
    with pytest.raises(CallError, match=r"'old_logprobs' with \[4, 1\] rows for sample '0/0'"):
        check_output(CTX, call, prompts, SequenceSample(BATCH.ids, schemas, lengths, data))


def test_rows_of_vectors_are_checked_too() -> None:
    schema = KeySchema("float32", Per.SEQUENCE, (2,))
    bad = output("values", schema, torch.tensor([[0.0, 0.0], [0.0, math.inf], [0.0, 0.0]]))
    with pytest.raises(CallError, match="= inf in row 1 of sample '0/0'"):
        check_output(CTX, mfc(), BATCH, bad)


def test_metrics_become_floats() -> None:
    assert check_metrics(CTX, mfc(), {"a": torch.tensor(1.5), "b": 2}) == {"a": 1.5, "b": 2.0}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (None, "returned NoneType, not a dict of metrics"),
        ({"loss": math.nan}, "returned the metric 'loss' = nan"),
        ({"loss": "low"}, "returned the metric 'loss' = 'low', which is not a number"),
        ({"loss": torch.zeros(2)}, "which is not a number"),
    ],
)
def test_bad_metrics_are_named(metrics: Any, message: str) -> None:
    with pytest.raises(CallError, match=message):
        check_metrics(CTX, mfc(), metrics)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "the loss function of role 'actor' returned NoneType, not a LossOutput"),
        (torch.tensor(1.0), "returned Tensor, not a LossOutput"),
        (
            LossOutput(torch.zeros(3)),
            r"the loss that .* 'actor' returned is of shape \[3\], not a tensor of one number",
        ),
        (LossOutput(torch.tensor(1.0), {"kl": torch.zeros(2)}), r"the statistic 'kl' that .* is of shape \[2\]"),
        (LossOutput(torch.tensor(1.0), {}, {"top": 1.0}), "the maximum 'top' that .* is a float"),  # type: ignore[dict-item]
    ],
)
def test_a_loss_that_is_no_sum_is_named(result: Any, message: str) -> None:
    with pytest.raises(CallError, match=message) as caught:
        check_loss("actor", result)
    assert "over the micro-batch" in str(caught.value.remedy)


def test_a_loss_of_one_number_stays() -> None:
    good = LossOutput(torch.tensor(1.0), {"kl": torch.zeros(1)}, {"top": torch.tensor(2.0)})
    assert check_loss("actor", good) is good


# ---------------------------------------------------------------- dropping


@pytest.mark.parametrize("kept", [BATCH.ids, BATCH.ids[:1], BATCH.ids[1:], ()])
def test_a_call_that_may_drop_returns_some_of_its_samples(kept: tuple[str, ...]) -> None:
    result = GOOD.select(kept)
    assert check_output(CTX, mfc(may_drop=True), BATCH, result) == result
    if kept != BATCH.ids:
        with pytest.raises(CallError, match="returned nothing for sample"):
            check_output(CTX, mfc(), BATCH, result)


def test_a_call_that_may_drop_keeps_the_order_and_invents_nothing() -> None:
    with pytest.raises(CallError, match="returned its samples in another order than it was given: '0/1'"):
        check_output(CTX, mfc(may_drop=True), BATCH, GOOD.select(BATCH.ids[::-1]))
    other = SequenceSample(("0/0", "9/9"), {"values": TOKEN}, {"values": ((4, 2), (1,))}, {"values": torch.zeros(7)})
    with pytest.raises(CallError, match="returned sample '9/9', which it was not given"):
        check_output(CTX, mfc(may_drop=True), BATCH, other)


def test_lengths_of_what_is_kept_are_checked_against_its_own_tokens() -> None:
    wrong = SequenceSample(("0/1",), {"values": TOKEN}, {"values": ((6,),)}, {"values": torch.zeros(6)})
    with pytest.raises(CallError, match=r"returned 'values' with \[6\] rows for sample '0/1', .* needs \[4\]"):
        check_output(CTX, mfc(may_drop=True), BATCH, wrong)


# ---------------------------------------------------------------- recorded metrics


def test_recorded_metrics_add_up() -> None:
    ctx = fake_context("critic_inf", [BATCH.ids])
    for total, count in [(2.0, 4.0), (1, 1)]:
        ctx.metrics.add("a/mean", total, count)
    for value in (-3.0, -5.0):
        ctx.metrics.add_max("a/max", value)
    check_recorded(ctx, mfc())
    assert (ctx.metrics.sums, ctx.metrics.maxima) == ({"a/mean": (3.0, 5.0)}, {"a/max": -3.0})
    assert fake_context("critic_inf", [BATCH.ids]).metrics.sums == {}


@pytest.mark.parametrize(
    ("total", "count", "message"),
    [
        (math.nan, 1, "'a' as a total of nan over a count of 1.0"),
        (1, math.inf, "'a' as a total of 1.0 over a count of inf"),
        (1, -1, "'a' as a total of 1.0 over a count of -1.0"),
    ],
)
def test_recorded_nonsense_is_refused(total: float, count: float, message: str) -> None:
    ctx = fake_context("critic_inf", [BATCH.ids], step=7)
    ctx.metrics.add("a", total, count)
    with pytest.raises(CallError, match=WHERE + "recorded the metric " + message):
        check_recorded(ctx, mfc())


def test_a_recorded_maximum_is_finite() -> None:
    ctx = fake_context("critic_inf", [BATCH.ids], step=7)
    ctx.metrics.add_max("a", math.nan)
    with pytest.raises(CallError, match=WHERE + "recorded the metric 'a' with a maximum of nan"):
        check_recorded(ctx, mfc())

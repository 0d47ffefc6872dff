"""Causes follow from which runs differ, and from relations between their numbers."""

from __future__ import annotations

import msgspec
import pytest

from realrl.checker.compare import Comparison, Kind, compare, roots
from realrl.checker.diagnose import Diagnosis
from realrl.checker.recording import CallSeen, MinibatchSeen, PartSeen, Recording, Rows
from realrl.graph.mfc import InterfaceType, MFCDef

IDS = ("a", "b", "c", "d", "e")
VALUES = (1.0, 2.5, -3.0, 4.0, 0.5)
INFER = MFCDef("infer", "judge", InterfaceType.INFERENCE, "x", ("prompt_ids",), ("scores",))
TRAIN = MFCDef("train", "actor", InterfaceType.TRAIN_STEP, "x", ("scores",))
MFCS = (INFER, TRAIN)


def inference(values=VALUES, ids=IDS, rank=0) -> CallSeen:
    rows = {i: Rows((1,), (v,)) for i, v in zip(ids, values, strict=True)}
    return CallSeen(rank=rank, step=1, call="infer", ids=ids, outputs={"scores": rows})


def training(*losses: tuple[float, float], normaliser=10.0, metrics=None, rank=0) -> CallSeen:
    parts = tuple(PartSeen((f"{rank}.{i}",), {"samples": n}, loss, {}, {}) for i, (loss, n) in enumerate(losses))
    minibatch = MinibatchSeen(IDS, normaliser, parts, abs(sum(loss for loss, _ in losses)))
    return CallSeen(rank=rank, step=1, call="train", ids=IDS, metrics=metrics or {}, minibatches=(minibatch,))


def recording(*seen: CallSeen, metrics=({},)) -> Recording:
    calls: dict[tuple[int, str], tuple[CallSeen, ...]] = {}
    for one in seen:
        calls[one.step, one.call] = (*calls.get((one.step, one.call), ()), one)
    return Recording(calls, metrics)


BASE = recording(inference(), training((2.0, 5.0)))


def causes(base: Recording = BASE, **others: Recording) -> list[tuple[str, str]]:
    named = {name.replace("_", "-"): other for name, other in others.items()}
    compared = {n: (o, compare(base, o, MFCS, n_steps=1, whole=True)) for n, o in named.items()}
    return [(one.cause.name, one.call) for one in Diagnosis(base, compared, MFCS).findings()]


def test_equal_recordings_have_no_findings() -> None:
    assert causes(again=BASE, reversed=BASE, data_2=BASE) == []


def test_rounding_is_no_difference() -> None:
    other = recording(inference([v * (1 + 5e-5) for v in VALUES]), training((2.0, 5.0)))
    assert causes(reversed=other) == []


def test_a_mean_that_is_zero_in_truth_is_no_difference() -> None:
    base, other, larger = (recording(training((2.0, 5.0)), metrics=({"kl/mean": kl},)) for kl in (3.5e-7, -1e-6, 2e-5))
    assert causes(base, tensor_2=other) == []
    assert causes(base, tensor_2=larger) == [("on-one-stage", "")]


def test_what_follows_from_another_difference_is_no_root() -> None:
    other = recording(inference((1.0, 2.5, -3.0, 4.0, 0.7)), training((2.1, 5.0)))
    found = compare(BASE, other, MFCS, n_steps=1, whole=True).differences
    assert {one.call for one in found} == {"infer", "train"}
    assert [(one.call, one.kind, one.sample) for one in roots(found, MFCS)] == [("infer", Kind.OUTPUT, "e")]


@pytest.mark.parametrize(
    ("parts", "cause"), [(((2.5, 2.0), (5.0 / 3, 3.0)), "mean-loss"), (((0.8, 2.0), (1.5, 3.0)), "per-micro-batch")]
)
def test_means_of_micro_batches_are_told_from_other_numbers_of_theirs(parts, cause: str) -> None:
    assert causes(micro_batches_2=recording(inference(), training(*parts))) == [(cause, "train")]


def test_numbers_that_stay_at_their_place_go_by_position() -> None:
    other = recording(inference(VALUES, IDS[::-1]), training((2.0, 5.0)))
    assert causes(reversed=other) == [("by-position", "infer")]


def test_other_dependence_on_order() -> None:
    other = recording(inference((9.0, 2.5, 8.0, 4.0, 0.5)), training((2.0, 5.0)))
    assert causes(reversed=other, shuffled=other) == [("order-dependent", "infer")]
    assert causes(shuffled=other) == [("undeclared-data", "infer")]
    assert causes(again=other, reversed=other) == [("not-repeatable", "infer")]
    assert causes(junk=other) == [("mask-dropped", "infer")]
    assert causes(pipeline_2=other) == [("on-one-stage", "infer")]


def test_generators_of_the_process_are_named() -> None:
    drawing = msgspec_replace(inference(), drawn_from=("torch",))
    other = recording(inference((9.0, 2.5, 8.0, 4.0, 0.5)), training((2.0, 5.0)))
    assert causes(recording(drawing, training((2.0, 5.0))), reversed=other) == [("rank-generator", "infer")]


def test_what_a_resumed_run_does_not_have_is_named() -> None:
    def second(begins_with: float, loss: float) -> CallSeen:
        return msgspec_replace(training((loss, 5.0)), step=2, state_before={"mean": (begins_with,)})

    first = (inference(), training((2.0, 5.0)))
    base, other = recording(*first, second(0.5, 2.0)), recording(*first, second(0.0, 3.0))
    compared = compare(base, other, MFCS, n_steps=2, whole=True)
    [found] = Diagnosis(base, {"resumed": (other, compared)}, MFCS).findings()
    assert (found.cause.name, found.call, found.attributes) == ("state-not-saved", "train", (("train", "mean"),))
    assert found.evidence == ("attribute 'mean' of 'train' begins step 2 with 0.5, and with 0 if resumed",)


def test_values_scaled_by_each_rank() -> None:
    first = inference([2 * v + 1 for v in VALUES[:3]], IDS[:3])
    second = inference([3 * v for v in VALUES[3:]], IDS[3:], rank=1)
    assert causes(data_2=recording(first, second, training((2.0, 5.0)))) == [("per-rank", "infer")]


def advantages(seen: CallSeen, ids: tuple[str, ...], values: tuple[float, ...]) -> CallSeen:
    rows = {i: Rows((1,), (v,)) for i, v in zip(ids, values, strict=True)}
    return msgspec.structs.replace(seen, ids=ids, outputs={"advantage": rows})


@pytest.mark.parametrize("shift", [(-1.0, 2.0), (0.0, 0.5)])
@pytest.mark.parametrize("is_scaled", [True, False])
def test_advantages_are_told_before_the_loss_that_follows_from_them(shift, is_scaled: bool) -> None:
    base = recording(inference(), advantages(training((2.0, 5.0)), IDS, VALUES))
    own = [tuple(v + by for v in part) for part, by in zip((VALUES[:3], VALUES[3:]), shift, strict=True)]
    if not is_scaled:
        own[0] = tuple(abs(v) ** 0.5 + 3 for v in own[0])
    shares = [
        advantages(training((0.7 * rank + 1.0, 2.5), rank=rank), ids, values)
        for rank, (ids, values) in enumerate(zip((IDS[:3], IDS[3:]), own, strict=True))
    ]
    other = recording(inference(), *shares)
    found = compare(base, other, MFCS, n_steps=1, whole=True)
    [finding] = Diagnosis(base, {"data-2": (other, found)}, MFCS).findings()
    assert (finding.cause.name, finding.call, finding.names) == ("per-rank", "train", ("advantage",))
    assert ("scaled and shifted" in finding.evidence[0]) == is_scaled
    assert "rollout.moments(x), rollout.maximum(x)" in finding.cause.remedy


def test_advantages_alone_are_rounding() -> None:
    base = recording(inference(), advantages(training((2.0, 5.0)), IDS, VALUES))
    other = recording(inference(), advantages(training((2.0, 5.0)), IDS, tuple(v + 0.1 for v in VALUES)))
    assert compare(base, other, MFCS, n_steps=1, whole=True).differences == ()


def test_metrics_of_a_rank() -> None:
    base = recording(inference(), training((2.0, 5.0), metrics={"m": 1.0}), metrics=({"m": 1.0},))
    one, two = (training((2.0, 5.0), metrics={"m": m}, rank=r) for r, m in enumerate((0.8, 1.3)))
    one = msgspec_replace(one, minibatches=base.of(1, "train")[0].minibatches)
    two = msgspec_replace(two, minibatches=base.of(1, "train")[0].minibatches)
    other = recording(inference(), one, two, metrics=({"m": 0.8},))
    assert causes(base, data_2=other) == [("rank-local-metric", "train")]
    equal = recording(inference(), replace_metrics(one, 0.8), replace_metrics(two, 0.8), metrics=({"m": 0.8},))
    assert causes(base, data_2=equal) == [("mean-of-means", "train")]


def test_a_normaliser_of_a_rank() -> None:
    other = recording(inference(), training((2.0, 5.0), normaliser=6.0))
    assert causes(data_2=other) == [("local-normaliser", "train")]


def replace_metrics(seen: CallSeen, value: float) -> CallSeen:
    return msgspec_replace(seen, metrics={"m": value})


def msgspec_replace(seen: CallSeen, **changes: object) -> CallSeen:
    return msgspec.structs.replace(seen, **changes)


def test_deviations_below_the_floor_are_called_rounding() -> None:
    assert Comparison(()).within == "rounding"
    assert Comparison((), largest=3e-6).within == "3.0e-06"

"""The native engine alone on one rank: results do not depend on micro-batches, state is exact, errors name the role."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realrl.algo.api import ForwardOutput, LossOutput, MicroBatching, TrainResult
from realrl.config.schema import GenerationConfig, OptimizerConfig
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.train.packing import packed_positions
from realrl.errors import CallError
from realrl.model.files.hf import load_model
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.plan.samples import prefixes
from realrl.sched.messages import KeySchema, Per
from realrl.shape import HeadKind
from tests.helpers.sharded import save_engine
from tests.helpers.training import CONFIG, OPTIMIZER, make_batch, make_engine, masked_nll, n_masked

ONE = MicroBatching()
SPLITS = [MicroBatching(n_mbs=2), MicroBatching(n_mbs=3), MicroBatching(n_mbs=99), MicroBatching(max_tokens_per_mb=30)]


def train(engine: DecoderEngine, batch: SequenceSample, micro_batching: MicroBatching = ONE, n: int = 3) -> TrainResult:
    for _ in range(n):
        result = engine.train_batch(batch, masked_nll, normaliser=n_masked(batch), micro_batching=micro_batching)
    return result


def parameters(engine: DecoderEngine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.decoder.named_parameters()}


@pytest.mark.parametrize("micro_batching", SPLITS)
def test_training_does_not_depend_on_micro_batches(micro_batching: MicroBatching) -> None:
    batch = make_batch()
    whole, split = make_engine(), make_engine()
    expected, result = train(whole, batch), train(split, batch, micro_batching)
    assert result.stats == pytest.approx(expected.stats, rel=1e-5)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for name, p in parameters(split).items():
        torch.testing.assert_close(p, whole.decoder.get_parameter(name), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_beginnings_that_sequences_share_are_computed_once(
    head: HeadKind, compute_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(sequences_per_sample=4, n_shared=12)
    n_rows = batch.n_rows("input_ids")

    def result() -> tuple[torch.Tensor, float, int]:
        engine = make_engine(head=head, compute_dtype=compute_dtype)
        n_computed: list[int] = []
        engine.decoder.blocks[0].register_forward_hook(lambda _, x, __: n_computed.append(len(x[0])))

        def loss(out: ForwardOutput, _: SequenceSample) -> LossOutput:
            return LossOutput((out.scores() if head == "value" else out.logprobs()).square().sum())

        grad_norm = engine.train_batch(batch, loss, normaliser=n_rows, micro_batching=ONE).grad_norm
        post = (lambda out, _: out.scores()) if head == "value" else (lambda out, _: out.logprobs())
        forward = engine.forward(batch, post, micro_batching=MicroBatching(n_mbs=2))
        return forward, grad_norm, n_computed[0]

    expected, norm, n_plain = result()
    monkeypatch.setattr(prefixes, "CALL_COST", 0)
    found, found_norm, n_shared = result()
    assert (n_plain, n_shared) == (n_rows, n_rows - 10 * 3 * 12)
    exact = compute_dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-4 if exact else 0.1, rtol=1e-4 if exact else 0.05)
    assert found_norm == pytest.approx(norm, rel=1e-5 if exact else 0.02)


@pytest.mark.parametrize("micro_batching", [ONE, *SPLITS])
@pytest.mark.parametrize("sequences_per_sample", [1, 2])
def test_forward_keeps_the_order_of_the_batch(micro_batching: MicroBatching, sequences_per_sample: int) -> None:
    batch = make_batch(sequences_per_sample=sequences_per_sample)
    engine = make_engine()
    result = engine.forward(batch, lambda out, _: out.logprobs(), micro_batching=micro_batching)
    alone = [
        engine.forward(part, lambda out, _: out.logprobs(), micro_batching=ONE)
        for part in batch.split([[i] for i in range(len(batch))])
    ]
    torch.testing.assert_close(result, torch.cat(alone), atol=1e-5, rtol=1e-5)
    assert not result.requires_grad
    assert len(result) == batch.n_rows("mask")


def test_forward_of_a_value_head_scores_every_token() -> None:
    batch = make_batch()
    engine = make_engine(head="value")
    scores = engine.forward(batch, lambda out, _: out.scores(), micro_batching=MicroBatching(n_mbs=3))
    assert scores.shape == (batch.n_rows("input_ids"),)
    assert scores.dtype == torch.float32
    assert scores.std() > 0


def test_forward_of_an_empty_share() -> None:
    empty = make_batch().split([[], range(10)])[0]
    for micro_batching in (ONE, *SPLITS):
        result = make_engine().forward(empty, lambda out, _: out.logprobs(), micro_batching=micro_batching)
        assert result.shape == (0,)


@pytest.mark.parametrize("call", ["train", "forward"])
def test_a_sequence_beyond_the_learned_positions(call: str) -> None:
    batch = make_batch()
    longest = max(batch.flat_seqlens("input_ids"))
    engines = [
        DecoderEngine(
            random_model(replace(CONFIG, learned_positions=True, max_positions=n), seed=1),
            role="actor",
            optimizer=OPTIMIZER,
            total_optimizer_steps=3,
        )
        for n in (longest, longest - 1)
    ]
    for engine in engines:
        expectation = nullcontext() if engine is engines[0] else pytest.raises(CallError, match=said(longest))
        with expectation:
            if call == "train":
                train(engine, batch, n=1)
            else:
                engine.forward(batch, lambda out, _: out.logprobs(), micro_batching=ONE)


def said(longest: int) -> str:
    return f"a sequence of {longest} tokens is too long for role 'actor', which has learned {longest - 1} positions"


def test_mask_zeroes_unselected_rows_and_their_gradient() -> None:
    batch = make_batch()
    engine = make_engine()
    mask = batch["mask"]

    def gradient_of(use_mask: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen = []

        def loss(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
            logprobs = out.logprobs(mask=mb["mask"] if use_mask else None)
            seen.append(logprobs.detach())
            return LossOutput(-(logprobs * mb["mask"]).sum())

        grads: dict[str, torch.Tensor] = {}

        def skip(_: object) -> bool:
            grads.update({name: p.grad.clone() for name, p in engine.decoder.named_parameters() if p.grad is not None})
            return True

        engine.train_batch(batch, loss, normaliser=1.0, micro_batching=ONE, skip_step=skip)
        return seen[0], grads

    (masked, masked_grads), (full, full_grads) = gradient_of(True), gradient_of(False)
    assert torch.equal(masked[~mask], torch.zeros(int((~mask).sum())))
    torch.testing.assert_close(masked[mask], full[mask])
    for name, grad in full_grads.items():
        torch.testing.assert_close(masked_grads[name], grad, atol=1e-4, rtol=1e-4)


def test_a_mask_that_selects_nothing_trains_nothing() -> None:
    batch = make_batch()
    nothing = batch.update(
        SequenceSample(
            batch.ids,
            {"mask": KeySchema("bool", Per.TRANSITION)},
            {"mask": batch.seqlens["mask"]},
            {"mask": torch.zeros_like(batch["mask"])},
        )
    )

    def loss(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
        return LossOutput(-out.logprobs(mask=mb["mask"]).sum())

    result = make_engine().train_batch(nothing, loss, normaliser=1.0, micro_batching=ONE)
    assert result.grad_norm == 0.0


def test_against_plain_torch() -> None:
    """Loss, gradient norm, clipping, decay groups and schedule, recomputed with the decoder alone."""
    batch = make_batch()
    seqlens = batch.flat_seqlens("input_ids")
    has_next = torch.cat([torch.arange(n) < n - 1 for n in seqlens])
    engine, reference = make_engine(), make_engine(optimizer=None).decoder.requires_grad_(True)
    decayed = [p for p in reference.parameters() if p.dim() == 2]
    plain = [p for p in reference.parameters() if p.dim() == 1]
    assert len(plain) == 13  # five norms and four biases in each of two blocks
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    for step in range(4):
        adamw.zero_grad()
        hidden = reference(batch["input_ids"], packed_positions(seqlens, torch.device("cpu")), PackedAttention(seqlens))
        logits = reference.head(hidden) / 0.8
        keep = has_next.nonzero()[:, 0][batch["mask"]]
        log_p = logits[keep].log_softmax(-1)
        nll = -log_p.gather(1, batch["input_ids"][keep + 1, None]).sum()
        entropy = -(log_p.exp() * log_p).sum()
        ((nll - 0.01 * entropy) / n_masked(batch)).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        lr = [0.5e-2, 1e-2, 1e-2, 1e-2 * 7 / 8][step]
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        result = train(engine, batch, n=1)
        assert result.lr == pytest.approx(lr)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert result.stats["nll"] == pytest.approx(nll.item() / n_masked(batch), rel=1e-5)
    for name, p in parameters(engine).items():
        torch.testing.assert_close(p, reference.get_parameter(name).detach(), atol=1e-4, rtol=1e-3)


def test_skipped_step_changes_no_parameter_but_the_schedule() -> None:
    batch = make_batch()
    engine = make_engine()
    train(engine, batch, n=2)
    before, lr_before = parameters(engine), train(engine, batch, n=1).lr
    before = parameters(engine)
    seen = []

    def skip(stats: dict[str, float]) -> bool:
        seen.append(stats)
        return True

    skipped = engine.train_batch(batch, masked_nll, normaliser=n_masked(batch), micro_batching=ONE, skip_step=skip)
    assert not skipped.stepped
    assert seen == [skipped.stats]
    assert skipped.lr < lr_before
    for name, p in parameters(engine).items():
        assert torch.equal(p, before[name])
    assert train(engine, batch, n=1).lr < skipped.lr


def test_training_lowers_the_loss_in_both_precisions() -> None:
    batch = make_batch()
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(compute_dtype=dtype, optimizer=OptimizerConfig(lr=1e-2), n_steps=100)
        first, last = train(engine, batch, n=1), train(engine, batch, n=15)
        assert last.stats["nll"] < 0.7 * first.stats["nll"]
        assert all(p.dtype == dtype for p in engine.decoder.parameters())


def test_bf16_keeps_small_updates_in_float32_masters() -> None:
    """A bf16 weight near 1 cannot move by 1e-4; its master must."""
    batch = make_batch()
    engine = make_engine(compute_dtype=torch.bfloat16, optimizer=OptimizerConfig(lr=1e-4, schedule="constant"))
    train(engine, batch, n=1)
    name = "blocks.0.attention_norm.weight"
    master = engine.state_dict()["parameters"][name]["master"]
    working = engine.decoder.get_parameter(name)
    assert master.dtype == torch.float32
    assert not torch.equal(master, torch.ones_like(master))
    assert torch.equal(working, master.to(torch.bfloat16))
    assert all(p.grad is None for p in engine.decoder.parameters())


def test_bf16_gradients_accumulate_in_float32() -> None:
    batch = make_batch(24)
    whole = make_engine(compute_dtype=torch.bfloat16)
    split = make_engine(compute_dtype=torch.bfloat16)
    expected, result = train(whole, batch, n=1), train(split, batch, MicroBatching(n_mbs=24), n=1)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_continues_bit_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    batch = make_batch()
    engine, resumed = make_engine(compute_dtype=dtype), make_engine(compute_dtype=dtype)
    train(engine, batch, n=3)
    torch.save(engine.state_dict(), tmp_path / "state.pt")
    save_engine(engine, tmp_path)
    expected = train(engine, batch, n=2)
    resumed.decoder.load_state_dict(load_model(tmp_path, dtype=dtype).state_dict())
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert train(resumed, batch, n=2) == expected
    for name, p in parameters(resumed).items():
        assert torch.equal(p, engine.decoder.get_parameter(name))


def test_state_of_another_precision_is_refused() -> None:
    state = make_engine().state_dict()
    with pytest.raises(KeyError, match=r"embedding\.weight"):
        make_engine(compute_dtype=torch.bfloat16).load_state_dict(state)


def test_saved_model_is_the_trained_one(tmp_path: Path) -> None:
    engine = make_engine()
    train(engine, make_batch())
    save_engine(engine, tmp_path)
    for name, p in load_model(tmp_path).named_parameters():
        assert torch.equal(p, engine.decoder.get_parameter(name))


def test_generate_returns_responses_of_each_prompt() -> None:
    batch = make_batch(3).remap({"input_ids": "prompt_ids"})
    result = make_engine().generate(batch, GenerationConfig(n_responses=2, max_new_tokens=4), seed=1, step=1, eos_id=2)
    assert len(result.responses) == 6
    assert all(1 <= len(tokens) <= 4 for tokens in result.responses)


def test_ends_that_the_files_of_a_model_name_end_responses() -> None:
    batch, generation = make_batch(3).remap({"input_ids": "prompt_ids"}), GenerationConfig(max_new_tokens=8)
    engine = make_engine()
    free = engine.generate(batch, generation, seed=1, step=1, eos_id=2).responses
    end = int(free[0][1])
    engine.decoder.config = replace(engine.decoder.config, eos_token_ids=(end, -1, 10**6))
    result = engine.generate(batch, generation, seed=1, step=1, eos_id=2)
    for tokens, whole in zip(result.responses, free, strict=True):
        stops = (whole == end).nonzero().flatten().tolist()
        assert torch.equal(tokens, whole[: stops[0] + 1] if stops else whole)
    assert not result.truncated[0]


def test_all_reduce_alone_copies() -> None:
    x = torch.ones(3)
    assert torch.equal(make_engine().all_reduce(x), x)
    assert make_engine().all_reduce(x, "max") is not x


# ---------------------------------------------------------------- errors


def test_frozen_role_cannot_train_and_keeps_no_state() -> None:
    engine = make_engine(optimizer=None)
    assert engine.state_dict() == {}
    engine.load_state_dict({})
    with pytest.raises(CallError, match="role 'actor' is frozen"):
        train(engine, make_batch())
    with pytest.raises(ValueError, match="role 'actor' is frozen"):
        engine.load_state_dict({"n_taken": 1})


def test_empty_share_cannot_train() -> None:
    with pytest.raises(CallError, match="role 'actor' has no sample of a minibatch"):
        make_engine().train_batch(
            make_batch().split([[], range(10)])[0], masked_nll, normaliser=1.0, micro_batching=ONE
        )


@pytest.mark.parametrize("normaliser", [0.0, -1.0, float("nan")])
def test_normaliser_must_be_positive(normaliser: float) -> None:
    with pytest.raises(CallError, match="role 'actor' trains with normaliser"):
        make_engine().train_batch(make_batch(), masked_nll, normaliser=normaliser, micro_batching=ONE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_loss_that_is_not_finite(value: float) -> None:
    engine = make_engine()
    before = parameters(engine)
    with pytest.raises(CallError, match=f"the loss of role 'actor' is {value}"):
        engine.train_batch(
            make_batch(),
            lambda out, _: LossOutput(-out.logprobs().sum() * value),
            normaliser=1.0,
            micro_batching=ONE,
        )
    assert all(torch.equal(p, before[name]) for name, p in parameters(engine).items())


def test_gradient_that_is_not_finite() -> None:
    def loss(out: ForwardOutput, _: SequenceSample) -> LossOutput:
        x = out.logprobs().sum()
        return LossOutput((x - x).sqrt())  # 0, with an infinite slope

    with pytest.raises(CallError, match="the gradient of role 'actor' is not finite"):
        make_engine().train_batch(make_batch(), loss, normaliser=1.0, micro_batching=ONE)


def test_head_that_does_not_fit_the_question() -> None:
    batch = make_batch()
    with pytest.raises(CallError, match="role 'actor' predicts tokens and has no scores"):
        make_engine().forward(batch, lambda out, _: out.scores(), micro_batching=ONE)
    value = make_engine(head="value")
    with pytest.raises(CallError, match="role 'actor' gives scores and has no log-probabilities"):
        value.forward(batch, lambda out, _: out.logprobs(), micro_batching=ONE)
    with pytest.raises(CallError, match="role 'actor' gives scores and cannot generate"):
        value.generate(batch, GenerationConfig(), seed=1, step=1, eos_id=2)
    none = GenerationConfig().model_copy(update={"max_new_tokens": -16})
    with pytest.raises(CallError, match="max_new_tokens=-16 leaves no room for a response"):
        make_engine().generate(batch, none, seed=1, step=1, eos_id=2)


def test_mask_of_the_wrong_length() -> None:
    with pytest.raises(CallError, match="a mask for role 'actor' has 3 rows"):
        make_engine().forward(
            make_batch(), lambda out, _: out.logprobs(mask=torch.ones(3, dtype=torch.bool)), micro_batching=ONE
        )


@pytest.mark.parametrize("micro_batching", [ONE, MicroBatching(n_mbs=2)])
def test_a_loss_without_gradient_is_named(micro_batching: MicroBatching) -> None:
    def detached_nll(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
        return LossOutput(masked_nll(out, mb).loss.detach())

    engine, batch = make_engine(), make_batch()
    before = parameters(engine)
    message = f"'detached_nll' of role '{engine.role}' returned has no gradient: it would train nothing"
    with pytest.raises(CallError, match=message) as caught:
        engine.train_batch(batch, detached_nll, normaliser=n_masked(batch), micro_batching=micro_batching)
    assert f"Look at {__file__}:" in str(caught.value.remedy)
    assert ".detach()" in str(caught.value.remedy)
    assert all(torch.equal(p, before[name]) for name, p in parameters(engine).items())


def test_a_loss_of_zero_may_lack_a_gradient() -> None:
    def nothing_counts(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
        return LossOutput(torch.zeros(()))

    result = make_engine().train_batch(make_batch(), nothing_counts, normaliser=1.0, micro_batching=ONE)
    assert result.grad_norm == 0.0

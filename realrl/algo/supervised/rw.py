"""Reward model: trained on preference pairs, gives one number per sequence at its last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from realrl.algo.api import CallContext, ForwardOutput, LossOutput, Model, ModelInterface
from realrl.algo.losses import pair_loss
from realrl.algo.packed import last_token
from realrl.algo.training import train_minibatches
from realrl.data.sample import SequenceSample
from realrl.errors import CallError
from realrl.sched.messages import KeySchema, Per


class RewardModel(ModelInterface):
    """`inference`: `input_ids` -> `rewards`. `train_step`: `input_ids`, a chosen and a rejected one a sample.

    Metrics, under the role's name: loss, accuracy, chosen_mean, rejected_mean, n_pairs, grad_norm, lr.
    """

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """`rewards`, float32 per sequence, on the engine's device.

        A truncated sequence is scored with an end-of-sequence token appended, because training reads the score there.
        """
        batch = batch.select(batch.ids, ("input_ids",)).to(model.engine.device)
        closed = with_end(batch, model.tokenizer.eos_token_id)
        rewards = model.engine.forward(closed, _last_scores, micro_batching=ctx.micro_batching)
        return batch.derive("input_ids", {"rewards": (KeySchema("float32", Per.SEQUENCE), rewards.float())})

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        """One optimizer step per minibatch of `ctx`.

        Raises:
            CallError: a sample that is not a pair.
        """
        check_pairs(model, batch, ctx)
        batch = batch.select(batch.ids, ("input_ids",)).to(model.engine.device)
        summary = train_minibatches(model, batch, ctx, _pair_loss, count=len)
        role = model.name.role
        return {**summary.metrics(role), f"{role}/n_pairs": summary.n_units}

    def evaluate(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """`loss`, `accuracy` and `margin` (chosen less rejected score) of each pair; `weight` is 1.

        Raises:
            CallError: a sample that is not a pair.
        """
        check_pairs(model, batch, ctx)
        batch = batch.select(batch.ids, ("input_ids",)).to(model.engine.device)
        scores = model.engine.forward(batch, _last_scores, micro_batching=ctx.micro_batching).float()
        stats = [pair_loss(pair).stats for pair in scores.view(-1, 2)]
        margins = [float(stat["chosen_mean"] - stat["rejected_mean"]) for stat in stats]
        return pair_metrics(batch, stats, margins)


def pair_metrics(
    batch: SequenceSample, stats: Sequence[Mapping[str, torch.Tensor]], margins: Sequence[float]
) -> SequenceSample:
    """Evaluation metrics of a batch of pairs.

    Args:
        stats: `loss` and `accuracy` of each pair.
        margins: margin of each pair.
    """
    columns = {
        "weight": [1.0] * len(stats),
        "loss": [float(stat["loss"]) for stat in stats],
        "accuracy": [float(stat["accuracy"]) for stat in stats],
        "margin": list(margins),
    }
    device, schema = batch["input_ids"].device, KeySchema("float32", Per.SAMPLE)
    return batch.derive(
        "input_ids", {name: (schema, torch.tensor(values, device=device)) for name, values in columns.items()}
    )


def check_pairs(model: Model, batch: SequenceSample, ctx: CallContext) -> None:
    """Refuse a batch of anything but two sequences a sample.

    Raises:
        CallError: names the first such sample.
    """
    for sample_id, lengths in zip(batch.ids, batch.seqlens["input_ids"], strict=True):
        if len(lengths) != 2:
            raise CallError(
                f"{ctx.call} of role {model.name.role!r} at step {ctx.step} needs two sequences a sample "
                f"(chosen, rejected), but sample {sample_id!r} has {len(lengths)}",
                remedy="Train on a dataset of preference pairs.",
                call=ctx.call,
                step=ctx.step,
            )


def with_end(batch: SequenceSample, eos_id: int) -> SequenceSample:
    """The `input_ids` of `batch`, with `eos_id` after every sequence that does not end with it."""

    def close(tokens: torch.Tensor) -> torch.Tensor:
        return tokens if len(tokens) and tokens[-1] == eos_id else torch.cat([tokens, tokens.new_tensor([eos_id])])

    sequences = [[close(tokens) for tokens in sample] for sample in batch.sequences("input_ids")]
    return SequenceSample.from_lists(batch.ids, {"input_ids": (batch.schemas["input_ids"], sequences)})


def _last_scores(out: ForwardOutput, mb: SequenceSample) -> torch.Tensor:
    return last_token(out.scores(), mb.cu_seqlens("input_ids"))


def _pair_loss(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
    return pair_loss(_last_scores(out, mb))

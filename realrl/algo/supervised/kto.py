"""Kahneman-Tversky optimisation: a policy from single answers that are labelled good or bad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from realrl.algo.api import CallContext, ForwardOutput, LossOutput, Model, ModelInterface
from realrl.algo.packed import response_mask
from realrl.algo.policy.actor import training_temperature
from realrl.algo.supervised.preference_losses import answer_sums, kto_loss
from realrl.algo.supervised.rw import check_pairs
from realrl.algo.training import TrainSummary, train_minibatches
from realrl.config.algorithms import KTOOptions
from realrl.data.sample import SequenceSample
from realrl.sched.messages import Per

KEYS = ("input_ids", "prompt_mask", "ref_logprobs", "label")


class KTO(ModelInterface):
    """train_step: `input_ids`, `prompt_mask` and `ref_logprobs`, a sample's own answer and one of another row; `label`.

    Metrics, under the role's name: loss, kl, good_reward, bad_reward and margin (in steps with both kinds of answers),
    n_good, n_bad, grad_norm, lr.
    """

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        """One optimizer step per minibatch of `ctx`; the loss is a mean over the answers of a minibatch.

        The reference point of a minibatch is the mean log-ratio of its mismatched answers under the parameters that the
        minibatch starts from, over all ranks and micro-batches, and at least 0. It has no gradient.

        Raises:
            CallError: a sample without its second, mismatched answer.
        """
        check_pairs(model, batch, ctx)
        options: KTOOptions = ctx.algorithm
        batch = batch.select(batch.ids, KEYS).to(model.engine.device)
        own, mismatched = take_sequence(batch, 0), take_sequence(batch, 1)
        summaries, kls = [], []
        for ids in ctx.minibatches:
            alone = replace(ctx, minibatches=(ids,), n_passes=1)
            kl = _mean_logratio(model, mismatched.select(ids), alone)
            kls.append(max(kl, 0.0))
            summaries.append(_train(model, own, alone, options, kls[-1]))
        summary = _join(summaries, ctx.n_passes)
        stats = {**_stats(summary), "kl": math.fsum(kls) / len(kls)}
        return replace(summary, stats=stats).metrics(model.name.role)


def take_sequence(batch: SequenceSample, index: int) -> SequenceSample:
    """Every sample with its sequence number `index` alone; keys per sample stay."""
    schemas = {key: schema for key, schema in batch.schemas.items() if schema.per is not Per.SAMPLE}
    taken = SequenceSample.from_lists(
        batch.ids,
        {key: (schema, [[parts[index]] for parts in batch.sequences(key)]) for key, schema in schemas.items()},
    )
    return taken.update(batch.select(batch.ids, [key for key in batch.keys if key not in schemas]))


def _logratios(out: ForwardOutput, mb: SequenceSample, temperature: float) -> torch.Tensor:
    logprobs = out.logprobs(temperature, mask=response_mask(mb))
    return answer_sums(logprobs - mb["ref_logprobs"], mb)[0]


def _mean_logratio(model: Model, minibatch: SequenceSample, ctx: CallContext) -> float:
    logratios = partial(_logratios, temperature=training_temperature(ctx.generation))
    values = model.engine.forward(minibatch, logratios, micro_batching=ctx.micro_batching).double()
    total, count = model.engine.all_reduce(torch.stack([values.sum(), values.new_tensor(len(values))])).tolist()
    return float(total / max(count, 1.0))


def _train(model: Model, batch: SequenceSample, ctx: CallContext, options: KTOOptions, kl: float) -> TrainSummary:
    temperature = training_temperature(ctx.generation)

    def loss(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
        return kto_loss(
            _logratios(out, mb, temperature),
            mb["label"],
            kl,
            beta=options.beta,
            desirable_weight=options.desirable_weight,
            undesirable_weight=options.undesirable_weight,
        )

    return train_minibatches(model, batch, ctx, loss, count=len)


def _join(parts: Sequence[TrainSummary], n_passes: int) -> TrainSummary:
    """Combine the summaries of single minibatches of several passes."""
    n_units = math.fsum(part.n_units for part in parts)
    return TrainSummary(
        stats={name: math.fsum(p.stats[name] * p.n_units for p in parts) / n_units for name in parts[0].stats},
        grad_norm=math.fsum(part.grad_norm for part in parts) / len(parts),
        lr=parts[-1].lr,
        n_skipped=0,
        n_units=n_units / n_passes,
    )


def _stats(summary: TrainSummary) -> dict[str, float]:
    """Convert the statistics of `kto_loss` to means over good and over bad answers."""
    stats = {"loss": summary.stats["loss"]}
    for kind in ("good", "bad"):
        share = summary.stats[kind]
        stats[f"n_{kind}"] = float(round(share * summary.n_units))
        if share > 0.0:
            stats[f"{kind}_reward"] = summary.stats[f"{kind}_reward"] / share
    if "good_reward" in stats and "bad_reward" in stats:
        stats["margin"] = stats["good_reward"] - stats["bad_reward"]
    return stats

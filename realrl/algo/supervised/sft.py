"""Supervised fine-tuning: token mean of the negative log-likelihood over answer tokens."""

from __future__ import annotations

import math

import torch

from realrl.algo.api import CallContext, ForwardOutput, LossOutput, Model, ModelInterface
from realrl.algo.losses import nll_loss
from realrl.algo.packed import n_actions, response_mask
from realrl.algo.supervised.preference_losses import answer_sums
from realrl.algo.training import train_minibatches
from realrl.data.sample import SequenceSample
from realrl.sched.messages import KeySchema, Per

MAX_EXPONENT = 700.0
PER_SAMPLE = KeySchema("float32", Per.SAMPLE)


class SFT(ModelInterface):
    """Reads `input_ids` and `prompt_mask`. Metrics, under the role's name: loss, ppl, n_tokens, grad_norm, lr."""

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        """One optimizer step per minibatch of `ctx`; moves what it reads to the engine's device."""
        batch = batch.select(batch.ids, ("input_ids", "prompt_mask")).to(model.engine.device)
        summary = train_minibatches(model, batch, ctx, _loss, count=n_actions)
        role = model.name.role
        return {
            **summary.metrics(role),
            f"{role}/ppl": math.exp(min(summary.stats["loss"], MAX_EXPONENT)),
            f"{role}/n_tokens": summary.n_units,
        }

    def evaluate(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """Per sample: `weight`, its number of answer tokens, and `loss`, their mean negative log-likelihood."""
        batch = batch.select(batch.ids, ("input_ids", "prompt_mask")).to(model.engine.device)
        sums = model.engine.forward(batch, _answer_sums, micro_batching=ctx.micro_batching).double()
        losses = -sums[:, 0] / sums[:, 1].clamp(min=1.0)
        return batch.derive(
            "input_ids", {"weight": (PER_SAMPLE, sums[:, 1].float()), "loss": (PER_SAMPLE, losses.float())}
        )


def _answer_sums(out: ForwardOutput, mb: SequenceSample) -> torch.Tensor:
    sums, counts = answer_sums(out.logprobs(mask=response_mask(mb)), mb)
    return torch.stack([sums, counts.to(sums)], dim=1)


def _loss(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
    mask = response_mask(mb)
    return nll_loss(out.logprobs(mask=mask), mask)

"""Supervised fine-tuning: token mean of the negative log-likelihood over answer tokens."""

from __future__ import annotations

import math

from realrl.algo.api import CallContext, ForwardOutput, LossOutput, Model, ModelInterface
from realrl.algo.losses import nll_loss
from realrl.algo.packed import response_mask
from realrl.algo.training import train_minibatches
from realrl.data.sample import SequenceSample

MAX_EXPONENT = 700.0


class SFT(ModelInterface):
    """Reads `input_ids` and `prompt_mask`. Metrics, under the role's name: loss, ppl, n_tokens, grad_norm, lr."""

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        """One pass over the minibatches of `ctx`; moves what it reads to the engine's device."""
        batch = batch.select(batch.ids, ("input_ids", "prompt_mask")).to(model.engine.device)
        summary = train_minibatches(model, batch, ctx, _loss, count=lambda mb: int(response_mask(mb).sum()))
        role = model.name.role
        return {
            **summary.metrics(role),
            f"{role}/ppl": math.exp(min(summary.stats["loss"], MAX_EXPONENT)),
            f"{role}/n_tokens": summary.n_units,
        }


def _loss(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
    mask = response_mask(mb)
    return nll_loss(out.logprobs(mask=mask), mask)

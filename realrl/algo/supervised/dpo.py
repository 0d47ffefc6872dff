"""Direct preference optimisation: a policy from pairs of a chosen and a rejected answer, without a reward model."""

from __future__ import annotations

import torch

from realrl.algo.api import CallContext, ForwardOutput, LossOutput, Model, ModelInterface
from realrl.algo.packed import response_mask
from realrl.algo.policy.actor import training_temperature
from realrl.algo.supervised.preference_losses import answer_sums, dpo_loss
from realrl.algo.supervised.rw import check_pairs, pair_metrics
from realrl.algo.training import train_minibatches
from realrl.config.algorithms import DPOOptions
from realrl.data.sample import SequenceSample

KEYS = ("input_ids", "prompt_mask", "ref_logprobs")


class DPO(ModelInterface):
    """train_step: `input_ids`, `prompt_mask` and `ref_logprobs`, a chosen and a rejected answer a sample.

    Metrics, under the role's name: loss, accuracy, margin, chosen_reward, rejected_reward (see `dpo_loss`), sft_loss if
    it has a weight, n_pairs, grad_norm, lr.
    """

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        """One optimizer step per minibatch of `ctx`; the loss is a mean over the pairs of a minibatch.

        The SFT term is each chosen answer's mean negative log-likelihood per token, mean over pairs: Pang et al. 2024,
        "Iterative reasoning preference optimization", equation 1, whose alpha is `sft_coef`.

        Raises:
            CallError: a sample that is not a pair.
        """
        check_pairs(model, batch, ctx)
        options: DPOOptions = ctx.algorithm
        batch = batch.select(batch.ids, KEYS).to(model.engine.device)
        temperature = training_temperature(ctx.generation)

        def loss(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
            logprobs = out.logprobs(temperature, mask=response_mask(mb))
            logratios, counts = answer_sums(logprobs - mb["ref_logprobs"], mb)
            result = _loss(logratios, counts, options)
            return _with_sft(result, logprobs, mb, options.sft_coef) if options.sft_coef else result

        summary = train_minibatches(model, batch, ctx, loss, count=len)
        role = model.name.role
        return {**summary.metrics(role), f"{role}/n_pairs": summary.n_units}

    def evaluate(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """`loss`, `accuracy` and `margin` of each pair, as `dpo_loss` has them, without an SFT term; `weight` is 1.

        Raises:
            CallError: a sample that is not a pair.
        """
        check_pairs(model, batch, ctx)
        options: DPOOptions = ctx.algorithm
        batch = batch.select(batch.ids, KEYS).to(model.engine.device)
        temperature = training_temperature(ctx.generation)

        def sums(out: ForwardOutput, mb: SequenceSample) -> torch.Tensor:
            logprobs = out.logprobs(temperature, mask=response_mask(mb))
            logratios, counts = answer_sums(logprobs - mb["ref_logprobs"], mb)
            return torch.stack([logratios, counts.to(logratios)], dim=1)

        found = model.engine.forward(batch, sums, micro_batching=ctx.micro_batching).float().view(-1, 2, 2)
        stats = [_loss(pair[:, 0], pair[:, 1], options).stats for pair in found]
        return pair_metrics(batch, stats, [float(stat["margin"]) for stat in stats])


def _loss(logratios: torch.Tensor, counts: torch.Tensor, options: DPOOptions) -> LossOutput:
    o = options
    return dpo_loss(logratios, counts, kind=o.loss, beta=o.beta, label_smoothing=o.label_smoothing)


def _with_sft(result: LossOutput, logprobs: torch.Tensor, mb: SequenceSample, coef: float) -> LossOutput:
    sums, counts = answer_sums(logprobs, mb)
    sft_loss = -(sums / counts.clamp(min=1))[::2].sum()
    total = result.loss + coef * sft_loss
    return LossOutput(total, {**result.stats, "loss": total.detach(), "sft_loss": sft_loss.detach()})

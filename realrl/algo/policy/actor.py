"""The policy of every policy-gradient algorithm: it generates, gives log-probabilities, and learns from rewards.

    batch ──pieces──► advantages (weighted sum, whitened) ──► minibatches ──► loss per action ──► mean ──► step

The options choose advantage, loss and sampler; see `realrl.experiment.pieces`. Every method moves its inputs to
`engine.device` and leaves its outputs there.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from realrl.algo.api import CallContext, Engine, ForwardOutput, LossFn, LossOutput, Model
from realrl.algo.normalise import whiten
from realrl.algo.packed import Actions, n_actions, response_mask
from realrl.algo.policy.gae import batch_metrics
from realrl.algo.policy.piece_calls import advantages_of, loss_of, responses_of
from realrl.algo.policy.piece_results import Writers, check_agreement, noting
from realrl.algo.policy.policy_losses import ActionBatch, kl_estimate
from realrl.algo.policy.pretraining import ANSWER_WEIGHTS, with_answers
from realrl.algo.policy.responses import BEHAVIOR, PER_TRANSITION, pack_responses
from realrl.algo.policy.rollout import Rollout
from realrl.algo.policy.rollout_interface import RolloutInterface
from realrl.algo.training import train_minibatches
from realrl.config.policy_options import DEFAULT_IMPORTANCE_CAP, PolicyOptions
from realrl.config.schema import GenerationConfig
from realrl.data.sample import SequenceSample
from realrl.experiment.pieces import advantage_weights, chosen_pieces, find_piece, sampler_of, training_keys
from realrl.sched.messages import KeySchema, Per

TOKENS = ("input_ids", "prompt_mask")
ADVANTAGES, WEIGHTS, IMPORTANCE = "advantages", "loss_weights", "importance_weights"


class PolicyActor(RolloutInterface):
    """generate: `prompt_ids` -> `input_ids`, `prompt_mask`, `old_logprobs`, `behavior_logprobs`, `truncated`.

    inference: `input_ids`, `prompt_mask` -> `logprobs`. train_step: `input_ids`, `prompt_mask`, `old_logprobs`,
    `truncated`, the keys that the chosen pieces read, and `behavior_logprobs` if losses get `importance_weights`.

    Args:
        greedy: generate the likeliest response instead of sampling.
        adapter: False infers with the base model, without the role's low-rank adapters.
        prefix: stands before names of batch metrics such as `reward/mean`, where a graph trains several policies. Each
            prefix draws its own random numbers.
        top_k: inference also gives this many of the likeliest next tokens, `top_tokens` and `top_logprobs`.
    """

    def __init__(self, *, greedy: bool = False, adapter: bool = True, prefix: str = "", top_k: int = 0) -> None:
        super().__init__()
        self._greedy = greedy
        self._adapter = adapter
        self._prefix = prefix
        self._top_k = top_k

    def generate(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """Sample responses.

        `old_logprobs` come from softmax(logits / temperature), as the log-probabilities that training recomputes do.
        So the ratio is 1 before the first optimizer step, even with top-k, top-p or a minimum length.
        `behavior_logprobs` come from the filtered distribution that was sampled from. Both are 0 on prompt transitions.
        """
        prompts = batch.select(batch.ids, ("prompt_ids",)).to(model.engine.device)
        ctx = replace(ctx, seed=ctx.seed ^ zlib.crc32(self._prefix.encode()))
        sampler = "greedy" if self._greedy else sampler_of(ctx.algorithm)
        result = responses_of(find_piece("sampler", sampler), sampler, model, prompts, ctx)
        return pack_responses(prompts, result)

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """`logprobs`, float32 per transition, at the sampling temperature; 0 on prompt transitions.

        With `top_k`: `top_tokens` (int64) and `top_logprobs` (float32) too, [T - S, k], most likely first; 0 on prompt
        transitions.
        """
        batch = batch.select(batch.ids, TOKENS).to(model.engine.device)
        temperature = training_temperature(ctx.generation)

        def logprobs(out: ForwardOutput, mb: SequenceSample) -> torch.Tensor:
            mask = response_mask(mb)
            chosen = torch.where(mask, out.logprobs(temperature, mask=mask), 0.0)
            return torch.cat([chosen[:, None].double(), *top(out, mask)], dim=1) if self._top_k else chosen

        def top(out: ForwardOutput, mask: torch.Tensor) -> list[torch.Tensor]:
            """Tokens and log-probabilities, [T - S, k] each, in float64, which represents both exactly."""
            found = [part.double() for part in out.top_logprobs(self._top_k, temperature, mask)]
            return [part.new_zeros(len(mask), part.shape[1]).index_put((mask,), part) for part in found]

        plain = {} if self._adapter else {"adapter": False}
        result = model.engine.forward(batch, logprobs, micro_batching=ctx.micro_batching, **plain)
        if not self._top_k:
            return batch.derive("input_ids", {"logprobs": (PER_TRANSITION, result.float())})
        k = result.shape[1] // 2
        columns = {
            "logprobs": (PER_TRANSITION, result[:, 0].float()),
            "top_tokens": (KeySchema("int64", Per.TRANSITION, (k,)), result[:, 1 : 1 + k].long()),
            "top_logprobs": (KeySchema("float32", Per.TRANSITION, (k,)), result[:, 1 + k :].float()),
        }
        return batch.derive("input_ids", columns)

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        """Compute advantages over the whole batch, then train on its minibatches."""
        options: PolicyOptions = ctx.algorithm
        engine, role = model.engine, model.name.role
        optional = (BEHAVIOR,) if BEHAVIOR in batch else ()
        inputs = dict.fromkeys((*TOKENS, "old_logprobs", "truncated", *training_keys(options), *optional))
        rollout = self.rollout(engine, batch.select(batch.ids, tuple(inputs)).to(engine.device), options)
        columns = {ADVANTAGES: mixed_advantages(rollout)}
        ctx.notes.add("advantage", rollout.batch, answer_means(rollout.actions, columns[ADVANTAGES]).tolist())
        self.follow_kl(rollout)
        if BEHAVIOR in rollout.batch:
            columns[IMPORTANCE] = importance_weights(rollout, engine)
        keys, objective = policy_objective(options, training_temperature(ctx.generation))
        data = rollout.batch.select(batch.ids, (*TOKENS, *keys))
        data = data.update(data.derive("input_ids", {key: (PER_TRANSITION, column) for key, column in columns.items()}))
        summary = train_minibatches(
            model,
            [share for one_pass in ctx.single_passes for share in weighted_minibatches(data, rollout, model, one_pass)],
            ctx,
            objective,
            count=n_actions,
            skip=lambda stats: is_too_far(stats, options),
        )
        penalty = {f"{role}/kl_coef": rollout.kl_coef} if _has_kl_penalty(rollout) else {}
        about_batch = {**batch_metrics(rollout), **rollout.metrics}
        return {
            **summary.metrics(role),
            **penalty,
            f"{role}/skipped_minibatches": float(summary.n_skipped),
            **{self._prefix + name: value for name, value in about_batch.items()},
        }


def policy_objective(options: PolicyOptions, temperature: float) -> tuple[tuple[str, ...], LossFn]:
    """Return the keys that the policy's loss reads besides tokens, advantages and weights, and the loss.

        sum over actions of  weight * (importance * loss + kl_loss_coef * KL - entropy_coef * entropy)

    `weight` comes from `loss_weights` and `importance` from `importance_weights`; each is 1 where the batch has none.
    `ptx_coef` adds the negative log-likelihood of answers, see `realrl.algo.policy.pretraining`.

    Stats, as means over actions: ratio, approx_kl = ratio - 1 - log ratio (the k3 estimator of
    http://joschu.net/blog/kl-approx.html), entropy, and the stats of the policy loss; pg_loss and kl_loss, weighted as
    in the loss; ptx_loss, a mean over answer tokens.

    Args:
        temperature: divides the logits.
    """
    [piece] = [piece for piece in chosen_pieces(options) if piece.kind == "policy_loss"]
    reference = ("ref_logprobs",) if options.kl_loss_coef else ()

    def objective(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
        mask = response_mask(mb)
        logprobs, entropy = out.logprobs_and_entropy(temperature, mask=mask)

        def rows(key: str) -> torch.Tensor:
            return mb[key][mask].float()

        def logprobs_of(tokens: torch.Tensor) -> torch.Tensor:
            return out.logprobs_of(tokens, temperature, mask)

        actions = ActionBatch(mb, logprobs[mask].float(), rows("old_logprobs"), rows(ADVANTAGES), logprobs_of)
        weights = rows(WEIGHTS) if WEIGHTS in mb else None
        result = loss_of(piece, options.policy_loss, actions, options)
        losses = result.losses * rows(IMPORTANCE) if IMPORTANCE in mb else result.losses
        total = _weighted_sum(losses, weights)
        logratio = actions.logratio.detach()
        stats = {
            "pg_loss": total.detach(),
            "ratio": logratio.exp().sum(),
            "approx_kl": (torch.expm1(logratio) - logratio).sum(),
            "entropy": entropy.detach()[mask].sum(),
            **{name: values.detach().sum() for name, values in result.stats.items()},
        }
        if options.kl_loss_coef:
            kl = _weighted_sum(kl_estimate(actions.logprobs, rows("ref_logprobs"), options.kl_estimator), weights)
            total = total + options.kl_loss_coef * kl
            stats["kl_loss"] = kl.detach()
        if options.entropy_coef:
            total = total - options.entropy_coef * _weighted_sum(entropy[mask], weights)
        if ANSWER_WEIGHTS in mb:
            weights = mb[ANSWER_WEIGHTS]
            ptx_loss = -(weights * out.logprobs(mask=weights > 0)).sum()
            total = total + options.ptx_coef * ptx_loss
            stats["ptx_loss"] = ptx_loss.detach()
        return LossOutput(total, stats)

    return tuple(dict.fromkeys(("old_logprobs", *piece.keys(options), *reference))), objective


def mixed_advantages(rollout: Rollout) -> torch.Tensor:
    """float32 [T - S]: the weighted sum of the chosen advantages, whitened if the options say so; 0 off the actions.

    Raises:
        CallError: an advantage gave something else, or wrote what is not the same on all ranks.
    """
    options: PolicyOptions = rollout.options
    total: torch.Tensor | None = None
    weights = advantage_weights(options)
    pieces = {name: find_piece("advantage", name) for name in weights}
    own = [piece.called(name) for name, piece in pieces.items() if not piece.is_built_in]
    writers: Writers = {"": ", ".join(own)}
    for name, weight in weights.items():
        with noting(writers, pieces[name].called(name), rollout):
            part = advantages_of(pieces[name], name, rollout)
        part = part if weight == 1.0 else weight * part
        total = part if total is None else total + part
    assert total is not None
    if own:  # the others write what they took over all ranks
        check_agreement(rollout, writers)
    return whiten(total, rollout.mask, rollout.all_reduce) if options.normalise_advantages else total


def answer_means(actions: Actions, values: torch.Tensor) -> torch.Tensor:
    """float32 [S]: mean of `values` [T - S] over the actions of each response; 0 without any."""
    return actions.sums(values[actions.transition].float()) / actions.counts.clamp(min=1)


def weighted_minibatches(
    data: SequenceSample, rollout: Rollout, model: Model, ctx: CallContext
) -> list[SequenceSample]:
    """This rank's share of every minibatch of one pass, with the weights that depend on what else is in a minibatch."""
    if rollout.options.loss_normaliser != "tokens":
        weights = loss_weights(rollout, ctx, model.engine)
        data = data.update(data.derive("input_ids", {WEIGHTS: (PER_TRANSITION, weights)}))
    if rollout.options.ptx_coef:
        data = with_answers(data, rollout.batch, model, ctx)
    return [data.select(ids) for ids in ctx.minibatches]


def loss_weights(rollout: Rollout, ctx: CallContext, engine: Engine) -> torch.Tensor:
    """float32 [T - S]: weights of actions. The weighted sum over a minibatch's actions, divided by their number, is

    - "sequences": the mean over responses of their means over actions (DeepSeekMath, equation 3);
    - "constant": the sum over responses times `generation.max_new_tokens` (Liu et al. 2025, "Understanding
      R1-Zero-like training", section 3.2).

    Both cover the whole minibatch, over all ranks. `ctx` is of one pass.
    """
    place = {sample_id: i for i, ids in enumerate(ctx.minibatches) for sample_id in ids}
    samples = torch.tensor([place[i] for i in rollout.batch.ids], dtype=torch.int64, device=rollout.mask.device)
    minibatch, counts = samples[rollout.group], rollout.actions.counts.double()
    totals = counts.new_zeros(2, len(ctx.minibatches))
    totals[0].index_add_(0, minibatch, counts)
    totals[1].index_add_(0, minibatch, torch.ones_like(counts))
    n_found, n_responses = engine.all_reduce(totals).clamp(min=1.0)
    is_mean = rollout.options.loss_normaliser == "sequences"
    length = counts.clamp(min=1.0) if is_mean else torch.full_like(counts, ctx.generation.max_new_tokens)
    return rollout.per_transition((n_found / n_responses)[minibatch] / length)


def importance_weights(rollout: Rollout, engine: Engine) -> torch.Tensor:
    """float32 [T - S]: min(pi_old / pi_behavior, importance_cap) of each action, 0 elsewhere; adds to the metrics.

    Truncated importance sampling: Ionides 2008, "Truncated importance sampling". pi_old, the policy at the start of
    the step, lies between the generating and the trained policy, as in Hilton et al. 2022, "Batch size-invariance for
    policy optimization", section 2. Log-ratios are clipped at +-20.
    """
    at = rollout.actions.transition
    logratio = rollout.batch["old_logprobs"][at].double() - rollout.batch[BEHAVIOR][at].double()
    ratio = logratio.clamp(-20.0, 20.0).exp()
    cap = rollout.options.importance_cap or DEFAULT_IMPORTANCE_CAP
    weights = ratio.clamp(max=cap)
    largest = ratio.max() if len(ratio) else ratio.new_zeros(())
    rollout.metrics["importance/mean"] = rollout.moments(weights).mean
    rollout.metrics["importance/capped"] = rollout.moments((ratio > cap).double()).mean
    rollout.metrics["importance/max"] = float(engine.all_reduce(largest.reshape(1), "max"))
    return rollout.actions.spread(weights, rollout.mask.shape[0])


def training_temperature(generation: GenerationConfig) -> float:
    """Temperature of old, reference and new log-probabilities: that of sampling, or 1 under greedy decoding."""
    return generation.temperature if generation.temperature > 0.0 else 1.0


def is_too_far(stats: Mapping[str, float], options: PolicyOptions) -> bool:
    """True if a minibatch's mean ratio or approximate KL exceeds its limit, which skips the optimizer step."""
    far_ratio = options.early_stop_ratio is not None and stats["ratio"] > options.early_stop_ratio
    far_kl = options.early_stop_kl is not None and stats["approx_kl"] > options.early_stop_kl
    return far_ratio or far_kl


def _has_kl_penalty(rollout: Rollout) -> bool:
    reads = {name for piece in chosen_pieces(rollout.options) if piece.kind == "advantage" for name in piece.options}
    return "kl_coef" in reads and rollout.sequence_kl is not None


def _weighted_sum(values: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return values.sum() if weights is None else (values * weights).sum()

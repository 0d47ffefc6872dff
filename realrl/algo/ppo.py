"""PPO: the actor (which also serves as the reference) and the critic.

Every method moves what it reads to `engine.device`; what it returns lies there too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from realrl.algo.api import CallContext, ForwardOutput, LossOutput, Model, ModelInterface
from realrl.algo.experience import EXPERIENCE_KEYS, Experience, batch_metrics, explained_variance, work_out
from realrl.algo.kl import KLController, make_controller
from realrl.algo.losses import policy_loss, value_loss
from realrl.algo.normalise import Moments, ValueNorm, whiten
from realrl.algo.packed import before_transition, response_mask
from realrl.algo.training import train_minibatches
from realrl.config.algorithms import PPOOptions
from realrl.config.schema import GenerationConfig
from realrl.data.sample import SequenceSample
from realrl.sched.messages import KeySchema, Per

TOKENS = ("input_ids", "prompt_mask")
PER_TOKEN = KeySchema("float32", Per.TOKEN)
PER_TRANSITION = KeySchema("float32", Per.TRANSITION)


class _PPO(ModelInterface):
    """Keeps the KL controller. Actor and critic feed it the same numbers, so their weights stay equal."""

    def __init__(self) -> None:
        self._controller: KLController | None = None
        self._restored_kl_coef: float | None = None

    def _experience(self, model: Model, batch: SequenceSample, options: PPOOptions) -> tuple[Experience, float]:
        """The worked-out batch and the kl_coef it was worked out with; moves the controller on."""
        if self._controller is None:
            start = options.kl_coef if self._restored_kl_coef is None else self._restored_kl_coef
            self._controller = make_controller(options.kl_controller, start, options.kl_target, options.kl_horizon)
        kl_coef = self._controller.coef
        experience = work_out(batch, options, kl_coef, model.engine.all_reduce)
        self._controller.update(experience.kl.mean, int(experience.kl.count))
        return experience, kl_coef

    def optimizer_steps_per_call(self, n_minibatches: int, algorithm: PPOOptions) -> int:
        return n_minibatches * algorithm.ppo_epochs

    def state_dict(self) -> dict[str, Any]:
        coef = self._restored_kl_coef if self._controller is None else self._controller.coef
        return {} if coef is None else {"kl_coef": coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored_kl_coef = state.get("kl_coef")
        self._controller = None


class PPOActor(_PPO):
    """generate: `prompt_ids` -> `input_ids`, `prompt_mask`, `old_logprobs`, `truncated`.

    inference: `input_ids`, `prompt_mask` -> `logprobs`. train_step: see `EXPERIENCE_KEYS`.
    """

    def generate(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """Sample responses.

        `old_logprobs` are of softmax(logits / temperature), not of the distribution that was sampled from: the loss
        compares them with new log-probabilities that training recomputes, which know neither top-k, top-p nor a
        minimum length. So the ratio is 1 before the first optimizer step whatever the sampling filters are.
        They are 0 on prompt transitions.
        """
        prompts = batch.select(batch.ids, ("prompt_ids",)).to(model.engine.device)
        result = model.engine.generate(
            prompts, ctx.generation, seed=ctx.seed, step=ctx.step, eos_id=model.tokenizer.eos_token_id
        )
        n = ctx.generation.n_responses
        tokens: list[list[torch.Tensor]] = []
        masks: list[list[torch.Tensor]] = []
        logprobs: list[list[torch.Tensor]] = []
        for i, prompt in enumerate(prompts.samples("prompt_ids")):
            mine = slice(i * n, (i + 1) * n)
            responses = [r.to(prompt) for r in result.responses[mine]]
            tokens.append([torch.cat([prompt, r]) for r in responses])
            masks.append([_is_prompt(prompt, r) for r in responses])
            before = torch.zeros(prompt.shape[0] - 1, dtype=torch.float32, device=prompt.device)
            logprobs.append([torch.cat([before, lp.to(before)]) for lp in result.policy_logprobs[mine]])
        device = prompts["prompt_ids"].device
        flags = torch.tensor(result.truncated, dtype=torch.bool, device=device)
        return SequenceSample.from_lists(
            prompts.ids,
            {
                "input_ids": (KeySchema("int64", Per.TOKEN), tokens),
                "prompt_mask": (KeySchema("bool", Per.TOKEN), masks),
                "old_logprobs": (PER_TRANSITION, logprobs),
                "truncated": (KeySchema("bool", Per.SEQUENCE), [list(f) for f in flags.view(-1, n)]),
            },
        ).to(device)

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """`logprobs`, float32 per transition, at the sampling temperature; 0 on prompt transitions."""
        batch = batch.select(batch.ids, TOKENS).to(model.engine.device)
        temperature = training_temperature(ctx.generation)

        def logprobs(out: ForwardOutput, mb: SequenceSample) -> torch.Tensor:
            mask = response_mask(mb)
            return torch.where(mask, out.logprobs(temperature, mask=mask), 0.0)

        result = model.engine.forward(batch, logprobs, micro_batching=ctx.micro_batching)
        return batch.derive("input_ids", {"logprobs": (PER_TRANSITION, result.float())})

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        """Work out the whole batch, then `ppo_epochs` passes over its minibatches."""
        options: PPOOptions = ctx.algorithm
        engine, role = model.engine, model.name.role
        batch = batch.select(batch.ids, EXPERIENCE_KEYS).to(engine.device)
        experience, kl_coef = self._experience(model, batch, options)
        advantages = experience.advantages
        if options.normalise_advantages:
            advantages = whiten(advantages, experience.mask, engine.all_reduce)
        temperature = training_temperature(ctx.generation)

        def loss(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
            mask = response_mask(mb)
            logprobs, entropy = out.logprobs_and_entropy(temperature, mask=mask)
            result = policy_loss(logprobs, mb["old_logprobs"], mb["advantages"], mask, options.clip_ratio)
            return LossOutput(result.loss, {**result.stats, "entropy": entropy.detach()[mask].sum()})

        data = batch.select(batch.ids, (*TOKENS, "old_logprobs"))
        summary = train_minibatches(
            model,
            data.update(batch.derive("input_ids", {"advantages": (PER_TRANSITION, advantages)})),
            ctx,
            loss,
            count=_n_actions,
            passes=options.ppo_epochs,
            skip=lambda stats: is_too_far(stats, options),
        )
        return {
            **summary.metrics(role),
            f"{role}/kl_coef": kl_coef,
            f"{role}/skipped_minibatches": float(summary.n_skipped),
            **batch_metrics(batch, experience, engine.all_reduce),
        }


class PPOCritic(_PPO):
    """inference: `input_ids` -> `values`. train_step: see `EXPERIENCE_KEYS`.

    Keeps the running statistics of returns (`algorithm.normalise_values`): the head works in normalised units, `values`
    are in reward units. An instance that only infers must be given the `state_dict` of the one that trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self._norm = ValueNorm()

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """`values`, float32 per token, in reward units."""
        batch = batch.select(batch.ids, ("input_ids",)).to(model.engine.device)
        raw = model.engine.forward(batch, lambda out, _: out.scores(), micro_batching=ctx.micro_batching)
        return batch.derive("input_ids", {"values": (PER_TOKEN, self._norm.denormalise(raw))})

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        """Work out the whole batch, update the value statistics, then `ppo_epochs` passes over its minibatches.

        Values are clipped around what the head put out when it inferred, which the statistics before the update give
        back; the targets are normalised with the statistics after it.
        """
        options: PPOOptions = ctx.algorithm
        engine, role = model.engine, model.name.role
        batch = batch.select(batch.ids, EXPERIENCE_KEYS).to(engine.device)
        experience, _ = self._experience(model, batch, options)
        old_values = self._norm.normalise(experience.values)
        if options.normalise_values:
            returns = Moments.of(experience.returns[experience.mask], engine.all_reduce)
            self._norm.update(returns, options.value_norm_beta)
        targets = self._norm.normalise(experience.returns)
        huber_delta = options.huber_delta if options.value_loss == "huber" else None

        def loss(out: ForwardOutput, mb: SequenceSample) -> LossOutput:
            values = before_transition(out.scores(), mb.cu_seqlens("input_ids"))
            old, target = mb["old_values"], mb["targets"]
            return value_loss(values, old, target, response_mask(mb), clip=options.value_clip, huber_delta=huber_delta)

        columns = {"old_values": (PER_TRANSITION, old_values), "targets": (PER_TRANSITION, targets)}
        summary = train_minibatches(
            model,
            batch.select(batch.ids, TOKENS).update(batch.derive("input_ids", columns)),
            ctx,
            loss,
            count=_n_actions,
            passes=options.ppo_epochs,
        )
        return {
            **summary.metrics(role),
            f"{role}/explained_variance": explained_variance(experience, engine.all_reduce),
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._norm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._norm.load_state_dict(state)


def training_temperature(generation: GenerationConfig) -> float:
    """Temperature of old, reference and new log-probabilities: that of sampling, or 1 under greedy decoding."""
    return generation.temperature if generation.temperature > 0.0 else 1.0


def is_too_far(stats: Mapping[str, float], options: PPOOptions) -> bool:
    """Whether a minibatch's mean ratio or approximate KL forbids its optimizer step."""
    far_ratio = options.early_stop_ratio is not None and stats["ratio"] > options.early_stop_ratio
    far_kl = options.early_stop_kl is not None and stats["approx_kl"] > options.early_stop_kl
    return far_ratio or far_kl


def _n_actions(batch: SequenceSample) -> int:
    return int(response_mask(batch).sum())


def _is_prompt(prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.ones_like(prompt, dtype=torch.bool), torch.zeros_like(response, dtype=torch.bool)])

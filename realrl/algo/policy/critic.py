"""PPO's critic. Its policy is `PolicyActor` with the advantage `gae`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.algo.api import CallContext, ForwardOutput, LossOutput, Model
from realrl.algo.losses import value_loss
from realrl.algo.normalise import Moments, ValueNorm
from realrl.algo.packed import before_transition, n_actions, response_mask
from realrl.algo.policy.actor import TOKENS
from realrl.algo.policy.gae import explained_variance, generalised
from realrl.algo.policy.responses import PER_TRANSITION
from realrl.algo.policy.rollout_interface import RolloutInterface
from realrl.algo.training import train_minibatches
from realrl.config.policy_options import PPOOptions
from realrl.data.sample import SequenceSample
from realrl.experiment.pieces import critic_keys
from realrl.sched.messages import KeySchema, Per

PER_TOKEN = KeySchema("float32", Per.TOKEN)


class PPOCritic(RolloutInterface):
    """inference: `input_ids` -> `values`. train_step: see `realrl.experiment.pieces.critic_keys`.

    Keeps the running statistics of returns (`algorithm.normalise_values`): the head works in normalised units, `values`
    are in reward units. An instance that only infers must be given the `state_dict` of the one that trains.

    Args:
        kl_weight: factor of `kl_coef` in the token rewards.
        shaped: True shifts, scales and clips rewards as the options say.
    """

    def __init__(self, *, kl_weight: float = 1.0, shaped: bool = True) -> None:
        super().__init__()
        self._norm = ValueNorm()
        self._kl_weight = kl_weight
        self._shaped = shaped

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """`values`, float32 per token, in reward units."""
        batch = batch.select(batch.ids, ("input_ids",)).to(model.engine.device)
        raw = model.engine.forward(batch, lambda out, _: out.scores(), micro_batching=ctx.micro_batching)
        return batch.derive("input_ids", {"values": (PER_TOKEN, self._norm.denormalise(raw))})

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        """Compute returns of the whole batch, update the value statistics, then train on the minibatches.

        New values are clipped around the head's outputs at inference. The statistics before the update recover those
        from `values`; the statistics after it normalise the targets.
        """
        options: PPOOptions = ctx.algorithm
        engine, role = model.engine, model.name.role
        batch = batch.select(batch.ids, critic_keys(options)).to(engine.device)
        rollout = self.rollout(engine, batch, options)
        scores = rollout.scores if self._shaped else batch["rewards"].float()
        experience = generalised(rollout, rollout.token_rewards(scores, self._kl_weight), batch["values"])
        self.follow_kl(rollout)
        old_values = self._norm.normalise(experience.values)
        if options.normalise_values:
            returns = Moments.of(experience.returns[rollout.mask], engine.all_reduce)
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
            count=n_actions,
        )
        return {
            **summary.metrics(role),
            f"{role}/explained_variance": explained_variance(experience, rollout.mask, engine.all_reduce),
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._norm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._norm.load_state_dict(state)

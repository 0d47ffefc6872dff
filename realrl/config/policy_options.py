"""Options of the policy-gradient algorithms: keys under `algorithm.`, each with its default.

`PolicyOptions` are those of a policy alone. `PPOOptions` adds a critic. An experiment's own file holds the defaults
that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from realrl.config.reward_options import OVERLONG, REWARD_MODEL, RewardOptions, check_function_name
from realrl.config.schema import key, rare

DEFAULT_IMPORTANCE_CAP = 2.0


class PolicyOptions(RewardOptions):
    """A policy that learns from the rewards of its own responses; each piece is a name, and can be replaced."""

    advantage: str | dict[str, Annotated[float, Field(allow_inf_nan=False)]] = key(
        "grpo",
        "grpo, dr_grpo, rloo, remax, reinforce_pp, ..., 'module:function', or a weighted sum of several, "
        "such as {grpo: 0.7, rloo: 0.3}",
    )
    policy_loss: str = key(
        "clip",
        "clip (token ratios), sequence_clip, response_clip, cispo, reinforce, ..., or 'module:function'",
        min_length=1,
    )
    filter: str | None = key(
        None, "drops samples before training, which others replace: equal_rewards, or 'module:function'", min_length=1
    )
    sampler: str = rare("sample", "how responses come about: sample, or 'module:function'", min_length=1)

    n_minibatches: int = key(1, "optimizer steps per step and pass over the batch", ge=1)
    ppo_epochs: int = key(1, "passes over each batch", ge=1)
    loss_normaliser: Literal["tokens", "sequences", "constant"] = key(
        "tokens",
        "mean over tokens; over responses of their token means; or token sum over responses times "
        "generation.max_new_tokens",
    )
    normalise_advantages: bool = rare(False, "whiten advantages over the whole batch")

    clip_ratio: float = key(0.2, "the policy ratio is clipped to 1 +- this", gt=0)
    clip_ratio_high: float | None = rare(None, "upper side of the clip; null: as clip_ratio", gt=0)
    kl_loss_coef: float = key(0.0, "weight of the KL to the reference in the loss", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = rare("k3", "estimator of the KL in the loss")
    entropy_coef: float = key(0.0, "weight of an entropy bonus in the loss", ge=0)
    ptx_coef: float = rare(0.0, "weight of the negative log-likelihood of the answers in the dataset's rows", ge=0)
    importance_cap: float | None = rare(
        None,
        "weigh tokens by min(this, pi_old / pi_generation), pi_old computed again before training; null: "
        f"{DEFAULT_IMPORTANCE_CAP:g} where max_staleness is above 0, and no weights elsewhere",
        gt=0,
    )

    recompute_logprobs: bool | None = rare(
        None,
        "compute old log-probabilities again before training instead of taking those of generation; null: where the "
        "two use different kernels, in half precision or on CUDA, and where tokens are weighed",
    )

    kl_coef: float = key(0.0, "weight of the KL penalty in the token rewards; first value if adaptive", ge=0)
    kl_controller: Literal["fixed", "adaptive"] = key("fixed", "adaptive steers KL towards kl_target")
    kl_target: float = rare(6.0, "wanted KL to the reference, summed over a response, in nats", gt=0)
    kl_horizon: float = rare(10_000.0, "sequences over which the adaptive controller reacts", gt=0)
    gamma: float = key(1.0, "discount per token", ge=0, le=1)

    reward_scaling: float = rare(1.0, "score = (reward - reward_bias) * reward_scaling")
    reward_bias: float = rare(0.0, "subtracted from rewards before scaling")
    reward_clip: float | None = rare(None, "scores are cut to +- this after scaling; null: no limit", gt=0)
    score_truncated: bool = rare(True, "whether a response without a stop token gets its score")

    early_stop_ratio: float | None = rare(5.0, "skip a minibatch whose mean ratio is above; null: never", gt=0)
    early_stop_kl: float | None = rare(None, "skip a minibatch whose approx_kl is above; null: never", gt=0)

    @field_validator("advantage", mode="before")
    @classmethod
    def _refuse_bool_as_weight(cls, value: object) -> object:
        """pydantic would read true as 1."""
        if isinstance(value, Mapping) and any(isinstance(weight, bool) for weight in value.values()):
            raise ValueError("true and false are no weights")
        return value

    @field_validator("advantage")
    @classmethod
    def _names_an_advantage(cls, value: str | dict[str, float]) -> str | dict[str, float]:
        if not value:
            raise ValueError("names no advantage; write one, or {name: weight, ...}")
        return value

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Smallest and largest policy ratio that the clipped losses let through."""
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return 1.0 - self.clip_ratio, 1.0 + high


class PPOOptions(PolicyOptions):
    """Proximal policy optimisation with a critic."""

    advantage: str | dict[str, Annotated[float, Field(allow_inf_nan=False)]] = key(
        "gae", "gae, another one, 'module:function', or a weighted sum of several such as {gae: 0.5, grpo: 0.5}"
    )
    n_minibatches: int = key(4, "optimizer steps per step and PPO epoch", ge=1)
    normalise_advantages: bool = rare(True, "whiten advantages over the whole batch")
    kl_coef: float = key(0.1, "weight of the KL penalty in the token rewards; first value if adaptive", ge=0)
    reward_clip: float | None = rare(20.0, "scores are cut to +- this after scaling; null: no limit", gt=0)

    gae_lambda: float = key(1.0, "lambda of generalised advantage estimation", ge=0, le=1)
    normalise_values: bool = rare(True, "train the critic on returns with running mean 0 and std 1")
    value_norm_beta: float = rare(0.99995, "decay of the running value statistics", gt=0, lt=1)
    value_clip: float | None = rare(0.2, "values move at most this far in the loss; null: no limit", gt=0)
    value_loss: Literal["mse", "huber"] = rare("mse", "loss of the critic")
    huber_delta: float = rare(10.0, "error at which the Huber loss becomes linear", gt=0)


class MovingReferenceOptions(PPOOptions):
    """PPO whose reference follows the actor."""

    ref_ema_eta: float = key(
        0.01, "after each step, reference = ref_ema_eta * actor + (1 - ref_ema_eta) * reference", gt=0, le=1
    )


class SafeRLHFOptions(PPOOptions):
    """Reward under a limit on mean cost."""

    cost_function: str | None = key(None, "'module:function' or 'file.py:function'; takes the place of the cost model")
    cost_limit: float = key(0.0, "largest mean cost of a response that is wanted")
    lambda_init: float = rare(1.0, "first weight of costs against rewards", gt=0)
    lambda_lr: float = key(0.04, "step size of the weight's logarithm", ge=0)
    lambda_max: float = rare(50.0, "largest weight of costs", gt=0)

    @field_validator("cost_function")
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        if value in (OVERLONG, REWARD_MODEL):
            raise ValueError(f"{value!r} is no function; name one, or leave it out for the cost model")
        return None if value is None else check_function_name(value)

    @model_validator(mode="after")
    def _check_lambda(self) -> Self:
        if self.lambda_init > self.lambda_max:
            raise ValueError(f"lambda_init={self.lambda_init:g} is above lambda_max={self.lambda_max:g}")
        return self


class DistillOptions(PolicyOptions):
    """On-policy distillation."""

    teacher_top_k: int = key(32, "the teacher's likeliest tokens that policy_loss=teacher_kl compares one by one", ge=1)

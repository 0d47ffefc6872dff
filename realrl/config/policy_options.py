"""Options of the policy-gradient algorithms: keys under `algorithm.`, each with its default.

`PolicyOptions` are those of a policy alone. `PPOOptions` adds a critic. An experiment's own file holds the defaults
that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from realrl.config.reward_options import OVERLONG, REWARD_MODEL, RewardOptions, check_function_name
from realrl.config.schema import ADVANCED

DEFAULT_IMPORTANCE_CAP = 2.0


class PolicyOptions(RewardOptions):
    """A policy that learns from the rewards of its own responses; each piece is a name, and can be replaced."""

    advantage: str | dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        "grpo",
        description="grpo, dr_grpo, rloo, remax, reinforce_pp, ..., 'module:function', or a weighted sum of several, "
        "such as {grpo: 0.7, rloo: 0.3}",
    )
    policy_loss: str = Field(
        "clip",
        min_length=1,
        description="clip (token ratios), sequence_clip, response_clip, cispo, reinforce, ..., or 'module:function'",
    )
    filter: str | None = Field(
        None,
        min_length=1,
        description="drops samples before training, which others replace: equal_rewards, or 'module:function'",
    )
    sampler: str = Field(
        "sample",
        min_length=1,
        description="how responses come about: sample, or 'module:function'",
        json_schema_extra=ADVANCED,
    )

    n_minibatches: int = Field(1, ge=1, description="optimizer steps per step and pass over the batch")
    ppo_epochs: int = Field(1, ge=1, description="passes over each batch")
    loss_normaliser: Literal["tokens", "sequences", "constant"] = Field(
        "tokens",
        description="mean over tokens; over responses of their token means; or token sum over responses times "
        "generation.max_new_tokens",
    )
    normalise_advantages: bool = Field(
        False, description="whiten advantages over the whole batch", json_schema_extra=ADVANCED
    )

    clip_ratio: float = Field(0.2, gt=0, description="the policy ratio is clipped to 1 +- this")
    clip_ratio_high: float | None = Field(
        None, gt=0, description="upper side of the clip; null: as clip_ratio", json_schema_extra=ADVANCED
    )
    kl_loss_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference in the loss")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="estimator of the KL in the loss", json_schema_extra=ADVANCED
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of an entropy bonus in the loss")
    ptx_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the negative log-likelihood of the answers in the dataset's rows",
        json_schema_extra=ADVANCED,
    )
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="weigh tokens by min(this, pi_old / pi_generation), pi_old computed again before training; null: "
        f"{DEFAULT_IMPORTANCE_CAP:g} where max_staleness is above 0, and no weights elsewhere",
        json_schema_extra=ADVANCED,
    )

    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL penalty in the token rewards; first value if adaptive"
    )
    kl_controller: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive steers KL towards kl_target")
    kl_target: float = Field(
        6.0, gt=0, description="wanted KL to the reference, summed over a response, in nats", json_schema_extra=ADVANCED
    )
    kl_horizon: float = Field(
        10_000.0, gt=0, description="sequences over which the adaptive controller reacts", json_schema_extra=ADVANCED
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")

    reward_scaling: float = Field(
        1.0, description="score = (reward - reward_bias) * reward_scaling", json_schema_extra=ADVANCED
    )
    reward_bias: float = Field(0.0, description="subtracted from rewards before scaling", json_schema_extra=ADVANCED)
    reward_clip: float | None = Field(
        None,
        gt=0,
        description="scores are cut to +- this after scaling; null: no limit",
        json_schema_extra=ADVANCED,
    )
    score_truncated: bool = Field(
        True, description="whether a response without a stop token gets its score", json_schema_extra=ADVANCED
    )

    early_stop_ratio: float | None = Field(
        5.0, gt=0, description="skip a minibatch whose mean ratio is above; null: never", json_schema_extra=ADVANCED
    )
    early_stop_kl: float | None = Field(
        None, gt=0, description="skip a minibatch whose approx_kl is above; null: never", json_schema_extra=ADVANCED
    )

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

    advantage: str | dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        "gae",
        description="gae, another one, 'module:function', or a weighted sum of several such as {gae: 0.5, grpo: 0.5}",
    )
    n_minibatches: int = Field(4, ge=1, description="optimizer steps per step and PPO epoch")
    normalise_advantages: bool = Field(
        True, description="whiten advantages over the whole batch", json_schema_extra=ADVANCED
    )
    kl_coef: float = Field(
        0.1, ge=0, description="weight of the KL penalty in the token rewards; first value if adaptive"
    )
    reward_clip: float | None = Field(
        20.0,
        gt=0,
        description="scores are cut to +- this after scaling; null: no limit",
        json_schema_extra=ADVANCED,
    )

    gae_lambda: float = Field(1.0, ge=0, le=1, description="lambda of generalised advantage estimation")
    normalise_values: bool = Field(
        True, description="train the critic on returns with running mean 0 and std 1", json_schema_extra=ADVANCED
    )
    value_norm_beta: float = Field(
        0.99995, gt=0, lt=1, description="decay of the running value statistics", json_schema_extra=ADVANCED
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="values move at most this far in the loss; null: no limit", json_schema_extra=ADVANCED
    )
    value_loss: Literal["mse", "huber"] = Field("mse", description="loss of the critic", json_schema_extra=ADVANCED)
    huber_delta: float = Field(
        10.0, gt=0, description="error at which the Huber loss becomes linear", json_schema_extra=ADVANCED
    )


class MovingReferenceOptions(PPOOptions):
    """PPO whose reference follows the actor."""

    ref_ema_eta: float = Field(
        0.01, gt=0, le=1, description="after each step, reference = ref_ema_eta * actor + (1 - ref_ema_eta) * reference"
    )


class SafeRLHFOptions(PPOOptions):
    """Reward under a limit on mean cost."""

    cost_function: str | None = Field(
        None, description="'module:function' or 'file.py:function'; takes the place of the cost model"
    )
    cost_limit: float = Field(0.0, description="largest mean cost of a response that is wanted")
    lambda_init: float = Field(
        1.0, gt=0, description="first weight of costs against rewards", json_schema_extra=ADVANCED
    )
    lambda_lr: float = Field(0.04, ge=0, description="step size of the weight's logarithm")
    lambda_max: float = Field(50.0, gt=0, description="largest weight of costs", json_schema_extra=ADVANCED)

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

    teacher_top_k: int = Field(
        32, ge=1, description="the teacher's likeliest tokens that policy_loss=teacher_kl compares one by one"
    )

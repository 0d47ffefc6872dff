"""Options of the built-in algorithms: what a user writes under `algorithm.`, with every default, once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from realrl.config.schema import ADVANCED, Section


class SFTOptions(Section):
    """Supervised fine-tuning."""

    n_minibatches: int = Field(1, ge=1, description="optimizer steps per step")


class RWOptions(Section):
    """Reward model from preference pairs."""

    n_minibatches: int = Field(1, ge=1, description="optimizer steps per step")


class PPOOptions(Section):
    """Proximal policy optimisation with a critic."""

    n_minibatches: int = Field(4, ge=1, description="optimizer steps per step and PPO epoch")
    ppo_epochs: int = Field(1, ge=1, description="passes over each batch")

    kl_coef: float = Field(
        0.1, ge=0, description="weight of the KL penalty in the token rewards; first value if adaptive"
    )
    kl_controller: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive steers KL towards kl_target")
    kl_target: float = Field(
        6.0, gt=0, description="wanted KL to the reference, summed over a response, in nats", json_schema_extra=ADVANCED
    )
    kl_horizon: float = Field(
        10_000.0, gt=0, description="sequences over which the adaptive controller reacts", json_schema_extra=ADVANCED
    )

    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="lambda of generalised advantage estimation")
    normalise_advantages: bool = Field(
        True, description="whiten advantages over the whole batch", json_schema_extra=ADVANCED
    )
    normalise_values: bool = Field(
        True, description="train the critic on returns with running mean 0 and std 1", json_schema_extra=ADVANCED
    )
    value_norm_beta: float = Field(
        0.99995, gt=0, lt=1, description="decay of the running value statistics", json_schema_extra=ADVANCED
    )

    clip_ratio: float = Field(0.2, gt=0, description="the policy ratio is clipped to 1 +- this")
    value_clip: float | None = Field(
        0.2, gt=0, description="values move at most this far in the loss; null: no limit", json_schema_extra=ADVANCED
    )
    value_loss: Literal["mse", "huber"] = Field("mse", description="loss of the critic", json_schema_extra=ADVANCED)
    huber_delta: float = Field(
        10.0, gt=0, description="error at which the Huber loss becomes linear", json_schema_extra=ADVANCED
    )

    reward_scaling: float = Field(
        1.0, description="score = (reward - reward_bias) * reward_scaling", json_schema_extra=ADVANCED
    )
    reward_bias: float = Field(0.0, description="subtracted from rewards before scaling", json_schema_extra=ADVANCED)
    reward_clip: float = Field(
        20.0, gt=0, description="scores are clipped to +- this after scaling", json_schema_extra=ADVANCED
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

    reward_function: str | None = Field(
        None, description="'module:function' or 'file.py:function'; takes the place of the reward model"
    )
    reward_reads: Literal["auto", "text", "ids"] = Field(
        "auto",
        description="what the function gets; auto: token ids if its parameters are named *_ids, else text",
        json_schema_extra=ADVANCED,
    )
    reward_timeout_s: float = Field(10.0, gt=0, description="time limit of the reward function for one response")
    reward_concurrency: int = Field(
        2, ge=1, description="reward processes per data-parallel rank", json_schema_extra=ADVANCED
    )
    reward_on_failure: Literal["error", "zero"] = Field(
        "error", description="a response whose reward fails or takes too long ends the run, or is scored 0"
    )

    @field_validator("reward_function")
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        separator = ":" if value is not None and ":" in value else "."
        if value is not None and not all(value.rpartition(separator)):
            raise ValueError(f"{value!r} is not 'module:function' or 'file.py:function'")
        return value

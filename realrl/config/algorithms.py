"""Options of the built-in algorithms: keys under `algorithm.`, each with its only default."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from realrl.config.reward_options import RewardOptions
from realrl.config.schema import ADVANCED, Section


class SFTOptions(Section):
    """Supervised fine-tuning."""

    n_minibatches: int = Field(1, ge=1, description="optimizer steps per step")


class RWOptions(Section):
    """Reward model from preference pairs."""

    n_minibatches: int = Field(1, ge=1, description="optimizer steps per step")


class GenOptions(RewardOptions):
    """Responses without training; rewarded where a reward is named."""

    sampler: str = Field(
        "sample",
        min_length=1,
        description="how responses come about: sample, or 'module:function'",
        json_schema_extra=ADVANCED,
    )

    @property
    def has_rewards(self) -> bool:
        """True if a reward is named: unlike elsewhere, there is no reward model by default."""
        return bool(self.rewards) or self.reward_function is not None


class DPOOptions(Section):
    """Direct preference optimisation from pairs."""

    n_minibatches: int = Field(1, ge=1, description="optimizer steps per step")
    loss: Literal["sigmoid", "hinge", "ipo"] = Field("sigmoid", description="how a pair's margin is penalised")
    beta: float = Field(0.1, gt=0, description="weight of staying close to the reference; for ipo its tau")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of pairs whose order is taken to be wrong; sigmoid only"
    )
    sft_coef: float = Field(0.0, ge=0, description="weight of the chosen answers' negative log-likelihood per token")

    @model_validator(mode="after")
    def _check_smoothing(self) -> Self:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(
                f"label_smoothing={self.label_smoothing:g} has no effect with loss={self.loss}; only sigmoid reads it"
            )
        return self


class KTOOptions(Section):
    """Kahneman-Tversky optimisation from answers that are good or bad by themselves."""

    n_minibatches: int = Field(1, ge=1, description="optimizer steps per step")
    beta: float = Field(0.1, gt=0, description="weight of staying close to the reference")
    desirable_weight: float = Field(1.0, ge=0, description="weight of good answers")
    undesirable_weight: float = Field(1.0, ge=0, description="weight of bad answers")

"""Options of the built-in algorithms: keys under `algorithm.`, each with its only default."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from realrl.config.reward_options import RewardOptions
from realrl.config.schema import Section, key, rare


class SFTOptions(Section):
    """Training on the rows of a dataset: fine-tuning, and reward models."""

    n_minibatches: int = key(1, "optimizer steps per step", ge=1)


class GenOptions(RewardOptions):
    """Responses without training; rewarded where a reward is named."""

    sampler: str = rare("sample", "how responses come about: sample, or 'module:function'", min_length=1)

    @property
    def has_rewards(self) -> bool:
        """True if a reward is named: unlike elsewhere, there is no reward model by default."""
        return bool(self.rewards) or self.reward_function is not None


class DPOOptions(SFTOptions):
    """Direct preference optimisation from pairs."""

    loss: Literal["sigmoid", "hinge", "ipo"] = key("sigmoid", "how a pair's margin is penalised")
    beta: float = key(0.1, "weight of staying close to the reference; for ipo its tau", gt=0)
    label_smoothing: float = key(0.0, "share of pairs whose order is taken to be wrong; sigmoid only", ge=0, lt=0.5)
    sft_coef: float = key(0.0, "weight of the chosen answers' negative log-likelihood per token", ge=0)

    @model_validator(mode="after")
    def _check_smoothing(self) -> Self:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(
                f"label_smoothing={self.label_smoothing:g} has no effect with loss={self.loss}; only sigmoid reads it"
            )
        return self


class KTOOptions(SFTOptions):
    """Kahneman-Tversky optimisation from answers that are good or bad by themselves."""

    beta: float = key(0.1, "weight of staying close to the reference", gt=0)
    desirable_weight: float = key(1.0, "weight of good answers", ge=0)
    undesirable_weight: float = key(1.0, "weight of bad answers", ge=0)

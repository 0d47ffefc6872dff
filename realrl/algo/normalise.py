"""Global statistics over all ranks: whitening of advantages, running statistics of returns.

Sums are taken and reduced in float64, so that they do not depend on how samples are spread over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

WHITEN_EPS = 1e-5
MIN_VARIANCE = 1e-2


class AllReduce(Protocol):
    """`realrl.algo.api.Engine.all_reduce`."""

    def __call__(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce by "sum" or "max" over the ranks that hold different samples; returns a new tensor."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and population variance of values that are spread over ranks; zeros when there are none."""

    count: float
    mean: float
    variance: float

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.variance)

    @classmethod
    def of(cls, x: torch.Tensor, all_reduce: AllReduce) -> Moments:
        """Moments of all elements of `x` on all ranks."""
        return cls.of_each([x], all_reduce)[0]

    @classmethod
    def of_each(cls, some: Sequence[torch.Tensor], all_reduce: AllReduce) -> list[Moments]:
        """Moments of several tensors, whose ranks meet twice for all of them.

        Two passes keep the variance accurate when the mean is large.
        """
        some = [x.double() for x in some]
        sums = torch.stack([torch.stack([x.new_tensor(float(x.numel())), x.sum()]) for x in some])
        found = [(count, total / count if count else 0.0) for count, total in all_reduce(sums).tolist()]
        squares = torch.stack([(x - mean).square().sum() for x, (_, mean) in zip(some, found, strict=True)])
        return [
            cls(count, mean, square / count if count else 0.0)
            for (count, mean), square in zip(found, all_reduce(squares).tolist(), strict=True)
        ]


def whiten(x: torch.Tensor, mask: torch.Tensor, all_reduce: AllReduce) -> torch.Tensor:
    """(x - mean) / (std + 1e-5) over the selected rows of all ranks.

    Args:
        x: [N]; not read where `mask` is False.
        mask: bool [N].
        all_reduce: sum over ranks.

    Returns:
        float32 [N], 0 where the mask is False.
    """
    selected = x[mask].double()
    moments = Moments.of(selected, all_reduce)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    out[mask] = ((selected - moments.mean) / (moments.std + WHITEN_EPS)).float()
    return out


class ValueNorm:
    """Exponential moving mean and mean square of returns, without the bias of their start at zero.

    mean = beta mean + (1 - beta) batch_mean, likewise the mean square; both are divided by the weight 1 - beta^t
    (Kingma and Ba 2015, section 3). Before the first update the mean is 0 and the standard deviation 1. The standard
    deviation is at least 0.1, so that a first batch of equal returns does not blow up the next one.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._mean_square = 0.0
        self._weight = 0.0

    @property
    def mean(self) -> float:
        return self._mean / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        if not self._weight:
            return 1.0
        return math.sqrt(max(self._mean_square / self._weight - self.mean**2, MIN_VARIANCE))

    def update(self, moments: Moments, beta: float) -> None:
        """Account for a batch whose returns have these `moments` over all ranks. An empty batch changes nothing."""
        if moments.count == 0:
            return
        self._mean = beta * self._mean + (1.0 - beta) * moments.mean
        self._mean_square = beta * self._mean_square + (1.0 - beta) * (moments.variance + moments.mean**2)
        self._weight = beta * self._weight + (1.0 - beta)

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """float32: (x - mean) / std."""
        return ((x.double() - self.mean) / self.std).float()

    def denormalise(self, x: torch.Tensor) -> torch.Tensor:
        """float32: x std + mean."""
        return (x.double() * self.std + self.mean).float()

    def state_dict(self) -> dict[str, float]:
        return {"value_mean": self._mean, "value_mean_square": self._mean_square, "value_weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._mean = float(state["value_mean"])
        self._mean_square = float(state["value_mean_square"])
        self._weight = float(state["value_weight"])

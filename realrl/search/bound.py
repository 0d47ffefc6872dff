"""Periods that no plan can beat, for plans of which some calls are decided.

Two facts hold for every plan. A device-second is spent once: the areas of all calls (devices x seconds) fit into the
devices times the period. Calls that wait for each other in a cycle follow one another: their seconds, divided by the
steps that the cycle spans, fit into the period; calls that must all run between two of them add at least their areas
over the devices. A call that is quick takes many devices, and cannot be cheap for both facts. So the bound is of
weighted sums, ``share * cycle + (1 - share) * areas / devices``, of which each call that is not decided takes its least
value, and the largest over cycles and shares counts.

Invariants:
    - the bound of a partial plan is at most the period of every plan that completes it;
    - deciding a call never lowers it, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from realrl.search.fast import Model
from realrl.search.space import Choice

Array = npt.NDArray[np.float64]

_SHARES = np.linspace(0.0, 1.0, 17)


@dataclass(frozen=True, eq=False)
class Bounds:
    """Weighted sums of one model's calls, each a row over cycles and shares.

    Args:
        choices: of each call.
    """

    model: Model
    choices: Sequence[Sequence[Choice]]

    @cached_property
    def _per_second(self) -> Array:
        """Row of each call's seconds."""
        weights = [[(call in c.calls) / c.lag for c in self.model.flow.cycles] for call in range(len(self.choices))]
        return self._spread(np.array(weights), _SHARES)

    @cached_property
    def _per_area(self) -> Array:
        """Row of each call's device-seconds."""
        weights = [[(call in c.between) / c.lag for c in self.model.flow.cycles] for call in range(len(self.choices))]
        areas = self._spread(np.array(weights), _SHARES) + self._spread(
            np.ones((len(weights), len(weights[0]))), 1 - _SHARES
        )
        shares: Array = areas / self.model.cluster.n_devices
        return shares

    def _spread(self, weights: Array, shares: Array) -> Array:
        return (weights[:, :, None] * shares).reshape(len(weights), -1)

    def row(self, call: int, seconds: float, n_devices: int) -> Array:
        """Return the terms of seconds that a call spends on so many devices."""
        row: Array = seconds * (self._per_second[call] + n_devices * self._per_area[call])
        return row

    @cached_property
    def rows(self) -> list[Array]:
        """For each call, the terms of each choice."""
        return [
            np.stack([self.row(call, self.model.price(call, choice).seconds, choice.n_devices) for choice in found])
            for call, found in enumerate(self.choices)
        ]

    @cached_property
    def least(self) -> list[Array]:
        """For each call, the least terms of any choice."""
        return [rows.min(axis=0) for rows in self.rows]

    @cached_property
    def least_areas(self) -> list[float]:
        """For each call, the least device-seconds of any choice."""
        return [
            min(self.model.price(call, choice).seconds * choice.n_devices for choice in found)
            for call, found in enumerate(self.choices)
        ]

    @cached_property
    def root(self) -> Array:
        """The sum of the least terms of all calls."""
        total: Array = np.sum(self.least, axis=0)
        return total

    def of(self, total: Array) -> float:
        """Return the bound that a sum of terms proves."""
        return float(total.max())

    def of_choices(self, call: int, rest: Array) -> list[float]:
        """Return the bound for each choice of a call; `rest` are the terms of all other calls."""
        found: Any = (self.rows[call] + rest).max(axis=1)
        return list(found.tolist())


def undominated(model: Model, call: int, choices: Sequence[Choice], most_move: float) -> tuple[Choice, ...]:
    """Return the choices that no other one of the same size beats in seconds and in memory.

    Args:
        most_move: the greatest difference in seconds of moves that choices of the call can cause; a choice is kept if
            it is not slower by more than that.
    """

    def beats(one: Choice, other: Choice) -> bool:
        price, against = model.price(call, one), model.price(call, other)
        margin = 0.0 if one.strategy == other.strategy else most_move
        return (
            price.seconds + margin <= against.seconds
            and (not is_home or price.kept <= against.kept)
            and price.used <= against.used
            and price.used + price.copies <= against.used + against.copies
        )

    is_home, kept = model.flow.homes[call] == call, list[Choice]()
    fastest_first = sorted(choices, key=lambda choice: (model.price(call, choice).seconds, choice.order))
    for choice in fastest_first:
        if not any(beats(other, choice) for other in kept if other.n_devices == choice.n_devices):
            kept.append(choice)
    return tuple(sorted(kept, key=lambda choice: choice.order))

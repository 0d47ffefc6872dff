"""Periods that no plan can beat, for plans of which some calls are decided.

Three facts hold for every plan. A device works for one call at a time: calls whose meshes share devices take their
seconds one after another. A device-second is spent once: the areas (devices x seconds) of all calls on a mesh fit into
its devices times the period. Calls that wait for each other in a cycle follow one another: their seconds, divided by
the steps that the cycle spans, fit into the period; calls that must all run between two of them add the seconds of
those that share devices, and at least their areas over the devices of any mesh.

A call that is quick takes many devices, and cannot be cheap for both of the last facts. So what is known of calls that
are not decided is the least of weighted sums, ``share * cycle + (1 - share) * areas / devices``; the largest over cycles
and shares counts.

Invariants:
    - the bound of a partial plan is at most the period of every plan that completes it;
    - deciding a call never lowers it, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from realrl.search.fast import Model
from realrl.search.forest import Forest
from realrl.search.options import Option
from realrl.search.space import Choice

Array = npt.NDArray[np.float64]

_SHARES = np.linspace(0.0, 1.0, 17)


class Bounds:
    """Bounds of one problem's plans.

    Args:
        options: of each call, one for each size.
        order: calls in the order in which they are decided.
    """

    def __init__(self, model: Model, options: Sequence[Sequence[Option]], order: Sequence[int]) -> None:
        self._cycles, self._n_devices = model.flow.cycles, model.cluster.n_devices
        self._options, self._order = options, order
        lags = np.array([cycle.lag for cycle in self._cycles], dtype=float)
        calls = range(len(options))
        self._on, self._between = (
            np.array([[call in getattr(cycle, name) for cycle in self._cycles] for call in calls]) / lags
            for name in ("calls", "between")
        )

    # ------------------------------------------------------------ weighted sums

    @cached_property
    def _per_second(self) -> Array:
        """Row of each call's seconds, over cycles and shares."""
        return _spread(self._on, _SHARES)

    @cached_property
    def _per_area(self) -> Array:
        """Row of each call's device-seconds."""
        areas = _spread(self._between, _SHARES) + _spread(np.ones_like(self._between), 1 - _SHARES)
        shares: Array = areas / self._n_devices
        return shares

    def row(self, call: int, seconds: float, n_devices: int) -> Array:
        """Return the terms of seconds that a call spends on so many devices."""
        row: Array = seconds * (self._per_second[call] + n_devices * self._per_area[call])
        return row

    @cached_property
    def rows(self) -> list[Array]:
        """For each call, the terms of each size."""
        return [
            np.stack([self.row(call, one.seconds, one.n_devices) for one in found])
            for call, found in enumerate(self._options)
        ]

    @cached_property
    def least(self) -> list[Array]:
        """For each call, the least terms of any choice."""
        return [rows.min(axis=0) for rows in self.rows]

    def of_sizes(self, call: int, rest: Array) -> list[float]:
        """Return the bound for each size of a call; `rest` are the terms of all other calls."""
        found: Any = (self.rows[call] + rest).max(axis=1)
        return list(found.tolist())

    # ------------------------------------------------------------ meshes

    @cached_property
    def _seconds_ahead(self) -> list[Array]:
        """For each number of decided calls, the least seconds of all others around each cycle."""
        least = [min(one.seconds for one in self._options[call]) for call in self._order]
        n_calls = len(self._order)
        return [
            sum((least[i] * self._on[self._order[i]] for i in range(n, n_calls)), np.zeros(len(self._cycles)))
            for n in range(n_calls + 1)
        ]

    @cached_property
    def _decided(self) -> list[tuple[Array, Array]]:
        """For each number of decided calls, their places on cycles and between calls of cycles."""
        return [
            (self._on[list(self._order[:n])], self._between[list(self._order[:n])]) for n in range(len(self._order) + 1)
        ]

    def of_meshes(self, forest: Forest, vertices: Sequence[int], seconds: Array) -> float:
        """Return the bound that follows from which meshes share devices.

        Args:
            vertices, seconds: of the decided calls, in the order.
        """
        parts = forest.cover.take(vertices, axis=1) * seconds
        on, between = self._decided[len(vertices)]
        around = parts @ between + (seconds @ on + self._seconds_ahead[len(vertices)])
        return max(float(parts.sum(axis=1).max()), float(around.max()))


def _spread(weights: Array, shares: Array) -> Array:
    """Return [calls, cycles x shares]."""
    found: Array = (weights[:, :, None] * shares).reshape(len(weights), -1)
    return found


def undominated(model: Model, call: int, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the choices that no other one of the same size beats in seconds and in memory, moves apart."""

    def beats(one: Choice, other: Choice) -> bool:
        price, against = model.price(call, one), model.price(call, other)
        return (
            price.seconds <= against.seconds
            and (not is_home or price.kept <= against.kept)
            and price.used <= against.used
        )

    is_home, kept = model.flow.homes[call] == call, list[Choice]()
    fastest_first = sorted(choices, key=lambda choice: (model.price(call, choice).seconds, choice.order))
    for choice in fastest_first:
        if not any(beats(other, choice) for other in kept if other.n_devices == choice.n_devices):
            kept.append(choice)
    return tuple(sorted(kept, key=lambda choice: choice.order))

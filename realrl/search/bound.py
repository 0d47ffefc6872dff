"""Periods that no plan can beat, for plans of which some calls are decided.

Three facts hold for every plan. A device works for one call at a time: calls whose meshes share devices take their
seconds one after another. A device-second is spent once: the areas (devices x seconds) of all calls on a mesh fit into
its devices times the period. Calls that wait for each other in a cycle follow one another: their seconds, divided by
the steps that the cycle spans, fit into the period; calls that must all run between two of them add the seconds of
those that share devices, and at least their areas over the devices of any mesh.

A call that is quick takes many devices, and cannot be cheap for both of the last facts. So what is known of calls that
are not decided is the least of weighted sums, ``share * cycle + (1 - share) * areas / devices``; the largest over all
cycles and shares counts.

What roles keep fits into the memory of all devices, and of those of each mesh. So bytes may be added as seconds, at any
weight, if as much is taken away for the memory that there is: a choice cannot be quick and take little memory at once.

Invariants:
    - the bound of a partial plan is at most the period of every plan that completes it;
    - deciding a call never lowers it, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.search.fast import Model
from realrl.search.forest import Forest
from realrl.search.options import Array, Option
from realrl.search.space import Choice

CLOSE = 1.0 - 1e-12  # a bound may exceed what it proves by rounding
_SHARES, _FEW_SHARES = np.linspace(0.0, 1.0, 17), np.linspace(0.0, 1.0, 5)


class Bounds:
    """Bounds of one problem's plans.

    Args:
        options: of each call, one for each size.
        order: calls in the order in which they are decided.
        weights: seconds for which a byte counts that is kept on a device; 0 is the first.

    Attributes:
        on, between: 1 / lag for calls on a cycle, and between two of its calls; else 0; [calls, cycles].
    """

    def __init__(self, model: Model, options: Sequence[Sequence[Option]], order: Sequence[int], weights: Array) -> None:
        self._cycles, self._n_devices, self._capacity = model.flow.cycles, model.cluster.n_devices, model.capacity
        self._options, self._order, self.weights = options, order, weights
        lags = np.array([cycle.lag for cycle in self._cycles], dtype=float)
        calls = range(len(options))
        self.on, self.between = (
            np.array([[call in getattr(cycle, name) for cycle in self._cycles] for call in calls]) / lags
            for name in ("calls", "between")
        )
        self._rows: dict[Option, Array] = {}

    # ------------------------------------------------------------ weighted sums

    @cached_property
    def _terms(self) -> tuple[Array, Array, Array]:
        """Weights of seconds [calls, terms], of device-seconds [calls, terms], and of bytes on devices [terms].

        There is a term for each cycle, share and weight of bytes; with bytes, fewer shares.
        """
        shares = np.concatenate([_SHARES, np.repeat(_FEW_SHARES, len(self.weights) - 1)])
        weights = np.concatenate([0.0 * _SHARES, np.tile(self.weights[1:], len(_FEW_SHARES))])
        per_second = _spread(self.on, shares)
        per_area = _spread(self.between, shares) + _spread(np.ones_like(self.between), 1 - shares)
        return per_second, per_area / self._n_devices, np.tile(weights, len(self._cycles))

    def row(self, call: int, n_devices: int, seconds: float, kept: float) -> Array:
        """Return the terms of a call that takes seconds, and keeps bytes on a device of its mesh on average."""
        per_second, per_area, per_byte = self._terms
        row: Array = seconds * (per_second[call] + n_devices * per_area[call])
        if kept:
            row += (kept * n_devices / self._n_devices) * per_byte
        return row

    def row_of(self, call: int, option: Option) -> Array:
        """Return the least terms of an option."""
        if option.choice is not None:
            return self.row(call, option.n_devices, option.seconds, option.kept)
        if option not in self._rows:
            self._rows[option] = np.min([self.row_of(call, part) for part in option.parts], axis=0)
        return self._rows[option]

    @cached_property
    def least(self) -> list[Array]:
        """For each call, the least terms of any choice."""
        return [np.min([self.row_of(call, one) for one in some], axis=0) for call, some in enumerate(self._options)]

    def of(self, rows: Any) -> Any:
        """Return the bound that the sums of all calls' terms prove; [..., terms]."""
        _, _, per_byte = self._terms
        room = per_byte * self._capacity if self._capacity < np.inf else 0.0
        return (rows - room).max(axis=-1)

    # ------------------------------------------------------------ meshes

    @cached_property
    def _seconds_ahead(self) -> list[Array]:
        """For each number of decided calls, the least seconds of all others around each cycle."""
        least = [min(one.seconds for one in self._options[call]) for call in self._order]
        n_calls = len(self._order)
        return [
            sum((least[i] * self.on[self._order[i]] for i in range(n, n_calls)), np.zeros(len(self._cycles)))
            for n in range(n_calls + 1)
        ]

    @cached_property
    def _decided(self) -> list[tuple[Array, Array]]:
        """For each number of decided calls, their places on cycles and between calls of cycles."""
        return [
            (self.on[list(self._order[:n])], self.between[list(self._order[:n])]) for n in range(len(self._order) + 1)
        ]

    def of_meshes(
        self, forest: Forest, vertices: Sequence[int], options: Sequence[Option], moved: Sequence[float]
    ) -> float:
        """Return the bound that follows from which meshes share devices.

        Args:
            vertices, options, moved: of the decided calls, in the order; the seconds of moves.
        """
        cover, above = forest.cover.take(vertices, axis=1), forest.above.take(vertices, axis=1)
        weighed = np.array([option.weighed for option in options]) + np.array(moved)[:, None, None]
        on, between = self._decided[len(vertices)]
        seconds = weighed[:, 0, 0]
        around = (cover * seconds) @ between + (seconds @ on + self._seconds_ahead[len(vertices)])
        # what a device of a part of a mesh keeps is not the average of the mesh
        loads = (cover - above) @ weighed[:, 0] + above @ weighed[:, 1]
        if len(self.weights) > 1:
            used = np.array([option.least[1] for option in options])
            room = self._capacity - ((cover == 1.0) * used).max(axis=1)
            loads -= room[:, None] * self.weights
        return max(float(loads.max()), float(around.max()))


def _spread(weights: Array, shares: Array) -> Array:
    """Return [calls, cycles x shares]."""
    found: Array = (weights[:, :, None] * shares).reshape(len(weights), -1)
    return found


def undominated(model: Model, call: int, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the choices that no other one with the same strategy, and so with the same moves, beats."""

    def beats(one: Choice, other: Choice) -> bool:
        price, against = model.price(call, one), model.price(call, other)
        keeps_less = price.kept <= against.kept or not is_home
        return price.seconds <= against.seconds and price.used <= against.used and keeps_less

    is_home, kept = model.flow.homes[call] == call, dict[ParallelStrategy, list[Choice]]()
    fastest_first = sorted(choices, key=lambda choice: (model.price(call, choice).seconds, choice.order))
    for choice in fastest_first:
        alike = kept.setdefault(choice.strategy, [])
        if not any(beats(other, choice) for other in alike):
            alike.append(choice)
    return tuple(sorted(chain.from_iterable(kept.values()), key=lambda choice: choice.order))

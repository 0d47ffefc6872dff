"""The choices of calls as numbers, and the quickest ones of several calls that share a mesh and its memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.search.bound import undominated
from realrl.search.problem import Problem
from realrl.search.runners import Plan
from realrl.search.space import Choice, Placed, Span

_Value = TypeVar("_Value", bound=Hashable)

_LEVELS = np.array([1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 1e9])  # limits of bytes that a call uses, over the least one
_FINER = 2.0 ** -np.arange(0.0, 10.0, 0.5)  # weights of a byte, over the greatest one


class Values:
    """The choices of each call that no other one beats, by number.

    Attributes:
        seconds, kept, used: of each choice; bytes as `realrl.search.fast.Price` has them, kept ones of homes alone.
        of_size: number of devices -> choices.
    """

    def __init__(self, problem: Problem) -> None:
        self._model, homes = problem.model, problem.model.flow.homes
        calls = range(len(problem.choices))
        self.choices = [undominated(self._model, call, problem.choices[call]) for call in calls]
        prices = [[self._model.price(call, one) for one in self.choices[call]] for call in calls]
        self.seconds = [np.array([self._model.least(c, one) for one in self.choices[c]]) for c in calls]
        self.kept = [np.array([p.kept * (homes[c] == c) for p in prices[c]], dtype=float) for c in calls]
        self.used = [np.array([p.used for p in prices[c]], dtype=float) for c in calls]
        self.of_size = [alike([one.n_devices for one in found]) for found in self.choices]

    def of(self, plan: Plan, calls: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return seconds, kept and used bytes of some calls of a plan."""
        homes, found = self._model.flow.homes, []
        for call in calls:
            choice = plan[call].choice
            price = self._model.price(call, choice)
            found.append((self._model.least(call, choice), price.kept * (homes[call] == call), price.used))
        values = np.array(found, dtype=float).reshape(len(calls), 3)
        return values[:, 0], values[:, 1], values[:, 2]


class Fill(NamedTuple):
    """Choices of calls that share a mesh, and their seconds, those of moves on it included."""

    seconds: float
    choices: tuple[Choice, ...]


class Fills:
    """The choices of calls that share a mesh.

    Args:
        weight: seconds for a byte that is kept, the most.
    """

    def __init__(self, problem: Problem, values: Values, weight: float) -> None:
        self._model, self._values = problem.model, values
        self._weights = np.concatenate([[0.0], weight * _FINER])
        self.of = cache(self._of)
        self._bytes, self._quickest = cache(self._bytes_of), cache(self._quickest_of)

    def placed(self, calls: Sequence[int], span: Span, room: float) -> dict[int, Placed] | None:
        """Return the quickest choices that take at most `room` bytes together on one mesh, or a part of it."""
        for fill in self.of(tuple(calls), span[1] - span[0]):
            if self._bytes(tuple(calls), fill.choices) <= room:
                places = [(span[0], span[0] + choice.n_devices) for choice in fill.choices]
                return dict(zip(calls, map(Placed, places, fill.choices), strict=True))
        return None

    def _of(self, calls: tuple[int, ...], size: int) -> list[Fill]:
        """Return choices for calls on a mesh, or the largest part of it that they can have, the quickest first.

        They are those of the least seconds and bytes, at several weights of a byte that is kept and limits of bytes
        that a call uses, which are the same for all calls; and the same with the strategy of the role's home for all
        its calls, so that nothing moves.
        """
        values = self._values
        parts = [max((part for part in values.of_size[call] if part <= size), default=0) for call in calls]
        if not all(parts):
            return []
        numbers = [np.array(values.of_size[call][part]) for call, part in zip(calls, parts, strict=True)]
        least = max(values.used[call][some].min() for call, some in zip(calls, numbers, strict=True))
        weights = np.tile(self._weights, len(_LEVELS))[:, None]
        levels = np.repeat(least * _LEVELS, len(self._weights))[:, None]
        picked = []
        for call, some in zip(calls, numbers, strict=True):
            seconds, kept, used = (x[call][some] for x in (values.seconds, values.kept, values.used))
            measure = np.where(used > levels, np.inf, seconds + weights * kept)
            picked.append(some[measure.argmin(axis=1)])
        rows = {tuple(row) for row in np.stack(picked, axis=1).tolist()}
        rows |= {self._still(calls, row, parts) for row in rows}
        found = [self._fill(dict(zip(calls, row, strict=True))) for row in sorted(rows)]
        return sorted(found, key=lambda fill: fill.seconds)

    def _still(self, calls: Sequence[int], row: tuple[int, ...], parts: Sequence[int]) -> tuple[int, ...]:
        """Return choices in the place of others: of calls away from home, the quickest with the home's strategy."""
        numbers, still = dict(zip(calls, row, strict=True)), []
        for (call, number), part in zip(numbers.items(), parts, strict=True):
            home = self._model.flow.homes[call]
            if home in numbers:
                strategy = self._values.choices[home][numbers[home]].strategy
                number = self._quickest(call, part).get(strategy, number)
            still.append(numbers[call] if home == call else number)
        return tuple(still)

    def _quickest_of(self, call: int, size: int) -> Mapping[ParallelStrategy, int]:
        """Return strategy -> the call's quickest choice with it."""
        found: dict[ParallelStrategy, int] = {}
        for number in sorted(self._values.of_size[call][size], key=lambda i: self._values.seconds[call][i]):
            found.setdefault(self._values.choices[call][number].strategy, number)
        return found

    def _fill(self, numbers: Mapping[int, int]) -> Fill:
        model, seconds = self._model, 0.0
        choices = {call: self._values.choices[call][number] for call, number in numbers.items()}
        for call, number in numbers.items():
            for move in model.flow.moves_of[call]:
                source = choices.get(move.source)
                if move.target == call and source is not None and source.n_devices == choices[call].n_devices:
                    seconds += model.move(move, source.strategy, choices[call].strategy, "same").seconds
            seconds += self._values.seconds[call][number]
        return Fill(float(seconds), tuple(choices.values()))

    def _bytes_of(self, calls: tuple[int, ...], choices: tuple[Choice, ...]) -> int:
        """Return the most bytes that calls on one mesh take together, those of moves on it included."""
        places = [Placed((0, choice.n_devices), choice) for choice in choices]
        return self._model.memory.need(dict(zip(calls, places, strict=True)), is_least=False)


def alike(values: Sequence[_Value]) -> dict[_Value, list[int]]:
    """Return value -> its places in a sequence."""
    found: dict[_Value, list[int]] = {}
    for place, value in enumerate(values):
        found.setdefault(value, []).append(place)
    return found

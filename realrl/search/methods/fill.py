"""Strategies for calls that share a mesh: the least seconds that fit its devices together.

Calls of one mesh follow one another. So of all choices that a method allows, those count whose seconds add up to
the least, while the state that roles keep there and the most that any call uses beside it fit a device.

Invariants of `Filler.best`:
    - what it returns is allowed, fits, and no other choices that are allowed and fit add up to less;
    - a call whose pin, or a role without parameters whose samples, allow fewer devices than the mesh has takes the
      largest part of it that they do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.search.bound import CLOSE
from realrl.search.fast import Price
from realrl.search.flow import Move
from realrl.search.problem import Problem
from realrl.search.space import Choice

STAGES = (InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP)


@dataclass(frozen=True)
class Rule:
    """The strategies that a method gives.

    Attributes:
        allows: True if a call may have a choice.
        is_alike: True if a call has the strategy of its role's home.
    """

    allows: Callable[[MFCDef, Choice], bool] = lambda mfc, choice: True
    is_alike: Callable[[MFCDef], bool] = lambda mfc: False


@dataclass(frozen=True)
class Filled:
    """Choices of calls on one mesh.

    Attributes:
        seconds: of generation, inference and training, without moves.
    """

    choices: Mapping[int, Choice]
    seconds: tuple[float, ...]


@dataclass(slots=True, eq=False)
class _Option:
    """Choices of one role's calls.

    Attributes:
        seconds: their sum.
        kept, used: bytes that the role keeps, and the most that a call takes beside what roles keep.
    """

    seconds: float = 0.0
    kept: int = 0
    used: int = 0
    choices: tuple[tuple[int, Choice], ...] = ()

    def __add__(self, other: _Option) -> _Option:
        return _Option(
            self.seconds + other.seconds,
            self.kept + other.kept,
            max(self.used, other.used),
            self.choices + other.choices,
        )


class _Level(NamedTuple):
    """Options of calls, for all limits from the most that one of them uses to the one that they were found for."""

    limit: float
    most: float
    options: list[_Option]

    @classmethod
    def of(cls, limit: float, options: list[_Option]) -> _Level:
        return cls(limit, max([option.used for option in options], default=0), options)

    def holds_for(self, limit: float) -> bool:
        return self.most <= limit <= self.limit


_Sum = tuple[float, int, _Option, _Option]
"""Seconds and kept bytes of two options together."""


@dataclass
class Filler:
    """Strategies for the calls of one problem, by one rule.

    Attributes:
        mfcs: of each call.
        capacity: bytes of a device that a plan may use.
        moves_count: True if moves of parameters on the mesh add to the seconds that are to be the least.
    """

    problem: Problem
    mfcs: Sequence[MFCDef]
    rule: Rule
    capacity: float
    moves_count: bool = True
    _filled: dict[tuple[tuple[int, ...], int], Filled | None] = field(default_factory=dict)
    _fastest: dict[tuple[int, int], list[tuple[Price, Choice]]] = field(default_factory=dict)
    _of_role: dict[tuple[tuple[int, ...], int], list[_Level]] = field(default_factory=dict)
    _of_rest: dict[tuple[tuple[int, ...], int, ParallelStrategy | None], _Level] = field(default_factory=dict)

    def best(self, calls: tuple[int, ...], size: int) -> Filled | None:
        """Return the best choices of calls that share a mesh of so many devices; None if none fit."""
        if (calls, size) not in self._filled:
            self._filled[calls, size] = self._best(calls, size)
        return self._filled[calls, size]

    def bound(self, calls: tuple[int, ...], size: int) -> float:
        """Return seconds of calls that share a mesh of so many devices which no choices are below."""
        least = [self.fastest(call, size)[:1] for call in calls]
        return CLOSE * sum(found[0][0].seconds if found else math.inf for found in least)

    def least(self, calls: tuple[int, ...], size: int) -> float | None:
        """Return the bytes of a device that calls need on a mesh of so many devices; None if one has no choice."""
        needs = [
            most + sum(found[-1].kept for found in options) for options, most in self._levels(calls, size, math.inf)
        ]
        return min(needs, default=None)

    def fastest(self, call: int, size: int) -> list[tuple[Price, Choice]]:
        """Return the choices of a call on a mesh of so many devices, or the largest part of it, the quickest first."""
        if (call, size) not in self._fastest:
            found = [choice for choice in self.problem.choices[call] if choice.n_devices <= size]
            is_bound = self.problem.model.flow.homes[call] >= 0 and call not in self.problem.pins
            part = size if is_bound else max((choice.n_devices for choice in found), default=0)
            allowed = [c for c in found if c.n_devices == part and self.rule.allows(self.mfcs[call], c)]
            priced = [(self.problem.model.price(call, choice), choice) for choice in allowed]
            self._fastest[call, size] = _unbeaten(sorted(priced, key=lambda one: (one[0].seconds, one[1].order)))
        return self._fastest[call, size]

    # ------------------------------------------------------------ the search

    def _best(self, calls: tuple[int, ...], size: int) -> Filled | None:
        best: _Option | None = None
        for options, most in self._levels(calls, size, self.capacity):
            if best is not None and sum(found[0].seconds for found in options) >= best.seconds:
                break  # lower levels have fewer choices, and slower ones
            quickest = _joined(options, self.capacity)
            does_fit = quickest is not None and quickest.kept + quickest.used <= self.capacity
            joined = quickest if does_fit else _joined(options, self.capacity - most)
            if joined is not None and (best is None or joined.seconds < best.seconds):
                best = joined
            if does_fit:
                break
        if best is None:
            return None
        choices = dict(best.choices)
        seconds = [0.0] * len(STAGES)
        for call, choice in choices.items():
            seconds[STAGES.index(self.mfcs[call].interface_type)] += self.problem.model.price(call, choice).seconds
        return Filled(choices, tuple(seconds))

    def _levels(self, calls: Sequence[int], size: int, limit: float) -> Iterator[tuple[list[list[_Option]], int]]:
        """Yield the options of all roles and the most bytes that one uses: at most `limit`, then less and less."""
        while all(options := self._options(calls, size, limit)):
            most = max(option.used for found in options for option in found)
            yield options, most
            limit = most - 1

    def _options(self, calls: Sequence[int], size: int, limit: float) -> list[list[_Option]]:
        """Return for each role its choices that use at most `limit` bytes, those that keep more only if quicker."""
        by_role: dict[str, list[int]] = {}
        for call in calls:
            by_role.setdefault(self.mfcs[call].role, []).append(call)
        return [self._role_options(tuple(own), size, limit) for own in by_role.values()]

    def _role_options(self, own: tuple[int, ...], size: int, limit: float) -> list[_Option]:
        levels = self._of_role.setdefault((own, size), [])
        for level in levels:
            if level.holds_for(limit):
                return level.options
        options = self._options_within(own, size, limit)
        levels.append(_Level.of(limit, options))
        return options

    def _options_within(self, own: tuple[int, ...], size: int, limit: float) -> list[_Option]:
        home = self.problem.model.flow.homes[own[0]]
        if home not in own:
            return self._rest(own, size, limit, None)
        return _undominated(self._at_home(home, tuple([call for call in own if call != home]), size, limit))

    def _at_home(self, home: int, rest: tuple[int, ...], size: int, limit: float) -> Iterator[_Sum]:
        for price, choice in self.fastest(home, size):
            if price.used <= limit:
                own = _Option(price.seconds, price.kept, price.used, ((home, choice),))
                for others in self._rest(rest, size, limit, choice.strategy):
                    yield own.seconds + others.seconds, own.kept + others.kept, own, others

    def _rest(self, calls: tuple[int, ...], size: int, limit: float, home: ParallelStrategy | None) -> list[_Option]:
        """Return the quickest choices of calls whose role lives in `home`, on other devices if None; [] if none fit."""
        key = calls, size, home
        level = self._of_rest.get(key)
        if level is None or not level.holds_for(limit):
            level = self._of_rest[key] = _Level.of(limit, self._option(calls, size, limit, home))
        return level.options

    def _option(self, calls: Sequence[int], size: int, limit: float, home: ParallelStrategy | None) -> list[_Option]:
        total = _Option()
        for call in calls:
            quickest = self._quickest(call, size, limit, home)
            if quickest is None:
                return []
            total += quickest
        return [total]

    def _quickest(self, call: int, size: int, limit: float, home: ParallelStrategy | None) -> _Option | None:
        is_alike = home is not None and self.rule.is_alike(self.mfcs[call])
        best: _Option | None = None
        for price, choice in self.fastest(call, size):
            if best is not None and price.seconds >= best.seconds:
                break
            if price.used > limit or (is_alike and choice.strategy != home):
                continue
            seconds, n_bytes = self._moved(call, home, choice)
            total = price.seconds + (seconds if self.moves_count else 0.0)
            if price.used + n_bytes <= limit and (best is None or total < best.seconds):
                best = _Option(total, 0, price.used + n_bytes, ((call, choice),))
        return best

    def _moved(self, call: int, home: ParallelStrategy | None, choice: Choice) -> tuple[float, int]:
        """Return the seconds and bytes of parameters that come from a home on the same mesh, on another one if None.

        Seconds of the latter depend on where that is, and are left out.
        """
        model = self.problem.model
        source = model.flow.homes[call]
        if source in (-1, call):
            return 0.0, 0
        move = Move(call, source, call)
        if home is not None:
            found = model.move(move, home, choice.strategy, "same")
            return found.seconds, found.n_bytes
        if choice.n_devices == model.cluster.n_devices:
            return math.inf, sys.maxsize  # there is no other mesh
        is_in_node = choice.n_devices < model.cluster.n_devices_per_node
        found = model.move(move, ParallelStrategy(), choice.strategy, "beside" if is_in_node else "apart")
        return 0.0, found.n_bytes


def _joined(options: Sequence[Sequence[_Option]], room: float) -> _Option | None:
    """Return the quickest options, one of each role, that keep at most `room` bytes together."""
    least = [found[-1].kept for found in options]
    joined = [one for one in options[0] if one.kept <= room - sum(least[1:])]
    for number, found in enumerate(options[1:], 1):
        rest = room - sum(least[number + 1 :])
        sums = ((a.seconds + b.seconds, a.kept + b.kept, a, b) for a in joined for b in found)
        joined = _undominated(one for one in sums if one[1] <= rest)
    return min(joined, key=lambda one: one.seconds, default=None)


def _undominated(sums: Iterable[_Sum]) -> list[_Option]:
    """Return the sums of two options that no other one beats in seconds and bytes, the quickest first."""
    found: list[_Option] = []
    least: float = math.inf
    for _, kept, one, other in sorted(sums, key=itemgetter(0, 1)):
        if kept < least:
            found.append(one + other)
            least = kept
    return found


def _unbeaten(priced: Sequence[tuple[Price, Choice]]) -> list[tuple[Price, Choice]]:
    """Return the choices, the quickest first, that no quicker one of their strategy beats in bytes."""
    kept: list[tuple[Price, Choice]] = []
    for price, choice in priced:
        rivals = (other for other, quicker in kept if quicker.strategy == choice.strategy)
        if not any(other.kept <= price.kept and other.used <= price.used for other in rivals):
            kept.append((price, choice))
    return kept

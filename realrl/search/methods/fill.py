"""Strategies for calls that share a mesh: the least seconds that fit its devices together.

Calls of one mesh follow one another. So of all choices that a method allows, those count whose seconds add up to the
least, while the state that roles keep there and the most that any call uses beside it fit a device.

Invariants of `Filler.best`:
    - what it returns is allowed, fits, and no other choices that are allowed and fit add up to less;
    - a call whose samples, or whose pin, allow fewer devices than the mesh has takes the largest part of it that they do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.search.fast import Price
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
        seconds: of generation, inference and training; calls of a stage follow one another.
    """

    choices: Mapping[int, Choice]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class _Option:
    """Choices of one role's calls, the bytes that the role keeps, and the sum of their seconds."""

    seconds: float
    kept: int
    choices: tuple[tuple[int, Choice], ...] = ()

    def __add__(self, other: _Option) -> _Option:
        return _Option(self.seconds + other.seconds, self.kept + other.kept, self.choices + other.choices)


@dataclass
class Filler:
    """Strategies for the calls of one problem, by one rule.

    Attributes:
        mfcs: of each call.
        capacity: bytes of a device that a plan may use.
    """

    problem: Problem
    mfcs: Sequence[MFCDef]
    rule: Rule
    capacity: float
    _filled: dict[tuple[tuple[int, ...], int], Filled | None] = field(default_factory=dict)
    _fastest: dict[tuple[int, int], list[tuple[Price, Choice]]] = field(default_factory=dict)

    def best(self, calls: tuple[int, ...], size: int) -> Filled | None:
        """Return the best choices of calls that share a mesh of so many devices; None if none fit."""
        if (calls, size) not in self._filled:
            self._filled[calls, size] = self._best(calls, size)
        return self._filled[calls, size]

    def least(self, calls: tuple[int, ...], size: int) -> float | None:
        """Return the bytes of a device that calls need on a mesh of so many devices; None if one has no choice."""
        needs = []
        for limit in self._limits(calls, size):
            options = self._options(calls, size, limit)
            if all(options):
                needs.append(limit + sum(min(one.kept for one in found) for found in options))
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
        for limit in sorted(self._limits(calls, size), reverse=True):
            options = self._options(calls, size, limit)
            if not all(options):
                break
            if best is not None and sum(min(one.seconds for one in found) for found in options) >= best.seconds:
                break  # lower limits leave fewer choices, and slower ones
            joined = _joined(options, self.capacity - limit)
            if joined is not None and (best is None or joined.seconds < best.seconds):
                best = joined
        if best is None:
            return None
        choices = dict(best.choices)
        seconds = [0.0] * len(STAGES)
        for call, choice in choices.items():
            seconds[STAGES.index(self.mfcs[call].interface_type)] += self.problem.model.price(call, choice).seconds
        return Filled(choices, tuple(seconds))

    def _limits(self, calls: Collection[int], size: int) -> set[float]:
        """Return the bytes that some choice uses beside what roles keep, its copies included or not."""
        used = {
            number
            for call in calls
            for price, _ in self.fastest(call, size)
            for number in (price.used, price.used + price.copies)
        }
        return {number for number in used if number <= self.capacity}

    def _options(self, calls: Sequence[int], size: int, limit: float) -> list[list[_Option]]:
        """Return for each role its choices that use at most `limit` bytes, those that keep more only if quicker."""
        homes = self.problem.model.flow.homes
        by_role: dict[str, list[int]] = {}
        for call in calls:
            by_role.setdefault(self.mfcs[call].role, []).append(call)
        found = []
        for own in by_role.values():
            home = homes[own[0]]
            if home in own:
                rest = [call for call in own if call != home]
                options = self._at_home(home, rest, size, limit)
            else:
                options = self._option(own, size, limit, None)
            found.append(_undominated(options))
        return found

    def _at_home(self, home: int, rest: Sequence[int], size: int, limit: float) -> Iterator[_Option]:
        for price, choice in self.fastest(home, size):
            if price.used <= limit:
                own = _Option(price.seconds, price.kept, ((home, choice),))
                yield from (own + others for others in self._option(rest, size, limit, choice))

    def _option(self, calls: Sequence[int], size: int, limit: float, home: Choice | None) -> list[_Option]:
        """Return the quickest choices of calls whose role lives in `home`, on other devices if None; [] if none fit."""
        total = _Option(0.0, 0)
        for call in calls:
            quickest = self._quickest(call, size, limit, home)
            if quickest is None:
                return []
            total += quickest
        return [total]

    def _quickest(self, call: int, size: int, limit: float, home: Choice | None) -> _Option | None:
        is_alike = home is not None and self.rule.is_alike(self.mfcs[call])
        for price, choice in self.fastest(call, size):
            is_copied = home is None or choice.strategy != home.strategy
            if price.used + (price.copies if is_copied else 0) <= limit and not (is_alike and is_copied):
                return _Option(price.seconds, 0, ((call, choice),))
        return None


def _joined(options: Sequence[Sequence[_Option]], room: float) -> _Option | None:
    """Return the quickest options, one of each role, that keep at most `room` bytes together."""
    joined = [_Option(0.0, 0)]
    least = [min(one.kept for one in found) for found in options]
    for number, found in enumerate(options):
        rest = room - sum(least[number + 1 :])
        joined = _undominated(a + b for a in joined for b in found if a.kept + b.kept <= rest)
    return min(joined, key=lambda one: one.seconds, default=None)


def _undominated(options: Iterator[_Option] | Sequence[_Option]) -> list[_Option]:
    """Return the options that no other one beats in seconds and bytes, the quickest first."""
    kept: list[_Option] = []
    for option in sorted(options, key=lambda one: (one.seconds, one.kept)):
        if not kept or option.kept < kept[-1].kept:
            kept.append(option)
    return kept


def _unbeaten(priced: Sequence[tuple[Price, Choice]]) -> list[tuple[Price, Choice]]:
    """Return the choices, the quickest first, that no quicker one of their strategy beats in bytes."""
    kept: list[tuple[Price, Choice]] = []
    for price, choice in priced:
        rivals = (other for other, quicker in kept if quicker.strategy == choice.strategy)
        if not any(other.kept <= price.kept and other.used <= price.used for other in rivals):
            kept.append((price, choice))
    return kept

"""Local search: from a plan to the best one that differs in one call, or in the mesh of a few, and again, from several.

It proves nothing. Its plans let branches be left out early.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from realrl.search.bound import Bounds, undominated
from realrl.search.fast import Placed, Span, relation
from realrl.search.options import Array
from realrl.search.problem import Problem
from realrl.search.runners import Plan
from realrl.search.space import Choice

Score = tuple[float, float]  # bytes that are lacking, seconds of a step

_N_MEASURES = 3
_N_STARTS = 3  # given plans from which to walk
_MOST_TRIED = 100  # places and choices of one call that are evaluated, the most promising ones
_MOST_ASKED = 3  # plans of a step that are asked about, if better ones are not accepted
_TICK = 50  # evaluations between two reports


class Walk:
    """Local searches of one problem.

    Args:
        bounds: of the problem's choices.
        seed: decides from which plans to start, after the first.
    """

    def __init__(self, problem: Problem, bounds: Bounds, *, seed: int) -> None:
        self.n_evaluated = 0
        self._model, self._bounds, self._pins = problem.model, bounds, problem.pins
        self._random = random.Random(seed)
        self._calls = range(len(problem.choices))
        self._choices = [undominated(self._model, call, problem.choices[call]) for call in self._calls]
        self._rows = [np.stack([self._row(call, one) for one in self._choices[call]]) for call in self._calls]
        self._plan: Plan | None = None  # where a walk is
        self._score: Score = (math.inf, math.inf)

    def run(self, n_walks: int, starts: Iterable[Plan] = ()) -> Iterator[tuple[Plan | None, float]]:
        """Yield plans that fit with their periods, and (None, inf) in between.

        Args:
            n_walks: beside those from `starts`.
        """
        known: list[tuple[float, Plan]] = []
        for plan in starts:
            score = self._score_of(plan)
            if not score[0] and self._model.accepts(plan):
                known.append((score[1], plan))
                yield plan, score[1]
        known.sort(key=lambda one: one[0])
        best = known[0] if known else (math.inf, None)
        for number in range(-min(len(known), _N_STARTS), n_walks):
            if number < 0:
                start: Plan | None = known[-number - 1][1]
            else:
                start = self._spread(number) if number < _N_MEASURES else self._shaken(best[1])
            if start is None:
                continue
            self._plan, self._score = start, self._score_of(start)
            yield from self._walk()
            lacking, period = self._score
            if not lacking and period < best[0]:
                best = period, self._plan

    def _walk(self) -> Iterator[tuple[Plan | None, float]]:
        """Go on until no step leads to a better plan."""
        is_moving = True
        while is_moving:
            is_moving = False
            for call in self._random.sample(self._calls, len(self._calls)):
                better: list[tuple[Score, int, Plan]] = []
                for number, plan in enumerate(self._changed(call)):
                    limit = better[0][0] if len(better) == _MOST_ASKED else self._score
                    score = self._score_of(plan, limit)
                    if score < limit:
                        better = sorted([*better, (score, number, plan)], reverse=True)[-_MOST_ASKED:]
                    if self.n_evaluated % _TICK == 0:
                        yield None, math.inf
                while better and not (better[-1][0][0] or self._model.accepts(better[-1][2])):
                    better.pop()
                if better:
                    is_moving = True
                    self._score, _, self._plan = better[-1]
                    if not self._score[0]:
                        yield self._plan, self._score[1]

    def _score_of(self, plan: Plan, against: Score = (math.inf, math.inf)) -> Score:
        """Return the score of a plan; moves, which take long to price, count if it is better than `against` without."""
        self.n_evaluated += 1
        lacking = self._model.overflow(plan)
        if lacking:
            return lacking, 0.0
        limit = math.inf if against[0] else against[1]
        quick = self._model.period(plan, moves=False, limit=limit)
        if quick >= limit:
            return 0.0, quick
        return 0.0, self._model.period(plan, limit=limit)

    # ------------------------------------------------------------ steps

    def _changed(self, call: int) -> Iterator[Plan]:
        """Yield plans that differ in one call, the most promising ones first."""
        plan = self._plan
        assert plan is not None
        others = [placed.span for c, placed in enumerate(plan) if c != call]
        rest = sum(self._row(other, placed.choice) for other, placed in enumerate(plan) if other != call)
        limits = self._bounds.of(self._rows[call] + rest).tolist()
        n_tried = 0
        for number in sorted(range(len(limits)), key=lambda number: (limits[number], number)):
            if n_tried > _MOST_TRIED or (not self._score[0] and limits[number] >= self._score[1]):
                break
            choice = self._choices[call][number]
            for span in self._places(others, call, choice.n_devices):
                n_tried += 1
                yield (*plan[:call], Placed(span, choice), *plan[call + 1 :])

    def _row(self, call: int, choice: Choice) -> Array:
        price = self._model.price(call, choice)
        kept = price.kept if self._model.flow.homes[call] == call else 0
        return self._bounds.row(call, choice.n_devices, price.seconds, kept)

    def _places(self, others: Sequence[Span], call: int, size: int) -> list[Span]:
        """Return places of a mesh that begin or end where another one does, or with the cluster."""
        pin = self._pins.get(call)
        if pin is not None and pin.mesh is not None:
            starts = {pin.mesh.ranks[0]}
        else:
            bounds = {0, self._model.cluster.n_devices, *(bound for span in others for bound in span)}
            starts = {start for bound in bounds for start in (bound, bound - size)}
        return [span for start in sorted(starts) if self._is_legal(span := (start, start + size), others)]

    def _is_legal(self, span: Span, others: Sequence[Span]) -> bool:
        start, end = span
        node, size = self._model.cluster.n_devices_per_node, end - start
        if start < 0 or end > self._model.cluster.n_devices or start % node % min(size, node):
            return False
        if size < node and start // node != (end - 1) // node:
            return False
        return all(
            end <= other[0] or other[1] <= start or relation(span, other, node) in ("same", "inside", "around")
            for other in others
        )

    # ------------------------------------------------------------ starts

    def _spread(self, number: int) -> Plan | None:
        """Return a plan of the best choices by one of three measures: bytes, seconds, device-seconds."""

        def measure(call: int, choice: Choice) -> float:
            price = self._model.price(call, choice)
            return (price.kept + price.used, price.seconds, price.seconds * choice.n_devices)[number]

        plan: list[Placed] = []
        for call in self._calls:
            best_first = sorted(self._choices[call], key=lambda c: (measure(call, c), c.order))
            placed = self._first([one.span for one in plan], call, best_first)
            if placed is None:
                return None
            plan.append(placed)
        return tuple(plan)

    def _shaken(self, best: Plan | None) -> Plan | None:
        """Return the best plan with a few calls elsewhere; a random plan if there is none."""
        kept = self._random.sample(self._calls, self._random.randrange(len(self._calls))) if best else []
        plan = {call: best[call] for call in kept} if best else {}
        for call in self._calls:
            if call not in plan:
                choices = self._random.sample(self._choices[call], len(self._choices[call]))
                placed = self._first([one.span for one in plan.values()], call, choices)
                if placed is None:
                    return None
                plan[call] = placed
        return tuple([plan[call] for call in self._calls])

    def _first(self, others: Sequence[Span], call: int, choices: Sequence[Choice]) -> Placed | None:
        """Return the first choice that has a place beside other meshes, at a random one of its places."""
        for choice in choices:
            places = self._places(others, call, choice.n_devices)
            if places:
                return Placed(self._random.choice(places), choice)
        return None

"""Local search: from a plan to the best one that differs in one call, and again, from several plans.

It proves nothing. Its plans let branches be left out early.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence

from realrl.search.bound import Bounds
from realrl.search.fast import Model, Placed, Span, relation
from realrl.search.space import Choice, Pin

Plan = tuple[Placed, ...]
Score = tuple[float, float]  # bytes that are lacking, seconds of a step

_N_MEASURES = 3
_MOST_TRIED = 400  # places and choices of one call that are evaluated, the most promising ones


class Walk:
    """Local searches of one problem.

    Args:
        bounds: of the choices to try.
        pins: by call.
        seed: decides from which plans to start, after the first.
    """

    def __init__(self, model: Model, bounds: Bounds, pins: Mapping[int, Pin], *, seed: int) -> None:
        self.n_evaluated = 0
        self._model, self._bounds, self._choices, self._pins = model, bounds, bounds.choices, pins
        self._random = random.Random(seed)
        self._calls = range(len(bounds.choices))

    def run(self, n_walks: int) -> Iterator[tuple[Plan | None, float]]:
        """Yield a plan that fits and its period whenever it is the best so far, and (None, inf) in between."""
        best: Plan | None = None
        least = math.inf
        for number in range(n_walks):
            plan = self._spread(number) if number < _N_MEASURES else self._shaken(best)
            if plan is None:
                continue
            score = self._score(plan)
            is_moving = True
            while is_moving:
                is_moving = False
                for call in self._random.sample(self._calls, len(self._calls)):
                    plan, better = self._improved(plan, call, score)
                    is_moving |= better < score
                    score = better
                    if not score[0] and score[1] < least:
                        best, least = plan, score[1]
                        yield best, least
                    else:
                        yield None, math.inf

    def _score(self, plan: Plan, against: Score = (math.inf, math.inf)) -> Score:
        """Return the score of a plan; moves, which take long to price, count if it is better than `against` without."""
        self.n_evaluated += 1
        lacking = self._model.overflow(plan)
        if lacking:
            return lacking, 0.0
        quick = 0.0, self._model.period(plan, moves=False)
        if quick >= against:
            return quick
        score = 0.0, self._model.period(plan)
        return score if score >= against or self._model.accepts(plan) else (math.inf, 0.0)

    # ------------------------------------------------------------ steps

    def _improved(self, plan: Plan, call: int, score: Score) -> tuple[Plan, Score]:
        """Return the best plan that differs in one call at most."""
        bounds, others = self._bounds, [placed.span for c, placed in enumerate(plan) if c != call]
        rest = 0.0 * bounds.root
        for other, placed in enumerate(plan):
            if other != call:
                rest += bounds.row(other, self._model.price(other, placed.choice).seconds, placed.choice.n_devices)
        limits = bounds.of_choices(call, rest)
        n_tried = 0
        for number in sorted(range(len(limits)), key=lambda number: (limits[number], number)):
            if n_tried > _MOST_TRIED or (not score[0] and limits[number] >= score[1]):
                break
            choice = self._choices[call][number]
            for span in self._places(others, call, choice.n_devices):
                changed = (*plan[:call], Placed(span, choice), *plan[call + 1 :])
                found, n_tried = self._score(changed, score), n_tried + 1
                if found < score:
                    plan, score = changed, found
        return plan, score

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
        if start < 0 or end > self._model.cluster.n_devices or start % min(size, node):
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

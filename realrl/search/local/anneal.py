"""Annealing: random changes of a good plan, of one call or of several together, while worse plans are taken for a time.

`Annealing` makes chains where there is no compiler; `annealing.cpp` makes them some sixty times as fast.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.search.bound import undominated
from realrl.search.local.scores import Scores
from realrl.search.local.spans import nests, random_start
from realrl.search.local.walk import State
from realrl.search.problem import Problem
from realrl.search.runners import Plan
from realrl.search.space import Choice, Placed

_COOLED = 0.01  # share of a chain's heat that is left at the end
_JOINING = 0.3  # share of moves to a mesh that the plan has
_LACKING = 2.0  # periods that a plan is worse by, if it lacks a whole device's memory
_FILLING = 0.7  # of calls beside another one, the share that takes as much of the mesh as it can
_LIKE_THE_LAST = 0.7  # of calls that move together, the share that takes the last one's strategy if it can
TICK = 100  # proposals between two reports


class Kind(NamedTuple):
    """Settings of a chain.

    Attributes:
        apart: share of proposals that put two calls beside each other.
        groups, pairs: shares of all others.
        passes: True if it may pass plans that lack memory.
        hot: share of a period by which plans may be worse in the beginning.
    """

    apart: float
    groups: float
    pairs: float
    passes: bool
    hot: float

    @property
    def shares(self) -> tuple[float, ...]:
        """Numbers of a chain, in the order in which annealing.cpp has them."""
        return (self.groups, self.pairs, self.hot, _COOLED, self.apart, _JOINING, _LACKING, _FILLING, _LIKE_THE_LAST)


class Annealing:
    """A chain of changes to plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._scores, self._model, self._fixed = Scores(problem), problem.model, problem.fixed
        self._calls = range(len(problem.choices))
        self._choices: list[dict[int, list[Choice]]] = [{} for _ in self._calls]  # by the number of devices
        self._alike: list[dict[ParallelStrategy | None, list[Choice]]] = [{} for _ in self._calls]
        for call in self._calls:
            for choice in undominated(problem.model, call, problem.choices[call]):
                self._choices[call].setdefault(choice.n_devices, []).append(choice)
                self._alike[call].setdefault(choice.strategy, []).append(choice)
        self._roles, self._random = problem.model.flow.roles, random.Random(0)

    @property
    def n_choices(self) -> int:
        """Choices that are proposed."""
        return sum(len(some) for found in self._choices for some in found.values())

    def run(self, plan: Plan, kind: Kind, n_proposals: int, *, seed: str) -> Iterator[State]:
        """Yield plans that are better than those before and accepted, and (None, inf) after `TICK` proposals.

        Args:
            seed: decides what is proposed.
        """
        model, rng = self._model, self._random
        rng.seed(seed)
        first = least = score = model.period(plan)
        for number in range(n_proposals):
            if number % TICK == 0:
                yield None, math.inf
            temperature = first * kind.hot * _COOLED ** (number / n_proposals)
            limit = score - temperature * math.log(1.0 - rng.random())  # a plan is taken up to this score
            proposal = self._proposal(plan, kind)
            if self._least(proposal) > limit:
                continue
            most = limit if kind.passes else 0.0
            extra = first * self._lacking(proposal, most / first)
            if extra > most or model.period(proposal, moves=False, limit=limit - extra) + extra > limit:
                continue
            period = model.period(proposal, limit=limit - extra)
            if period + extra > limit:
                continue
            if not extra and period < least:
                if self._scores.is_accepted(proposal):
                    least = period
                    yield proposal, period
                else:
                    extra = first * self._lacking(proposal)
                    if not extra or not kind.passes or period + extra > limit:
                        continue
            plan, score = proposal, period + extra

    def _least(self, plan: Plan) -> float:
        """Return a bound of a plan's period that is quickly found: all its work on all devices, and cycles of waits."""
        seconds = [self._model.least(call, placed.choice) for call, placed in enumerate(plan)]
        area = sum([s * placed.choice.n_devices for s, placed in zip(seconds, plan, strict=True)])
        around = [sum([seconds[call] for call in cycle.calls]) / cycle.lag for cycle in self._model.flow.cycles]
        return max(area / self._model.cluster.n_devices, *around)

    def _lacking(self, plan: Plan, limit: float = math.inf) -> float:
        """Return the periods that a plan is worse by for the bytes that it lacks; 0 if it may fit.

        Args:
            limit: periods; of a plan that is worse by more, fewer may be returned that are more, too.
        """
        capacity = self._model.capacity
        if capacity == math.inf:
            return 0.0
        more = self._scores.likely(plan, capacity * (1.0 + limit / _LACKING)) - capacity
        return _LACKING * more / capacity if more > 0 else 0.0

    def _proposal(self, plan: Plan, kind: Kind) -> Plan:
        """Return a plan with other places and choices for one call, for a group that belongs together, or for two."""
        while True:
            is_apart, share = self._random.random() < kind.apart, self._random.random()
            if is_apart and len(plan) > 1:
                changed = self._beside(plan)
            elif share < kind.groups:
                changed = self._moved(self._group(plan), plan)
            else:
                n_calls = 2 if share < kind.groups + kind.pairs and len(plan) > 1 else 1
                changed = {}
                for call in self._random.sample(self._calls, n_calls):
                    changed |= self._moved([call], plan)
            proposal = tuple([changed.get(call, placed) for call, placed in enumerate(plan)])
            if changed and self._is_legal(proposal, changed):
                return proposal

    def _beside(self, plan: Plan) -> dict[int, Placed]:
        """Return two calls at the two ends of a mesh; nothing if it is too small for them, or they are pinned."""
        rng = self._random
        start, end = rng.choice([(0, self._model.cluster.n_devices), rng.choice(plan).span])
        found, room = dict[int, Placed](), end - start - 1
        for call in rng.sample(self._calls, 2):
            fitting = [size for size in self._choices[call] if size <= room]
            if not fitting or call in self._fixed:
                return {}
            size = max(fitting) if found and rng.random() < _FILLING else rng.choice(sorted(fitting))
            first = end - size if found else start
            found[call] = Placed((first, first + size), self._chosen(call, self._choices[call][size]))
            room = end - start - size
        return found

    def _chosen(self, call: int, choices: Sequence[Choice]) -> Choice:
        """Return the quicker of two random choices."""
        one, other = self._random.choice(choices), self._random.choice(choices)
        return min(one, other, key=lambda choice: self._model.price(call, choice).seconds)

    def _group(self, plan: Plan) -> Sequence[int]:
        """Return the calls of a role, those that share a mesh, or some of these."""
        rng = self._random
        if rng.random() < 0.5:
            return rng.choice(self._roles)
        span = rng.choice(plan).span
        group = [call for call, placed in enumerate(plan) if placed.span == span]
        return rng.sample(group, rng.randint(2, len(group))) if len(group) > 2 and rng.random() < 0.5 else group

    def _moved(self, group: Sequence[int], plan: Plan) -> dict[int, Placed]:
        """Return the calls of a group on another mesh; nothing if one of them has no choice of its size."""
        rng, cluster = self._random, self._model.cluster
        pins = {self._fixed[call] for call in group if call in self._fixed}
        if not pins and rng.random() < _JOINING:
            start, end = rng.choice(plan).span
            size = end - start
        else:
            size = rng.choice(sorted(self._choices[group[0]]))
            start = min(pins) if pins else random_start(cluster, size, rng)
        if any(size not in self._choices[call] for call in group) or len(pins) > 1:
            return {}
        strategy: ParallelStrategy | None = None
        found = {}
        for call in group:
            alike = self._alike[call].get(strategy)
            choice = self._chosen(call, alike if alike and rng.random() < _LIKE_THE_LAST else self._choices[call][size])
            found[call], strategy = Placed((start, start + size), choice), choice.strategy
        return found

    def _is_legal(self, plan: Plan, changed: dict[int, Placed]) -> bool:
        node = self._model.cluster.n_devices_per_node
        spans = {plan[call].span for call in changed}
        others = {placed.span for placed in plan}
        return all(nests(span, other, node) for span in spans for other in others if span != other)

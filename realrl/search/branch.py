"""Search by branch and bound: the plan with the shortest period under the fast model, and a proof of it.

    walk ──► plans that are good ──► branches whose bound is not below the best period are left out ──► walk ──► ...
    best partial plan ──► one call more, of every size, on every arrangement of meshes ──► ... ──► all calls have a mesh
                      ──► one call's strategies ──► ... ──► one call's choices ──► ... ──► whole plans
    branches that take too long ──► annealing of the best plan

Invariants of `search`:
    - periods that it yields fall, bounds rise, and no plan of its choices that fits has a shorter period than a bound;
    - when it ends, the last plan is the best one, and its bound is its period;
    - equal input and seed give equal results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np

from realrl.errors import AllocationError
from realrl.search.bound import CLOSE, Bounds
from realrl.search.fast import Moved
from realrl.search.flow import Move
from realrl.search.forest import Forest
from realrl.search.local.anneal import TICK
from realrl.search.local.chains import ChainMaker
from realrl.search.local.compiled import scores_of
from realrl.search.local.scores import Scores
from realrl.search.local.walk import State, Walk
from realrl.search.options import Option, byte_weights, options_of
from realrl.search.places import Places
from realrl.search.problem import Problem
from realrl.search.runners import Plan, Runners

_TICK = 32  # expansions between two reports
_MOST_OPEN = 400_000  # partial plans that are kept; of more, those with the greatest bounds are given up
_DIVE = 200  # expansions of a partial plan and of what comes of it, once for every `_TICK` of the best ones
_MOST_REFUSED = 3  # plans that are asked about in vain, before other branches are tried
_MOST_FORESTS = 20_000
_WORTH_WALKING = 0.001  # a gap with which plans are looked for beside the best branches


@dataclass(frozen=True)
class Found:
    """The state of a search.

    Attributes:
        plan: the best plan so far, by call; None if none was found.
        period: its seconds of a step.
        bound: no plan has a shorter period.
        others: runners-up and their periods, best first; any two plans differ in more than micro-batches. Whether
            `Model.accepts` them was not asked.
        apart: good plans, best first, any two of which differ in sizes of meshes or where these lie, seen from each
            other. They were not asked about either.
        n_expanded: partial plans of which something more was decided.
        n_evaluated: whole plans whose period was computed.
        is_done: True if the search has ended.
    """

    plan: Plan | None
    period: float
    bound: float
    others: tuple[tuple[Plan, float], ...] = ()
    apart: tuple[Plan, ...] = ()
    n_expanded: int = 0
    n_evaluated: int = 0
    is_done: bool = False

    @property
    def gap(self) -> float:
        """Share by which the period may exceed the best possible one."""
        return self.period / self.bound - 1.0 if self.bound else math.inf


@dataclass(frozen=True, eq=False, slots=True)
class _Node:
    """A partial plan: the first calls of the order have a vertex and an option."""

    bound: float
    forest: Forest
    vertices: tuple[int, ...]
    options: tuple[Option, ...]


def search(
    problem: Problem,
    *,
    seed: int = 1,
    starts: Iterable[Plan] = (),
    n_expanded: int | None = None,
    anneal: Callable[[Sequence[Plan]], Iterable[State]] | None = None,
) -> Iterator[Found]:
    """Yield better and better plans, with what is proven about the best; several times a second.

    The caller stops it whenever it likes.

    Args:
        starts: plans that are known; no better plan than these is left out.
        n_expanded: branches after which the best plan is annealed, and the search ends; None for no limit.
        anneal: makes better and better plans of the best one and others, best first; None makes one chain after the
            other in this process.

    Raises:
        AllocationError: nothing fits the devices.
    """
    scores = scores_of(problem)
    searching = _Search(problem, scores)
    walk, n_proposed = Walk(problem, searching.bounds, scores, seed=seed), 0

    def walked(states: Iterable[State]) -> Iterator[Found]:
        for plan, period in states:
            if plan is not None:
                searching.runners.offer(plan, period)
            yield searching.found(walk.n_evaluated + n_proposed)

    yield from walked(walk.run(problem.n_walks, starts))
    for found in searching.run():
        yield replace(found, n_evaluated=found.n_evaluated + walk.n_evaluated)
        is_worth_more = bool(problem.n_walks) and found.gap > _WORTH_WALKING and not found.is_done
        if n_expanded is not None and found.n_expanded >= n_expanded:
            if is_worth_more and found.plan is not None:
                plans = [found.plan, *(plan for plan in found.apart if plan != found.plan)]
                for state in (anneal or ChainMaker(problem, seed).annealed)(plans):
                    n_proposed += TICK if state[0] is None else 0
                    yield from walked([state])
                yield from walked(walk.again(searching.runners.best[0]))
            return
        if is_worth_more:
            yield from walked(walk.again(found.plan))


class _Search:
    def __init__(self, problem: Problem, scores: Scores) -> None:
        self._problem, self._model, self._scores = problem, problem.model, scores
        self.runners = Runners(problem.model.cluster.n_devices_per_node)
        weights = byte_weights(problem.model, problem.choices)
        self._options = [options_of(problem.model, c, found, weights) for c, found in enumerate(problem.choices)]
        areas = [min(option.seconds * option.n_devices for option in found) for found in self._options]
        calls = range(len(areas))
        self._order = sorted(calls, key=lambda c: (c not in problem.fixed, -areas[c], c))
        self._number = {call: number for number, call in enumerate(self._order)}
        self.bounds = Bounds(problem.model, self._options, self._order, weights)
        self._room = problem.model.capacity * problem.model.cluster.n_devices
        kept = [min(option.kept * option.n_devices for option in self._options[call]) for call in self._order]
        self._kept_ahead = [sum(kept[n:]) for n in range(len(kept) + 1)]
        self._floor = math.inf  # least bound of partial plans that were given up
        self._proven = float(self.bounds.of(sum(self.bounds.least)))
        self._open: list[tuple[float, int, _Node]] = []
        self._n_pushed = self._n_expanded = self._n_evaluated = self._n_refused = 0
        self._placements = lru_cache(maxsize=_MOST_FORESTS)(lambda forest, size: tuple(forest.placed(size)))

    def found(self, n_evaluated: int = 0, *, is_done: bool = False) -> Found:
        """Return the state of the search."""
        best, period = self.runners.best
        n = self._n_evaluated + n_evaluated
        others, apart = self.runners.others, tuple([plan for _, plan in self.runners.best_apart])
        return Found(best, period, min(self._proven, period), others, apart, self._n_expanded, n, is_done)

    def run(self) -> Iterator[Found]:
        """Decide more of partial plans, the most promising one first; complete one of them now and then."""
        n_popped = 0
        self._push([_Node(self._proven, Forest.of(self._model.cluster), (), ())])
        while self._open and self._open[0][0] < self._limit:
            dive = [heappop(self._open)[2]]
            n_left = _DIVE if n_popped % _TICK == 0 else 1
            n_popped += 1
            most_refused = self._n_refused + _MOST_REFUSED
            while dive and n_left and self._n_refused < most_refused and not (is_better := self._expand(dive)):
                n_left -= 1
            self._push(dive)
            self._proven = max(self._proven, min(self._floor, self._open[0][0] if self._open else math.inf))
            if is_better or n_popped % _TICK == 0:
                yield self.found()
        if self.runners.best[0] is None:
            fits = "fits" if self._floor == math.inf else "was found that fits"
            raise AllocationError(
                f"no plan {fits} a cluster with {self._model.cluster}",
                remedy="Use more devices, smaller models, or pins that leave more room.",
            )
        self._proven = max(self._proven, self._floor)
        yield self.found(is_done=self._floor >= self._limit)

    @property
    def _limit(self) -> float:
        return self.runners.period * CLOSE

    def _expand(self, stack: list[_Node]) -> bool:
        """Put what comes of the last partial plan in its place, the best one last; return True for a better plan."""
        children = self._children(stack.pop())
        self._n_expanded += 1
        is_better, partial = False, list[_Node]()
        for child in children:
            if self._is_whole(child):
                is_better |= self._evaluate(child)
            else:
                partial.append(child)
        stack += sorted(partial, key=lambda child: -child.bound)
        return is_better

    def _is_whole(self, node: _Node) -> bool:
        return len(node.options) == len(self._order) and all(option.choice is not None for option in node.options)

    def _push(self, nodes: Sequence[_Node]) -> None:
        """Keep partial plans for later; give the worst ones up if they are too many."""
        for node in nodes:
            if node.bound < self._limit:
                self._n_pushed += 1
                heappush(self._open, (node.bound, -self._n_pushed, node))
        if len(self._open) > _MOST_OPEN:
            self._open.sort()
            self._floor = min(self._floor, self._open[_MOST_OPEN // 2][0])
            del self._open[_MOST_OPEN // 2 :]

    # ------------------------------------------------------------ branches

    def _children(self, node: _Node) -> Iterator[_Node]:
        """Yield partial plans of which one thing more is decided, if their bounds are good."""
        return self._placed(node) if len(node.vertices) < len(self._order) else self._refined(node)

    def _placed(self, node: _Node) -> Iterator[_Node]:
        """Yield a partial plan with its next call on a mesh of every size, on every arrangement."""
        depth = len(node.vertices)
        call, bounds = self._order[depth], self.bounds
        rest = self._terms_of(node) + sum(bounds.least[other] for other in self._order[depth + 1 :])
        found = bounds.of(np.array([bounds.row_of(call, option) for option in self._options[call]]) + rest)
        for option, bound in zip(self._options[call], found.tolist(), strict=True):
            if bound >= self._limit:
                continue
            options = (*node.options, option)
            for forest, vertex in self._placements(node.forest, option.n_devices):
                vertices = (*node.vertices, vertex)
                if self._problem.fixed and not self._has_place(forest, vertices):
                    continue
                child = self._checked(max(node.bound, bound), forest, vertices, options)
                if child is not None:
                    yield child

    def _refined(self, node: _Node) -> Iterator[_Node]:
        """Yield a partial plan with the strategies of one call; of which all are decided, with its choices."""
        open_ones = [place for place, option in enumerate(node.options) if option.parts]
        place = min(open_ones, key=lambda place: (node.options[place].strategy is not None, place))
        call, parts = self._order[place], node.options[place].parts
        rest = self._terms_of(node) - self.bounds.row_of(call, node.options[place])
        found = self.bounds.of(np.array([self.bounds.row_of(call, part) for part in parts]) + rest)
        for part, bound in zip(parts, found.tolist(), strict=True):
            options = (*node.options[:place], part, *node.options[place + 1 :])
            child = self._checked(max(node.bound, bound * CLOSE), node.forest, node.vertices, options)
            if child is not None:
                yield child

    def _terms_of(self, node: _Node) -> Any:
        """Return the sum of the terms of all decided calls; 0 if there are none."""
        return sum(self.bounds.row_of(call, one) for call, one in zip(self._order, node.options, strict=False))

    def _checked(
        self, bound: float, forest: Forest, vertices: tuple[int, ...], options: tuple[Option, ...]
    ) -> _Node | None:
        """Return a partial plan; None if it does not fit the devices, or is not better than the best plan."""
        brought, received = [0.0] * len(options), [0] * len(options)
        for move, moved in self._moves(forest, vertices, options):
            owner = self._number[move.owner]
            brought[owner] += moved.seconds
            if self._model.flow.homes[move.target] == move.source:
                received[owner] += moved.n_bytes
        if not self._fits(forest, vertices, options, received):
            return None
        bound = max(bound, self.bounds.of_meshes(forest, vertices, options, brought))
        return _Node(bound, forest, vertices, options) if bound < self._limit else None

    def _fits(
        self, forest: Forest, vertices: tuple[int, ...], options: tuple[Option, ...], received: Sequence[int]
    ) -> bool:
        """Return False if some device lacks memory whatever is decided: one in a mesh without others, or the first.

        Args:
            received: bytes of parameters that some device of each call's mesh gets.
        """
        total = sum([option.kept * option.n_devices for option in options])
        if total + self._kept_ahead[len(options)] > self._room:
            return False
        on_leaves = forest.on_leaves.take(vertices, axis=1)
        is_own = forest.leaves[:, None] == np.array(vertices)  # of other meshes, a leaf is a part that is not known
        kept, used = np.array([option.least for option in options]).T
        needs = on_leaves @ kept + (on_leaves * (used + is_own * np.array(received))).max(axis=1)
        first_kept, first_used = np.array([option.first for option in options]).T
        on_first = (on_leaves * np.where(is_own, first_kept, kept)).sum(axis=1)
        on_first += (on_leaves * np.where(is_own, first_used, used)).max(axis=1)
        return bool(max(needs.max(), on_first.max()) <= self._model.capacity)

    def _moves(
        self, forest: Forest, vertices: tuple[int, ...], options: tuple[Option, ...]
    ) -> Iterator[tuple[Move, Moved]]:
        """Yield the moves that a partial plan decides, and their costs."""
        for move in self._model.flow.moves:
            source, target = self._number[move.source], self._number[move.target]
            if max(source, target, self._number[move.owner]) < len(options):
                first, second = options[source].strategy, options[target].strategy
                if first is not None and second is not None:
                    where = forest.relation(vertices[source], vertices[target])
                    yield move, self._model.move(move, first, second, where)

    def _fixed(self, vertices: Sequence[int]) -> dict[int, int] | None:
        """Return vertices of pinned meshes, and their first ranks; None if pins contradict each other."""
        fixed: dict[int, int] = {}
        for call, vertex in zip(self._order, vertices, strict=False):
            first = self._problem.fixed.get(call)
            if first is not None and fixed.setdefault(vertex, first) != first:
                return None
        return fixed

    def _has_place(self, forest: Forest, vertices: Sequence[int]) -> bool:
        """Return False if pins contradict an arrangement."""
        fixed = self._fixed(vertices)
        return fixed is not None and forest.layout(fixed) is not None

    def _evaluate(self, node: _Node) -> bool:
        """Compute the period of a whole plan; return True if it is the best so far.

        Its meshes may have any place for the period, but not for memory: one where they fit is looked for.
        """
        calls = range(len(self._order))
        vertices = [node.vertices[self._number[call]] for call in calls]
        choices = [node.options[self._number[call]].choice for call in calls]
        whole = [choice for choice in choices if choice is not None]
        places = Places(self._model, self._scores.learned, node.forest, vertices, whole)
        fixed = self._fixed(node.vertices)
        assert fixed is not None, "pins that contradict each other were left out before"
        period = math.inf
        for plan in places.plans(fixed):
            self._n_evaluated += period == math.inf
            period = self._scores.period(plan, limit=self.runners.limit)
            if period >= self.runners.period or self._scores.is_accepted(plan):
                return self.runners.offer(plan, period)
        self._n_refused += period < math.inf
        if places.is_cut:
            self._floor = min(self._floor, node.bound)
        return False

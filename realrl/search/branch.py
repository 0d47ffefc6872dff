"""Search by branch and bound: the plan with the shortest period under the fast model, and a proof of it.

    walk ──► plans that are good ──► branches whose bound is not below the best period are left out
    best partial plan ──► one call more, on every arrangement of meshes, with every choice ──► ... ──► whole plans

Invariants of `search`:
    - periods that it yields fall, bounds rise, and a bound is at most the period of every plan that fits, plans with
      pruned choices among them;
    - when it ends, the last plan is the best one; without pruned choices its bound is then its period;
    - equal input and seed give equal results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from realrl.errors import AllocationError
from realrl.search.bound import Array, Bounds
from realrl.search.fast import Placed
from realrl.search.forest import Forest
from realrl.search.problem import Problem
from realrl.search.space import Choice
from realrl.search.walk import Walk

_CLOSE = 1.0 - 1e-12  # a bound may exceed what it proves by rounding
_TICK = 64  # expansions between two reports


@dataclass(frozen=True)
class Found:
    """The state of a search.

    Attributes:
        plan: the best plan so far, by call; None if none was found.
        period: its seconds of a step.
        bound: no plan has a shorter period.
        n_expanded: partial plans that were completed by one call.
        n_evaluated: whole plans whose period was computed.
        is_done: True if the search has ended.
    """

    plan: tuple[Placed, ...] | None
    period: float
    bound: float
    n_expanded: int = 0
    n_evaluated: int = 0
    is_done: bool = False

    @property
    def gap(self) -> float:
        """Share by which the period may exceed the best possible one."""
        return self.period / self.bound - 1.0 if self.bound else math.inf


@dataclass(frozen=True, eq=False)
class _Node:
    """A partial plan: the first calls of the order have a vertex and a choice.

    Attributes:
        total: sum of the terms of `Bounds`.
        loads, kept, used: for each vertex, seconds, bytes kept, and the most bytes that a call uses there.
    """

    bound: float
    forest: Forest
    vertices: tuple[int, ...]
    choices: tuple[Choice, ...]
    total: Array
    loads: tuple[float, ...]
    kept: tuple[int, ...]
    used: tuple[int, ...]


def search(problem: Problem, *, seed: int = 1) -> Iterator[Found]:
    """Yield better and better plans, with what is proven about the best; at least every few expansions.

    The caller stops it whenever it likes.

    Raises:
        AllocationError: nothing fits the devices.
    """
    searching = _Search(problem)
    walk = Walk(problem.model, searching.bounds, problem.pins, seed=seed)
    for plan, period in walk.run(problem.n_walks):
        if plan is not None:
            searching.offer(plan, period)
        yield searching.found(walk.n_evaluated)
    yield from (replace(found, n_evaluated=found.n_evaluated + walk.n_evaluated) for found in searching.run())


class _Search:
    def __init__(self, problem: Problem) -> None:
        self._problem, self._model = problem, problem.model
        self.bounds = Bounds(problem.model, problem.choices)
        n_calls = len(problem.choices)
        areas = self.bounds.least_areas
        self._order = sorted(range(n_calls), key=lambda c: (not self._is_placed(c), -areas[c], c))
        self._rest = self.bounds.root
        self._best: tuple[Placed, ...] | None = None
        self._period = math.inf
        self._floor = math.inf  # least bound of whole plans that stand for others
        self._proven = self.bounds.of(self.bounds.root)
        self._open: list[tuple[float, int, _Node]] = []
        self._n_pushed = self._n_expanded = self._n_evaluated = 0

    def _is_placed(self, call: int) -> bool:
        pin = self._problem.pins.get(call)
        return pin is not None and pin.mesh is not None

    def offer(self, plan: tuple[Placed, ...], period: float) -> bool:
        """Take a plan if it is the best one so far."""
        if period >= self._period:
            return False
        self._best, self._period = plan, period
        return True

    def found(self, n_evaluated: int = 0, *, is_done: bool = False) -> Found:
        """Return the state of the search."""
        bound = min(self._proven, self._period)
        return Found(self._best, self._period, bound, self._n_expanded, self._n_evaluated + n_evaluated, is_done)

    def run(self) -> Iterator[Found]:
        """Expand partial plans, the most promising one first, and from each on down to a whole plan."""
        forest = Forest.of(self._model.cluster)
        node: _Node | None = _Node(self._proven, forest, (), (), self.bounds.root, (0.0,), (0,), (0,))
        while node is not None:
            is_better = False
            children = []
            for child in self._children(node):
                if len(child.vertices) < len(self._order):
                    children.append(child)
                else:
                    is_better |= self._evaluate(child)
            self._n_expanded += 1
            node = self._next(children)
            least = min(self._floor, self._open[0][0] if self._open else math.inf, node.bound if node else math.inf)
            self._proven = max(self._proven, min(least, self._period))
            if is_better or self._n_expanded % _TICK == 0:
                yield self.found()
        if self._best is None:
            raise AllocationError(
                f"no plan fits a cluster with {self._model.cluster}",
                remedy="Use more devices, smaller models, or pins that leave more room.",
            )
        yield self.found(is_done=True)

    def _next(self, children: list[_Node]) -> _Node | None:
        """Return the best child, or else the best partial plan of all; keep the others."""
        limit = self._period * _CLOSE
        children = [child for child in children if child.bound < limit]
        best = min(children, key=lambda child: child.bound, default=None)
        for child in children:
            if child is not best:
                self._n_pushed += 1
                heappush(self._open, (child.bound, self._n_pushed, child))
        if best is None and self._open and self._open[0][0] < limit:
            best = heappop(self._open)[2]
        if best is None:
            self._open.clear()
        return best

    def _children(self, node: _Node) -> Iterator[_Node]:
        """Yield a partial plan with its next call on every arrangement, with every choice, if its bound is good."""
        call = self._order[len(node.vertices)]
        rest = node.total - self.bounds.least[call]
        limits = self.bounds.of_choices(call, rest)
        by_size: dict[int, list[tuple[Choice, int]]] = {}
        for number, (choice, limit) in enumerate(zip(self._problem.choices[call], limits, strict=True)):
            if limit < self._period * _CLOSE:
                by_size.setdefault(choice.n_devices, []).append((choice, number))
        for size, found in by_size.items():
            for forest, vertex in node.forest.placed(size):
                vertices = (*node.vertices, vertex)
                if self._has_pins and self._layout(forest, vertices) is None:
                    continue
                for choice, number in found:
                    child = self._child(node, forest, vertices, choice, rest + self.bounds.rows[call][number])
                    if child is not None and child.bound < self._period * _CLOSE:
                        yield child

    def _child(
        self, node: _Node, forest: Forest, vertices: tuple[int, ...], choice: Choice, total: Array
    ) -> _Node | None:
        """Return the partial plan with one call more; None if it does not fit the devices."""
        call, vertex, is_new = self._order[len(vertices) - 1], vertices[-1], len(forest.sizes) - len(node.loads)
        price = self._model.price(call, choice)
        loads, kept, used = ([*values, *[0] * is_new] for values in (node.loads, node.kept, node.used))
        loads[vertex] += price.seconds
        kept[vertex] += price.kept if self._model.flow.homes[call] == call else 0
        used[vertex] = max(used[vertex], price.used)
        choices = (*node.choices, choice)
        for owner, seconds in self._moves(forest, vertices, choices):
            there = vertices[self._order.index(owner)]
            loads[there] += seconds
            total = total + self.bounds.row(owner, seconds, forest.sizes[there])
        most = 0.0
        for leaf in forest.leaves():
            path = list(forest.path(leaf))
            if sum([kept[v] for v in path]) + max([used[v] for v in path]) > self._model.capacity:
                return None
            most = max(most, sum([loads[v] for v in path]))
        bound = max(node.bound, self.bounds.of(total), most)
        return _Node(bound, forest, vertices, choices, total, tuple(loads), tuple(kept), tuple(used))

    def _moves(
        self, forest: Forest, vertices: tuple[int, ...], choices: tuple[Choice, ...]
    ) -> Iterator[tuple[int, float]]:
        """Yield the owner and the seconds of the moves that the last call of a partial plan decides."""
        place = {call: number for number, call in enumerate(self._order[: len(vertices)])}
        last = self._order[len(vertices) - 1]
        for move in self._model.flow.moves:
            ends = {move.owner, move.source, move.target}
            if last in ends and ends <= place.keys():
                source, target = place[move.source], place[move.target]
                where = forest.relation(vertices[source], vertices[target])
                yield move.owner, self._model.move(move, choices[source], choices[target], where)

    @property
    def _has_pins(self) -> bool:
        return any(pin.mesh is not None for pin in self._problem.pins.values())

    def _layout(self, forest: Forest, vertices: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
        """Return the ranks of all vertices; None if pins contradict the arrangement."""
        fixed: dict[int, int] = {}
        for call, vertex in zip(self._order, vertices, strict=False):
            pin = self._problem.pins.get(call)
            if pin is not None and pin.mesh is not None:
                first = pin.mesh.ranks[0]
                if fixed.setdefault(vertex, first) != first:
                    return None
        return forest.layout(fixed)

    def _evaluate(self, node: _Node) -> bool:
        """Compute the period of a whole plan; return True if it is the best so far."""
        spans = self._layout(node.forest, node.vertices)
        assert spans is not None, "an arrangement without a place was left out before"
        number = {call: i for i, call in enumerate(self._order)}
        plan = tuple(
            Placed(spans[node.vertices[number[call]]], node.choices[number[call]]) for call in range(len(self._order))
        )
        if self._problem.is_pruned:  # a plan that it stands for may fit where this one lacks room for copies
            self._floor = min(self._floor, node.bound)
        if self._model.overflow(plan):
            return False
        self._n_evaluated += 1
        period = self._model.period(plan)
        return period < self._period and self._model.accepts(plan) and self.offer(plan, period)

"""Plans in which calls of a mesh run side by side: some at its one end, some at the other one, and all others stay.

    calls that follow one another on a mesh, or beside each other on parts of it that are too large and too small
        ──► two sides of them ──► the place where the mesh is cut ──► the quickest choices, with more memory or less

No change of one call leads there: a call alone on a part of the mesh is slower, and only two that overlap gain. The
memory that they take may be what another call has to free, so some plans lack it.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product

from realrl.search.local.fills import Fills, Values
from realrl.search.local.spans import is_legal, most_kept
from realrl.search.problem import Problem
from realrl.search.runners import Plan
from realrl.search.space import Span, mesh_sizes

_MOST_WAYS = 800, 400  # of parting two calls, and of parting more, on few devices and on more
_STAYING = 0, 2, 8  # weights with which a call stays, against 1 for either side
_ROOMS = 0.5, 0.7, 1.0, 1.25, math.inf  # of the memory that other calls leave: what these need is known of whole plans


class Parting:
    """Partings of the calls of plans.

    Args:
        rng: decides which ways are tried, where there are many.
    """

    def __init__(self, problem: Problem, values: Values, fills: Fills, rng: random.Random) -> None:
        self._cluster, self._capacity = problem.model.cluster, problem.model.capacity
        self._fixed, self._values, self._fills, self._random = problem.fixed, values, fills, rng
        self._most_ways = _MOST_WAYS[problem.has_many_devices]

    def plans(self, plan: Plan) -> Iterator[Plan]:
        """Yield plans, of which some may lack memory, and some are the same."""
        spans = [one.span for one in plan]
        meshes = sorted({(0, self._cluster.n_devices), *spans})
        for start, end in meshes:
            inside = [call for call, (first, last) in enumerate(spans) if start <= first and last <= end]
            free = [call for call in inside if call not in self._fixed]
            for sides in self._ways(len(free), self._most_ways // len(meshes)):
                ends = [[call for call, side in zip(free, sides, strict=True) if side == n] for n in (1, 2)]
                yield from self._of_ends(plan, ends, (start, end))

    def _of_ends(self, plan: Plan, ends: Sequence[Sequence[int]], mesh: Span) -> Iterator[Plan]:
        others = [call for call in range(len(plan)) if call not in ends[0] and call not in ends[1]]
        spans = [plan[call].span for call in others]
        halves = self._halves(ends, mesh, spans)
        if halves is None:
            return
        kept = self._values.of(plan, others)[1]
        rooms = [self._capacity - most_kept(spans, kept, half) for half in halves]
        for share in _ROOMS:
            first, second = (
                self._fills.placed(calls, half, room * share)
                for calls, half, room in zip(ends, halves, rooms, strict=True)
            )
            if first is not None and second is not None:
                places = first | second
                yield tuple([places.get(call, placed) for call, placed in enumerate(plan)])

    def _halves(self, ends: Sequence[Sequence[int]], mesh: Span, others: Sequence[Span]) -> tuple[Span, Span] | None:
        """Return the two ends of a mesh on which the slower calls are the quickest; None if there are none."""
        start, end = mesh
        sizes = [size for size in mesh_sizes(self._cluster) if size < end - start]
        rests = [max((other for other in sizes if other <= end - start - size), default=0) for size in sizes]

        def seconds(side: int, n_devices: int) -> float:
            fills = self._fills.of(tuple(ends[side]), n_devices) if n_devices else []
            return fills[0].seconds if fills else math.inf

        # a larger mesh is mostly quicker, so that the best size is where the other side becomes the slower one
        place = bisect_left(range(len(sizes)), True, key=lambda i: seconds(0, sizes[i]) <= seconds(1, rests[i]))
        best: tuple[float, tuple[Span, Span] | None] = math.inf, None
        for size, rest in zip(sizes[max(0, place - 1) : place + 1], rests[max(0, place - 1) : place + 1], strict=True):
            halves = (start, start + size), (end - rest, end)
            slowest = max(seconds(0, size), seconds(1, rest))
            if slowest < best[0] and all(is_legal(half, others, self._cluster) for half in halves):
                best = slowest, halves
        return best[1]

    def _ways(self, n_calls: int, most: int) -> Iterator[tuple[int, ...]]:
        """Yield the sides of calls, 0 for none, 1, 2: ways of two calls, and then of more, all or some."""
        rng, calls = self._random, range(n_calls)
        pairs = [*permutations(calls, 2)]
        for pair in pairs if len(pairs) <= most else rng.sample(pairs, most):
            yield tuple([pair.index(call) + 1 if call in pair else 0 for call in calls])
        ways: Iterable[tuple[int, ...]] = product(range(3), repeat=n_calls)
        if 3**n_calls > most:
            ways = (tuple(rng.choices(range(3), (rng.choice(_STAYING), 1, 1), k=n_calls)) for _ in range(most))
        yield from (way for way in ways if {1, 2} <= {*way} and n_calls - way.count(0) > 2)

"""Meshes of a plan without their places: which one contains which.

Devices of a cluster are alike, and nodes are. So the places of meshes matter only as far as one contains another, is
disjoint from it in the same node, or in another one. A forest has each such arrangement once, and `layout` gives it
places.

Invariants:
    - vertex 0 is the cluster; the children of a vertex are disjoint and take no more devices than it has;
    - a vertex of less than a node has an ancestor of one node, which may have no call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import numpy.typing as npt

from realrl.mesh.device_mesh import Cluster
from realrl.search.space import Relation, Span


def _all(starts: Mapping[int, int], vertex: int, candidates: Iterator[int]) -> Iterator[int]:
    return candidates


@dataclass(frozen=True)
class Forest:
    """An arrangement of meshes.

    Attributes:
        node: devices of a node.
        sizes: devices of each vertex.
        parents: place of each vertex's parent; -1 for the cluster.
    """

    node: int
    sizes: tuple[int, ...]
    parents: tuple[int, ...] = (-1,)

    @classmethod
    def of(cls, cluster: Cluster) -> Forest:
        """Return the cluster without meshes."""
        return cls(cluster.n_devices_per_node, (cluster.n_devices,))

    def path(self, vertex: int) -> Iterator[int]:
        """Yield a vertex and what contains it, up to the cluster."""
        while vertex >= 0:
            yield vertex
            vertex = self.parents[vertex]

    @cached_property
    def cover(self) -> npt.NDArray[np.float64]:
        """Share of each vertex's devices that each vertex has, [vertices, vertices]."""
        cover = np.zeros((len(self.sizes), len(self.sizes)))
        for vertex, size in enumerate(self.sizes):
            for above in self.path(vertex):
                cover[above, vertex] = size / self.sizes[above]
                cover[vertex, above] = 1.0
        return cover

    @cached_property
    def above(self) -> npt.NDArray[np.float64]:
        """1 where a vertex contains another one, but for itself; [vertices, vertices that contain them]."""
        above = np.zeros((len(self.sizes), len(self.sizes)))
        for vertex in range(len(self.sizes)):
            for other in self.path(vertex):
                above[vertex, other] = other != vertex
        return above

    @cached_property
    def leaves(self) -> npt.NDArray[np.intp]:
        """Vertices that contain no other."""
        inner = set(self.parents)
        return np.array([vertex for vertex in range(len(self.sizes)) if vertex not in inner])

    @cached_property
    def on_leaves(self) -> npt.NDArray[np.bool_]:
        """Vertices that contain each of the leaves, these included; bool [leaves, vertices]."""
        covers: npt.NDArray[np.bool_] = self.cover[self.leaves] == 1.0
        return covers

    def relation(self, seen_from: int, other: int) -> Relation:
        """Return where a mesh lies, seen from another one."""
        if seen_from == other:
            return "same"
        above, below = list(self.path(seen_from)), list(self.path(other))
        if seen_from in below:
            return "inside"
        if other in above:
            return "around"
        shared = next(vertex for vertex in above if vertex in below)
        return "beside" if self.sizes[shared] <= self.node else "apart"

    def placed(self, size: int) -> Iterator[tuple[Forest, int]]:
        """Yield every forest with a mesh of `size` devices more, and the vertex of that mesh."""
        for vertex, room in enumerate(self.sizes):
            if room == size:
                yield self, vertex
            elif room > size and (size >= self.node or room <= self.node):
                yield from self._inside(vertex, size)
            elif room > self.node > size:
                for forest, node in self._inside(vertex, self.node, is_new=True):
                    yield from forest._inside(node, size)

    def _inside(self, vertex: int, size: int, *, is_new: bool = False) -> Iterator[tuple[Forest, int]]:
        """Yield the forests with a new child of a vertex, which takes in some of its children, or none if `is_new`."""
        children = [child for child, parent in enumerate(self.parents) if parent == vertex]
        total, made = sum(self.sizes[child] for child in children), len(self.sizes)
        small = [] if is_new else [child for child in children if self.sizes[child] < size]
        for n in range(len(small) + 1):
            for taken in combinations(small, n):
                inside = sum(self.sizes[child] for child in taken)
                if inside <= size and total - inside + size <= self.sizes[vertex]:
                    parents = [made if child in taken else parent for child, parent in enumerate(self.parents)]
                    yield Forest(self.node, (*self.sizes, size), (*parents, vertex)), made

    def layout(self, fixed: Mapping[int, int] | None = None) -> tuple[Span, ...] | None:
        """Return the ranks of every vertex, as far to the left as they go; None if `fixed` leaves no place.

        Args:
            fixed: vertex -> its first rank.
        """
        return next(self.layouts(fixed or {}), None)

    def layouts(
        self, fixed: Mapping[int, int], choose: Callable[[Mapping[int, int], int, Iterator[int]], Iterator[int]] = _all
    ) -> Iterator[tuple[Span, ...]]:
        """Yield the ranks of every vertex, in every way that keeps to `fixed`; the furthest to the left first.

        Args:
            fixed: vertex -> its first rank.
            choose: given the first ranks of vertices that have a place, the next vertex, and the first ranks that it
                may have, yields those to go on with. Vertices get their places by size, the largest first, but for
                those of `fixed`, which come before all others.
        """
        largest_first = sorted(range(len(self.sizes)), key=lambda v: (v not in fixed, -self.sizes[v], v))
        ancestors = [set(self.path(vertex)) for vertex in range(len(self.sizes))]
        starts: dict[int, int] = {}

        def fits(vertex: int, start: int) -> bool:
            end = start + self.sizes[vertex]
            for other, begin in starts.items():
                stop = begin + self.sizes[other]
                if other in ancestors[vertex]:
                    if not (begin <= start and end <= stop):
                        return False
                elif vertex in ancestors[other]:
                    if not (start <= begin and stop <= end):
                        return False
                elif start < stop and begin < end:
                    return False
            return True

        def place(number: int) -> Iterator[tuple[Span, ...]]:
            if number == len(largest_first):
                yield tuple([(starts[vertex], starts[vertex] + size) for vertex, size in enumerate(self.sizes)])
                return
            vertex = largest_first[number]
            candidates = [fixed[vertex]] if vertex in fixed else self._starts(vertex)
            for start in choose(starts, vertex, (one for one in candidates if fits(vertex, one))):
                starts[vertex] = start
                yield from place(number + 1)
                del starts[vertex]

        yield from place(0)

    def _starts(self, vertex: int) -> Iterator[int]:
        size = self.sizes[vertex]
        if size >= self.node:
            yield from range(0, self.sizes[0] - size + 1, self.node)
            return
        for node in range(0, self.sizes[0], self.node):
            yield from range(node, node + self.node - size + 1, size)

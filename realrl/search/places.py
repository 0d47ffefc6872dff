"""Places of a plan's meshes, on devices that have memory for them.

Which mesh contains which decides the seconds of a plan. Its bytes depend on more: stages of a pipeline keep different
bytes, so a small mesh inside may fit beside one stage, and not beside another.

    mesh that holds others ──► places of a mesh inside that differ in what lies there ──► those that fit ──► next mesh

Invariants of `Places.plans`:
    - meshes lie as the forest says, and `Model.may_fit` holds;
    - unless `is_cut` is True afterwards, an arrangement that yields nothing fits nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from realrl.search.fast import Model
from realrl.search.forest import Forest
from realrl.search.memory.devices import Learned
from realrl.search.runners import Plan
from realrl.search.space import Choice, Placed

_MOST_TRIES = 2000  # places of single meshes
_MOST_PLANS = 32


class Places:
    """Places of one arrangement.

    Args:
        vertices, choices: of each call.

    Attributes:
        is_cut: True once places were left out because there are too many.
    """

    def __init__(
        self, model: Model, learned: Learned, forest: Forest, vertices: Sequence[int], choices: Sequence[Choice]
    ) -> None:
        self._model, self._learned, self._forest = model, learned, forest
        self._vertices, self._choices = vertices, choices
        self._n_tries = 0
        self.is_cut = False

    def plans(self, fixed: Mapping[int, int]) -> Iterator[Plan]:
        """Yield plans that may fit, first the one that is the furthest to the left.

        Args:
            fixed: vertex -> its first rank.
        """
        for n_before, spans in enumerate(self._forest.layouts(fixed, self._worth_trying)):
            if n_before == _MOST_PLANS:
                self.is_cut = True
                return
            starts = dict(enumerate(first for first, _ in spans))
            plan = self._placed(starts)
            yield tuple(plan[call] for call in range(len(self._vertices)))

    def _placed(self, starts: Mapping[int, int]) -> dict[int, Placed]:
        """Return the calls whose vertices have a place."""
        found = {}
        for call, (vertex, choice) in enumerate(zip(self._vertices, self._choices, strict=True)):
            if vertex in starts:
                found[call] = Placed((starts[vertex], starts[vertex] + choice.n_devices), choice)
        return found

    def _worth_trying(self, starts: Mapping[int, int], vertex: int, candidates: Iterator[int]) -> Iterator[int]:
        """Yield places of a vertex on which all that has a place fits; of alike ones the first."""
        tried, kinds = set[object](), self._kinds(starts, vertex)
        for start in candidates:
            kind = self._kind(kinds, start, self._forest.sizes[vertex])
            if kind in tried:
                continue
            tried.add(kind)
            self._n_tries += 1
            if self._n_tries > _MOST_TRIES:
                self.is_cut = True
                return
            if self._model.may_fit(self._placed({**starts, vertex: start}), self._learned):
                yield start

    def _kinds(self, starts: Mapping[int, int], vertex: int) -> list[bytes]:
        """Return what each device has of the calls on meshes around a vertex; b"" outside them or in another mesh."""
        parts = np.full((len(self._choices), self._model.cluster.n_devices), -1, dtype=np.int64)
        is_room = np.ones(self._model.cluster.n_devices, dtype=bool)
        for other, start in starts.items():
            mesh = np.zeros_like(is_room)
            mesh[start : start + self._forest.sizes[other]] = True
            is_room &= mesh if self._forest.above[vertex, other] else ~mesh
        for call, placed in self._placed(starts).items():
            first, end = placed.span
            parts[call, first:end] = self._model.prices.parts(self._model.flow.names[call], placed.choice)
        return [column.tobytes() if has_room else b"" for column, has_room in zip(parts.T, is_room, strict=True)]

    def _kind(self, kinds: Sequence[bytes], start: int, size: int) -> object:
        """Return what places have in common that can be exchanged: with all that is still to lie there, it is the same.

        Smaller meshes never reach beyond a node. What is larger may lie anywhere in its stretch of alike nodes, but for
        meshes that begin before the stretch; so the first place of a stretch stands for all of it if nothing can.
        """
        here, node = tuple(kinds[start : start + size]), self._forest.node
        if b"" in here:  # a mesh inside has its place already
            return start
        if size <= node:
            return here
        if here != here[:node] * (size // node):
            return start
        first = start
        while first >= node and tuple(kinds[first - node : first]) == here[:node]:
            first -= node
        is_edge = not first or not any(kinds[first - node : first])
        return ("stretch", first) if is_edge else start

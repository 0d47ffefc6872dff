"""The best plans of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from realrl.search.space import Placed, Relation, Span, relation

Plan = tuple[Placed, ...]
Arrangement = tuple[tuple[int, ...], tuple[Relation, ...]]

_MOST = 32
MOST_APART = 16


def arrangement(spans: Sequence[Span], n_per_node: int) -> Arrangement:
    """Return the sizes of meshes, and where each lies, seen from those before it; of nodes with so many devices."""
    relations = tuple([relation(one, other, n_per_node) for one, other in combinations(spans, 2)])
    return tuple([end - first for first, end in spans]), relations


class Runners:
    """The best plan and its runners-up, any two of which differ in more than micro-batches.

    Attributes:
        apart: sizes of meshes and relations between them -> the best plan that has these, and a period that it has or
            exceeds; of those that were offered, the best ones.

    Args:
        n_per_node: devices of a node.
    """

    def __init__(self, n_per_node: int) -> None:
        self._n_per_node = n_per_node
        self._found: dict[Plan, tuple[float, Plan]] = {}
        self.apart: dict[Arrangement, tuple[float, Plan]] = {}

    def offer(self, plan: Plan, period: float) -> bool:
        """Take a plan if it is one of the best so far; return True if it is the best."""
        is_best = period < self.period
        self._keep_apart(plan, period)
        if period >= self.limit:
            return False
        key = tuple([Placed(placed.span, replace(placed.choice, n_mbs=None)) for placed in plan])
        if key not in self._found or period < self._found[key][0]:
            self._found.pop(key, None)
            self._found[key] = period, plan
            ordered = sorted(self._found.items(), key=lambda item: item[1][0])
            self._found = dict(ordered[:_MOST])
        return is_best

    def _keep_apart(self, plan: Plan, period: float) -> None:
        key = arrangement([placed.span for placed in plan], self._n_per_node)
        if period < self.apart.get(key, (math.inf, plan))[0]:
            self.apart[key] = period, plan
            if len(self.apart) > MOST_APART:
                del self.apart[max(self.apart, key=lambda key: self.apart[key][0])]

    @property
    def best_apart(self) -> list[tuple[float, Plan]]:
        """Periods and plans of `apart`, best first."""
        return sorted(self.apart.values(), key=lambda found: found[0])

    @property
    def best(self) -> tuple[Plan | None, float]:
        """The best plan and its period; None and infinity if there is none."""
        period, plan = next(iter(self._found.values()), (math.inf, None))
        return plan, period

    @property
    def period(self) -> float:
        """Period of the best plan."""
        return self.best[1]

    @property
    def limit(self) -> float:
        """A plan whose period is not below it is none of the best."""
        return math.inf if len(self._found) < _MOST else [*self._found.values()][-1][0]

    @property
    def others(self) -> tuple[tuple[Plan, float], ...]:
        """Runners-up and their periods, best first."""
        return tuple([(plan, period) for period, plan in [*self._found.values()][1:]])

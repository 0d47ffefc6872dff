"""The best plans of a search."""

from __future__ import annotations

import math
from dataclasses import replace

from realrl.search.space import Placed, Span

Plan = tuple[Placed, ...]

_MOST = 32
_MOST_APART = 16


class Runners:
    """The best plan and its runners-up, any two of which differ in more than micro-batches.

    Attributes:
        apart: meshes of the calls -> the best plan that has them, and a period that it has or exceeds; of those that
            were offered, the best ones.
    """

    def __init__(self) -> None:
        self._found: dict[Plan, tuple[float, Plan]] = {}
        self.apart: dict[tuple[Span, ...], tuple[float, Plan]] = {}

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
        spans = tuple([placed.span for placed in plan])
        if period < self.apart.get(spans, (math.inf, plan))[0]:
            self.apart[spans] = period, plan
            if len(self.apart) > _MOST_APART:
                del self.apart[max(self.apart, key=lambda spans: self.apart[spans][0])]

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

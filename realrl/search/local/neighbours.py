"""Plans next to a plan: all of its calls but one are as they were."""

from __future__ import annotations

from collections.abc import Iterator

from realrl.search.problem import Problem
from realrl.search.runners import Plan
from realrl.search.space import Placed, Span


def neighbours(problem: Problem, plan: Plan, *, limit: float) -> list[tuple[float, Plan]]:
    """Return plans in which one call has another choice or is on the mesh of another call, with their periods.

    They may fit the devices, as far as the fast model knows.

    Those with the shortest period come first; of equal ones, those whose changed call is fastest.

    Args:
        limit: seconds that the period is below.
    """
    model, found = problem.model, list[tuple[float, float, Plan]]()
    for call, placed in enumerate(plan):
        for other in _placed(problem, plan, call):
            seconds = model.least(call, other.choice)
            if other == placed or seconds >= limit:
                continue
            changed = (*plan[:call], other, *plan[call + 1 :])
            period = model.period(changed, limit=limit)
            if period < limit and not model.overflow(changed):
                found.append((period, seconds, changed))
    found.sort(key=lambda entry: entry[:2])
    return [(period, changed) for period, _, changed in found]


def _placed(problem: Problem, plan: Plan, call: int) -> Iterator[Placed]:
    """Yield each choice of a call on each mesh of the plan that has its size; a pinned mesh stays."""
    spans: list[Span] = [plan[call].span] if call in problem.fixed else [*dict.fromkeys(x.span for x in plan)]
    for choice in problem.choices[call]:
        for first, last in spans:
            if last - first == choice.n_devices:
                yield Placed((first, last), choice)

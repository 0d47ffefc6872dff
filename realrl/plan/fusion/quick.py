"""A fused schedule after a bounded number of evaluations: every process of a run makes the same one for itself.

It computes in Python alone, so that it does not depend on whether a compiler is there.
"""

from __future__ import annotations

from functools import lru_cache

from realrl.plan.fusion.instance import Instance
from realrl.plan.fusion.problem import problem_of
from realrl.plan.fusion.schedule import FusedSchedule
from realrl.plan.fusion.search.climb import Climb, Kernels, starts_of

QUICK_TASKS = 40_000  # tasks that are scheduled in the search, counting each as often as it is
_LEAST_EVALUATIONS = 4


@lru_cache(maxsize=64)
def fused_orders(instance: Instance, *, seed: int = 0) -> FusedSchedule:
    """Return the best schedule of a short search: never worse than 1F1B in series, or than greedy fusion.

    It takes some tenths of a second for thousands of tasks, and the same instance always gets the same schedule.

    Args:
        instance: its memory caps hold.
    """
    problem = problem_of(instance)
    climb = Climb(problem, Kernels(), seed=seed, starts=starts_of(problem))
    best = climb.run(max(_LEAST_EVALUATIONS, QUICK_TASKS // problem.base[-1]))
    assert best is not None
    return FusedSchedule.of_words(instance, problem.letters_of(best.words))

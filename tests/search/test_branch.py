import math

import pytest

from realrl.errors import AllocationError
from realrl.search.branch import search
from tests.search.problems import all_plans, bounds_of, problem


def states(found, seed=1):
    try:
        return list(search(found, seed=seed))
    except AllocationError:
        return []


def best_period(found):
    return min((found.model.period(plan) for plan in all_plans(found)), default=math.inf)


def check(found):
    """Compare a search with the enumeration of all plans; return the state at its end, None if nothing fits."""
    best, made = best_period(found), states(found)
    assert bool(made) == (best < math.inf)
    if not made:
        return None
    assert made[-1].period == pytest.approx(best, rel=1e-12)
    assert all(state.bound <= best * (1 + 1e-9) for state in made)
    return made[-1]


@pytest.mark.parametrize("block", range(6))
def test_the_best_of_all_plans(block):
    ends = [check(problem(1000 * block + i, most_plans=150)) for i in range(40)]
    proven = [end for end in ends if end is not None]
    assert len(proven) >= 20
    assert all(end.is_done and end.gap < 1e-9 for end in proven)


@pytest.mark.parametrize("block", range(2))
def test_the_best_of_all_plans_that_honour_pins(block):
    ends = [check(problem(500_000 + 1000 * block + i, most_plans=300, pins=True)) for i in range(40)]
    assert sum(end is not None for end in ends) >= 10

"""Annealing: what it yields fits, gets better, and is the same under one seed."""

from dataclasses import replace
from itertools import pairwise

import pytest

from realrl.search.branch import search
from realrl.search.local.chains import ChainMaker
from tests.search.problems import all_plans, problem


def a_plan(found):
    """Any plan that fits, so that there is room for better ones."""
    return next((plan for plan in all_plans(found) if not found.model.overflow(plan)), None)


def better_ones(found, plan, seed=1):
    better, least = [], found.model.period(plan)
    for other, period in ChainMaker(found, seed).annealed([plan]):
        if other is not None and period < least:
            better.append((other, period))
            least = period
    return better


@pytest.mark.parametrize("seed", range(1, 6))
def test_plans_fit_and_get_better_up_to_the_best_one(seed):
    found = problem(seed, most_plans=2000)
    start = a_plan(found)
    if start is None:
        pytest.skip("nothing fits")
    made = better_ones(found, start)
    periods = [found.model.period(start), *(period for _, period in made)]
    assert all(after < before for before, after in pairwise(periods))
    assert all(found.model.period(plan) == period for plan, period in made)
    assert not any(found.model.overflow(plan) for plan, _ in made)
    everything = [found.model.period(plan) for plan in all_plans(found) if not found.model.overflow(plan)]
    assert periods[-1] == pytest.approx(min(everything))
    assert made == better_ones(found, start)


def test_a_plan_that_is_not_accepted_is_not_yielded():
    found = problem(3, most_plans=2000)
    start = a_plan(found)
    refused = [plan for plan, _ in better_ones(found, start)]
    found.model.accepts = lambda plan: plan not in refused
    assert not set(refused) & {plan for plan, _ in better_ones(found, start)}


def test_a_search_that_ends_early_anneals_its_plan():
    """A search that is cut short looks at many more plans, unless it has proven its best one already."""
    ends = [[*search(replace(problem(seed), n_walks=1), n_expanded=1)][-1] for seed in range(20, 28)]
    assert all(end.n_evaluated > 500 for end in ends if end.gap > 0.01)
    assert any(end.n_evaluated > 500 for end in ends)

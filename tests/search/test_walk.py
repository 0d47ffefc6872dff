"""Local searches: what they ask of a run's own count, which takes far longer than their own."""

from dataclasses import replace

import pytest

from tests.search.problems import problem, walk_of


@pytest.mark.parametrize("seed", range(8))
def test_only_plans_that_may_be_the_best_are_asked_about(seed):
    found, asked = problem(seed), []

    def accepts(plan):
        asked.append(plan)
        return len(asked) % 3 != 1

    model = replace(found.model, accepts=accepts)
    walk = walk_of(replace(found, model=model))
    least, seen = float("inf"), 0
    for plan, period in walk.run(8):
        for other in asked[seen:]:
            assert model.period(other) <= least
        seen = len(asked)
        if plan is not None and period <= least:
            assert plan in asked
            least = period
    assert 0 < seen < walk.n_evaluated

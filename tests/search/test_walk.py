"""Local searches: what they ask of a run's own count, which takes far longer than their own."""

from dataclasses import replace

import pytest

from realrl.search.bound import Bounds
from realrl.search.local.walk import Walk
from realrl.search.memory.devices import Learned
from realrl.search.options import byte_weights, options_of
from tests.search.problems import problem


@pytest.mark.parametrize("seed", range(8))
def test_only_plans_that_may_be_the_best_are_asked_about(seed):
    found, asked = problem(seed), []

    def accepts(plan):
        asked.append(plan)
        return len(asked) % 3 != 1

    model = replace(found.model, accepts=accepts)
    weights = byte_weights(model, found.choices)
    options = [options_of(model, call, some, weights) for call, some in enumerate(found.choices)]
    walk = Walk(replace(found, model=model), Bounds(model, options, range(len(options)), weights), Learned(), seed=1)
    least, seen = float("inf"), 0
    for plan, period in walk.run(8):
        for other in asked[seen:]:
            assert model.period(other) <= least
        seen = len(asked)
        if plan is not None and period <= least:
            assert plan in asked
            least = period
    assert 0 < seen < walk.n_evaluated

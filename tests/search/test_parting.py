"""Plans whose calls run side by side: all of them may be run, and walks find better plans by way of them."""

import random

import pytest

from realrl.search.local import walk as walks
from realrl.search.local.fills import Fills, Values
from realrl.search.local.parting import Parting
from realrl.search.local.spans import is_legal
from tests.search.problems import all_plans, problem, walk_of


@pytest.mark.parametrize("pins", [False, True])
def test_parted_plans_may_be_run_and_pinned_calls_stay(pins):
    n_parted = 0
    for seed in range(30):
        found = problem(seed, pins=pins, n_calls=4, most_plans=100_000)
        plan = next(all_plans(found), None)
        if plan is None:
            continue
        values = Values(found)
        parting = Parting(found, values, Fills(found, values, 0.1), random.Random(seed))
        for parted in parting.plans(plan):
            spans = [placed.span for placed in parted]
            changed = [call for call, placed in enumerate(parted) if placed.span != plan[call].span]
            assert not set(changed) & set(found.fixed)
            for call, placed in enumerate(parted):
                assert placed.choice in found.choices[call]
                assert placed.span[1] - placed.span[0] == placed.choice.n_devices
                assert is_legal(placed.span, spans, found.model.cluster)
            n_parted += 1
    assert n_parted > 100


def least(found):
    return min(period for plan, period in walk_of(found).run(2) if plan is not None)


@pytest.mark.parametrize("seed", [217, 248])
def test_walks_find_better_plans_by_parting_calls(seed, monkeypatch):
    found = problem(seed)
    parted = least(found)
    monkeypatch.setattr(walks, "_MOST_LEAVING", 0)
    assert parted < 0.95 * least(found)

import math
import zlib
from dataclasses import replace
from itertools import pairwise

import pytest

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import Cluster, ParallelStrategy
from realrl.search.bound import Bounds, undominated
from realrl.search.branch import search
from realrl.search.fast import busiest, slowest_cycle
from realrl.search.space import Choice, Pin, mesh_at
from realrl.search.walk import Walk
from tests.search.problems import all_plans, problem


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


def pruned(found, most_move):
    """The same search without choices that others beat."""
    kept = [undominated(found.model, call, choices, most_move) for call, choices in enumerate(found.choices)]
    return replace(found, choices=kept, is_pruned=True)


@pytest.mark.parametrize("most_move", [0.0, 2.0])
def test_bounds_hold_for_choices_that_were_left_out(most_move):
    n_fewer = n_same = n_found = 0
    for seed in range(40):
        whole = problem(700_000 + seed, most_plans=300)
        few = pruned(whole, most_move)
        n_fewer += sum(map(len, few.choices)) < sum(map(len, whole.choices))
        best, made = best_period(whole), states(few)
        if made and most_move == 2.0:  # more than moves can differ by
            assert all(state.bound <= best * (1 + 1e-9) for state in made)
        if made:
            n_found += 1
            n_same += made[-1].period == pytest.approx(best)
            assert made[-1].period >= best * (1 - 1e-9)
    assert n_fewer >= 10
    assert n_same >= 0.9 * n_found > 0


def test_plans_that_are_not_accepted_are_passed_over():
    def accepts(plan):
        return zlib.crc32(repr(plan).encode()) % 3 == 0

    n_other = 0
    for seed in range(30):
        found = problem(550_000 + seed, most_plans=200)
        # one place of alike ones stands for all of them, so acceptance asks for what they share
        whole = replace(found.model, cluster=Cluster(1, 1))
        choices = [tuple(c for c in one if c.n_devices == 1) or (Choice(ParallelStrategy(1)),) for one in found.choices]
        strict = replace(found, model=replace(whole, accepts=accepts), choices=choices)
        periods = {plan: whole.period(plan) for plan in all_plans(replace(found, model=whole, choices=choices))}
        expected = min((period for plan, period in periods.items() if accepts(plan)), default=math.inf)
        made = states(strict)
        assert (made[-1].period if made else math.inf) == pytest.approx(expected)
        n_other += bool(periods) and min(periods.values()) != expected
    assert n_other >= 5


def test_plans_get_better_and_bounds_rise():
    for seed in range(30):
        made = states(problem(800_000 + seed, most_plans=2000, n_calls=4))
        for before, after in pairwise(made):
            assert after.period <= before.period
            assert after.bound >= before.bound
            assert after.n_evaluated >= before.n_evaluated
        assert all(state.gap >= 0.0 for state in made)


def test_plans_are_what_they_are_said_to_be():
    for seed in range(30):
        found = problem(900_000 + seed, most_plans=200)
        plans = {plan: found.model.period(plan) for plan in all_plans(found)}
        for state in states(found):
            assert state.plan is None or state.period == found.model.period(state.plan)
            assert state.plan is None or state.plan in plans


def test_the_same_seed_finds_the_same_plans():
    for seed in range(20):
        one, other = (states(problem(600_000 + seed), seed=7) for _ in range(2))
        assert one == other


def test_walks_alone_find_most_of_the_best():
    n_best = n_found = 0
    for seed in range(40):
        found = problem(650_000 + seed, n_calls=2)
        searching = Walk(found.model, Bounds(found.model, found.choices), found.pins, seed=1)
        made = [period for plan, period in searching.run(8) if plan is not None]
        assert made == sorted(made, reverse=True)
        if made:
            n_found += 1
            n_best += made[-1] == pytest.approx(best_period(found))
    assert n_best >= 0.8 * n_found > 0


def test_a_cluster_on_which_nothing_fits():
    found = problem(3)
    tight = replace(found, model=replace(found.model, capacity=0))
    with pytest.raises(AllocationError, match="no plan fits a cluster with"):
        list(search(tight))


def test_pins_that_no_arrangement_honours():
    """Meshes 0:0-1 and 0:2-3 lie beside each other; no two meshes overlap in part, so a third on 0:1-2 is none."""
    found = problem(11, n_calls=2)
    one, two = (Pin(ParallelStrategy(2), mesh_at(Cluster(3, 1), first, 2)) for first in (0, 1))
    choices = [(Choice(ParallelStrategy(2)),)] * 2
    overlapping = replace(found, model=replace(found.model, cluster=Cluster(3, 1), capacity=1e9), choices=choices)
    with pytest.raises(AllocationError, match="no plan fits"):
        list(search(replace(overlapping, pins={0: one, 1: two})))
    assert states(replace(overlapping, pins={0: one, 1: one}))[-1].is_done


def test_a_plan_that_stands_for_others_proves_what_its_devices_and_cycles_do():
    n_less = 0
    for seed in range(40):
        found = replace(problem(750_000 + seed, most_plans=100), n_walks=1)
        plain, standing = (states(replace(found, is_pruned=is_pruned)) for is_pruned in (False, True))
        if plain:
            assert standing[-1].period == plain[-1].period == plain[-1].bound
            parts = found.model.parts(standing[-1].plan)
            cycles, n_devices = found.model.flow.cycles, found.model.cluster.n_devices
            assert standing[-1].bound <= max(busiest(parts), slowest_cycle(cycles, parts, n_devices)) * (1 + 1e-9)
            n_less += standing[-1].bound < plain[-1].bound * (1 - 1e-9)
    assert n_less >= 3

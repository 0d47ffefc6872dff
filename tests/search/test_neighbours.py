"""Plans next to a plan, and how they are ordered."""

import math
from dataclasses import replace

import pytest

from realrl.mesh.notation import parse_mesh
from realrl.search.local.neighbours import neighbours
from realrl.search.space import Pin
from tests.search.problems import all_plans, problem


@pytest.mark.parametrize("seed", range(1, 8))
def test_one_call_differs_and_meshes_are_those_of_the_plan(seed):
    found = problem(seed, most_plans=2000)
    plans = [*all_plans(found)]
    plan = plans[seed * 7 % len(plans)]
    spans = {placed.span for placed in plan}
    expected = {
        other
        for other in plans
        if sum(a != b for a, b in zip(plan, other, strict=True)) == 1 and {placed.span for placed in other} <= spans
    }
    near = neighbours(found, plan, limit=math.inf)
    assert {changed for _, changed in near} == expected
    assert [period for period, _ in near] == sorted(found.model.period(changed) for _, changed in near)
    limit = found.model.period(plan)
    assert neighbours(found, plan, limit=limit) == [pair for pair in near if pair[0] < limit]


def test_a_pinned_mesh_stays():
    found = problem(3, most_plans=2000)
    plan = next(plan for plan in all_plans(found) if moves_a_call(found, plan))
    pins = {
        call: Pin(placed.choice.strategy, mesh=parse_mesh("0", found.model.cluster)) for call, placed in enumerate(plan)
    }
    assert not moves_a_call(replace(found, pins=pins), plan)


def moves_a_call(found, plan):
    """Return True if a neighbour has a call on another mesh."""
    near = neighbours(found, plan, limit=math.inf)
    return any(a.span != b.span for _, changed in near for a, b in zip(changed, plan, strict=True))

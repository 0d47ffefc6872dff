"""Calls that scatter, and what that adds to a step."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.sched.events import ReportStep
from realrl.sim.cluster import SimulatedCluster, SimulatedRun, StepEnd
from realrl.sim.contention import simulate_sharing
from realrl.sim.report import SCATTER, figures_of
from realrl.sim.scatter import scatter_of, scatter_seconds, scattered
from realrl.sim.workers import NO_CAUSE
from tests.sched.plans import plans
from tests.sim.durations import HashedDurations, draw


@pytest.mark.parametrize("n", [2, 3, 8])
def test_scatter_of_normal_logarithms(n):
    z = np.random.default_rng(n).standard_normal((4000, n))
    assert np.mean([scatter_of(np.exp(0.1 * row).tolist()) for row in z]) == pytest.approx(0.1, rel=0.03)


def test_one_device_tells_no_scatter():
    assert scatter_of([3.0]) == 0.0
    assert scatter_of([3.0, 3.0]) == 0.0


class Call:
    name = "call"


class Groups:
    """One call of a second on four devices, which meet in groups."""

    def __init__(self, *groups):
        self.groups = groups

    def meets(self, call):
        return self.groups

    def call(self, call, requests, sizes):
        return dict.fromkeys(range(4), 1.0)


def test_draws_are_those_of_device_and_dispatch_in_pairs_of_opposites():
    apart, other, opposite = (scattered(Groups((0,), (1,), (2,), (3,)), 0.2, n) for n in (0, 2, 1))
    first, second = (apart.call(Call, {}, {}) for _ in range(2))
    assert len({*first.values(), *second.values(), *other.call(Call, {}, {}).values()}) == 12
    assert [first[rank] * s for rank, s in opposite.call(Call, {}, {}).items()] == pytest.approx([1.0] * 4)
    together = scattered(Groups((0, 2), (1, 3)), 0.2, 0).call(Call, {}, {})
    slowest = [max(first[0], first[2]), max(first[1], first[3])]
    assert [together[rank] for rank in range(4)] == pytest.approx(slowest * 2)


@pytest.mark.parametrize(("groups", "mean"), [(((0,), (1,), (2,), (3,)), 0.0), (((0, 1), (2, 3)), 0.564)])
def test_a_step_takes_as_much_longer_as_the_slowest_of_a_group(groups, mean):
    """The larger of two normals is 1 / sqrt(pi) on average."""
    scatter = 0.1

    def simulate(durations):
        ends = np.cumsum([durations.call(Call, {}, {})[0] for _ in range(101)])
        steps = [StepEnd(at_s, NO_CAUSE, ReportStep(n, 1, {}, ())) for n, at_s in enumerate(ends.tolist(), 1)]
        return [SimulatedRun(1, 0.0, steps[-1].at_s, tuple(steps), (), (), None, ())]

    durations = Groups(*groups)
    (plain,) = simulate(durations)
    added_s = scatter_seconds(simulate, durations, scatter, plain)
    assert added_s == pytest.approx(scatter * mean + scatter**2 / 2, abs=0.012)
    assert scatter_seconds(simulate, durations, 0.0, plain) == pytest.approx(0.0)
    some_s = scatter_seconds(simulate, durations, scatter, plain, 11)  # by more draws of fewer steps
    assert some_s == pytest.approx(added_s, abs=0.012)


@given(plan=plans(), seed=st.integers(0, 1000))
def test_scatter_is_part_of_the_period_and_changes_nothing_else(plan, seed):
    def simulate(durations):
        return [SimulatedCluster(plan, durations, draw, n_rows=50).run()]

    durations, sharing = HashedDurations(seed), {"alone": 1.0, "node_of": lambda rank: 0}
    (plain,) = simulate_sharing(simulate, durations, **sharing)
    (found,) = simulate_sharing(simulate, durations, **sharing, scatter=0.3)
    assert replace(found, scatter_s=0.0) == plain
    assert found.scatter_s >= 0.0
    assert found == simulate_sharing(simulate, durations, **sharing, scatter=0.3)[0]
    if plain.steps:
        before, after = figures_of(plain), figures_of(found)
        assert after.period_s == pytest.approx(before.period_s + found.scatter_s)
        assert {name: s for name, s in after.bounds.items() if name != SCATTER} == dict(before.bounds)
        assert sum(after.bounds.values()) == pytest.approx(after.period_s)
        assert all(a >= b for a, b in pairwise(after.bounds.values()))
        assert math.isfinite(after.period_s)

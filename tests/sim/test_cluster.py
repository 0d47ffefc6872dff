"""The simulated cluster: what holds of any run, and runs whose times are known."""

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realrl.errors import RunError
from realrl.mesh.device_mesh import Cluster
from realrl.sched.events import FailureKind
from realrl.sim.cluster import SimulatedCluster, simulate
from realrl.sim.report import figures_of
from realrl.sim.workers import NO_CAUSE
from tests.sched.plans import make_plan, on_all, plans, ppo
from tests.sched.simulator import Simulation
from tests.sim.durations import CallDurations, HashedDurations, draw

EPSILON_S = 1e-9


def check(run):
    """Assert what holds of every run."""
    assert [step.at_s for step in run.steps] == sorted(step.at_s for step in run.steps)
    assert all(run.start_s <= step.at_s <= run.end_s for step in run.steps)
    used = defaultdict(list)
    for index, activity in enumerate(run.activities):
        assert activity.cause < index
        if activity.cause != NO_CAUSE:
            assert min(run.activities[activity.cause].ends.values()) <= activity.came_s + EPSILON_S
        assert activity.begins.keys() == activity.ends.keys()
        assert max(activity.begins.values()) <= activity.start_s + EPSILON_S
        for rank, begin_s in activity.begins.items():
            assert activity.start_s <= activity.ends[rank] + EPSILON_S, "it goes on before all are there"
            used[rank].append((begin_s, activity.ends[rank]))
    for intervals in used.values():
        assert all(end <= begin + EPSILON_S for (_, end), (begin, _) in zip(intervals, intervals[1:])), "two at once"
        assert sum(end - begin for begin, end in intervals) <= run.end_s - run.start_s + EPSILON_S


def orders_of(reports):
    """The steps in order, with all that does not depend on time."""
    timed = ("time_s/", "perf/", "bytes/", "memory_gb/", "train_", "call")
    return [(r.step, r.epoch, {n: v for n, v in r.metrics.items() if not n.startswith(timed)}) for r in reports]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(plan=plans(), seed=st.integers(0, 1000))
def test_any_plan(plan, seed):
    """Any plan runs to its end, with the steps that ranks in random order give, and the same whenever it is asked."""
    n_rows = 50
    run = SimulatedCluster(plan, HashedDurations(seed), draw, n_rows=n_rows).run()
    check(run)
    assert run.failure is None
    assert run == SimulatedCluster(plan, HashedDurations(seed), draw, n_rows=n_rows).run()
    other = Simulation(plan, seed=seed, n_rows=n_rows, validate=False).run()
    ours, theirs = orders_of(step.report for step in run.steps), orders_of(other.reports)
    assert [o[:2] for o in ours] == [t[:2] for t in theirs]
    assert [o[2]["n_samples"] for o in ours] == [t[2]["n_samples"] for t in theirs]
    assert [committed.point.step for committed in run.committed] == sorted(other.checkpoints)
    figures = figures_of(run)
    for device in figures.devices:
        assert sum(dataclasses.astuple(device)) == pytest.approx(1.0)
    assert sum(figures.bounds.values()) == pytest.approx(figures.period_s)

"""Who computes at the same time as whom, and what that changes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.sched.events import ReportStep
from realrl.sim.cluster import SimulatedCluster, SimulatedRun, StepEnd
from realrl.sim.contention import simulate_sharing, waiting_shares
from realrl.sim.workers import NO_CAUSE, Activity
from tests.sched.plans import plans
from tests.sim.durations import HashedDurations, draw


def run_of(bars, n_ranks):
    """A run of (call, ranks, start, end)."""
    activities = [
        Activity(name, "call", dict.fromkeys(ranks, start_s), start_s, start_s, dict.fromkeys(ranks, end_s), NO_CAUSE)
        for name, ranks, start_s, end_s in bars
    ]
    return SimulatedRun(n_ranks, 0.0, 10.0, (), tuple(activities), (), None, ())


def test_shares_of_two_devices():
    run = run_of([("a", [0], 0, 4), ("b", [1], 1, 3), ("both", [0, 1], 4, 6), ("late", [1], 6, 9)], 2)
    assert waiting_shares(run, lambda rank: 0) == pytest.approx({"a": 0.5, "b": 0.0, "both": 0.0, "late": 1.0})


def test_devices_of_other_nodes_take_nothing():
    run = run_of([("a", [0], 0, 4), ("b", [1], 0, 4), ("c", [2], 0, 4)], 4)
    assert waiting_shares(run, lambda rank: rank // 2) == pytest.approx({"a": 0.0, "b": 0.0, "c": 1.0})
    assert waiting_shares(run, lambda rank: rank) == {"a": 0.0, "b": 0.0, "c": 0.0}  # nothing to gain


def test_shares_of_some_steps_leave_the_others_out():
    bars = [("a", [0], 0, 4), ("b", [1], 1, 3), ("a", [0], 4, 8), ("b", [1], 5, 8), ("a", [0], 8, 12)]
    steps = tuple(StepEnd(at_s, 0, ReportStep(step, 1, {}, ())) for step, at_s in enumerate([2.0, 4.0, 7.0], 1))
    run = replace(run_of(bars, 2), steps=steps)
    assert waiting_shares(run, lambda rank: 0, 2) == pytest.approx({"a": 0.5, "b": 0.0})  # from 2 to 4
    assert waiting_shares(run, lambda rank: 0, 3) == pytest.approx({"a": 0.4, "b": 0.0})
    assert waiting_shares(run, lambda rank: 0) == pytest.approx({"a": 7 / 12, "b": 0.0})


class DurationsByTokens(HashedDurations):
    """Seconds of calls in proportion to all of a dispatch's tokens, however samples are split into dispatches."""

    def call(self, call, requests, sizes):
        tokens = sum(sum(sizes[i].tokens) for request in requests.values() for m in request.minibatches for i in m)
        return dict.fromkeys(requests, tokens * self.seconds(call.name) / 100)


@given(plan=plans(), seed=st.integers(0, 1000))
def test_calls_are_faster_while_others_wait(plan, seed):
    def simulate(durations):
        return [SimulatedCluster(plan, durations, draw, n_rows=50).run()]

    def node_of(rank):
        return 0

    durations = DurationsByTokens(seed)
    (shared,), (same,) = (simulate(durations), simulate_sharing(simulate, durations, alone=1.0, node_of=node_of))
    assert same == shared
    (relieved,) = simulate_sharing(simulate, durations, alone=2.0, node_of=node_of)
    for name, share in waiting_shares(shared, node_of).items():
        assert 0.0 <= share <= 1.0
        before, after = (
            sum(a.ends[r] - a.start_s for a in run.activities if (a.name, a.kind) == (name, "call") for r in a.ends)
            for run in (shared, relieved)
        )
        assert after <= before * (1 + 1e-9)

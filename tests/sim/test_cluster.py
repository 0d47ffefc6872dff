"""The simulated cluster: what holds of any run, and runs whose times are known."""

import dataclasses
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realrl.errors import RunError
from realrl.graph.mfc import MFCDef, OffloadHook
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.hooks import Overlap
from realrl.sched.events import FailureKind
from realrl.sim.cluster import SimulatedCluster, simulate
from realrl.sim.durations import slowed
from realrl.sim.report import MESSAGES, figures_of
from realrl.sim.samples import Samples
from realrl.sim.workers import NO_CAUSE
from tests.graph.test_origins import best_of
from tests.sched.plans import INFERENCE, TRAIN, make_plan, on_all, plans, ppo, saved_every_step
from tests.sched.simulator import Simulation
from tests.sim.durations import CallDurations, HashedDurations, draw

EPSILON_S = 1e-9
N_ROWS = 50
SECONDS = {"actor_gen": 3.0, "rew_inf": 1.0, "ref_inf": 1.0, "critic_inf": 1.0, "actor_train": 2.0, "critic_train": 2.0}
ANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


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
        assert all(end <= begin + EPSILON_S for (_, end), (begin, _) in pairwise(intervals)), "two at once"
        if run.failure is None:  # times are computed ahead, also beyond a death
            assert sum(end - begin for begin, end in intervals) <= run.end_s - run.start_s + EPSILON_S


def spans_of(run):
    """All spans of a run, with their ranks."""
    return [*(item for step in run.steps for item in step.report.spans), *run.spans]


@ANY
@given(plan=plans(), seed=st.integers(0, 1000))
def test_any_plan(plan, seed):
    """Any plan runs to its end, with the steps that ranks in random order give, and the same whenever it is asked."""
    run = SimulatedCluster(plan, HashedDurations(seed), draw, n_rows=N_ROWS).run()
    check(run)
    assert run.failure is None
    assert run == SimulatedCluster(plan, HashedDurations(seed), draw, n_rows=N_ROWS).run()
    other = Simulation(plan, seed=seed, n_rows=N_ROWS, validate=False).run()
    reports = [step.report for step in run.steps]
    assert [(r.step, r.epoch) for r in reports] == [(r.step, r.epoch) for r in other.reports]
    assert [r.metrics["n_samples"] for r in reports] == [r.metrics["n_samples"] for r in other.reports]
    assert [committed.point.step for committed in run.committed] == sorted(other.checkpoints)
    figures = figures_of(run)
    for device in figures.devices:
        assert sum(dataclasses.astuple(device)) == pytest.approx(1.0)
    assert sum(figures.bounds.values()) == pytest.approx(figures.period_s)


@ANY
@given(plan=plans(drops=True), seed=st.integers(0, 1000))
def test_any_plan_that_drops_samples(plan, seed):
    dropped = {call.name: 0.3 for call in plan.main.calls if call.mfc.may_drop}
    run = SimulatedCluster(plan, HashedDurations(seed), draw, n_rows=N_ROWS, dropped_share=dropped).run()
    check(run)
    assert run.failure is None
    other = Simulation(plan, seed=seed, n_rows=N_ROWS, validate=False).run()
    counts = [name for name in other.reports[0].metrics if name.startswith(("n_samples", "dropped/"))]
    for step, report in zip(run.steps, other.reports, strict=True):
        assert {name: step.report.metrics[name] for name in counts} == {name: report.metrics[name] for name in counts}


@ANY
@given(plan=plans(), seed=st.integers(0, 1000), share=st.floats(0.0, 1.0))
def test_any_plan_goes_on_after_a_death(plan, seed, share):
    """Steps before the newest checkpoint are not repeated, the others are; each step is done."""
    durations, plan = HashedDurations(seed), saved_every_step(plan)
    whole = SimulatedCluster(plan, durations, draw, n_rows=N_ROWS).run()
    death_s = whole.steps[-1].at_s * share
    attempts = simulate(plan, durations, draw, n_rows=N_ROWS, lost={0: death_s}, restart_s=5.0)
    for attempt in attempts:
        check(attempt)
    first, last = attempts[0], attempts[-1]
    assert len(attempts) == 2
    assert last.failure is None
    assert first.failure.kind is FailureKind.WORKER_LOST
    assert last.start_s == first.end_s + 5.0
    saved = first.committed[-1].point.step if first.committed else 0
    assert [s.report.step for s in last.steps] == list(range(saved + 1, len(whole.steps) + 1))
    assert last.end_s > whole.end_s


def test_serial_plan():
    """One device does one call after another: a period is their sum."""
    cluster = Cluster(1, 1)
    plan = make_plan(ppo(), on_all(ppo(), cluster), cluster, n_steps=4)
    run = SimulatedCluster(plan, CallDurations(SECONDS), draw).run()
    figures = figures_of(run)
    assert figures.period_s == pytest.approx(sum(SECONDS.values()))
    assert {name: call.bound_s for name, call in figures.calls.items()} == pytest.approx(SECONDS)
    assert figures.bounds == pytest.approx(SECONDS)
    assert figures.devices[0].computing == pytest.approx(1.0)
    assert run.steps[1].report.metrics["time_s/actor_gen"] == pytest.approx(3.0)
    assert run.steps[1].report.metrics["time_s/step"] == pytest.approx(10.0)


def split():
    """PPO with everything on device 0 but the critic, which has device 1."""
    cluster = Cluster(1, 2)
    one, two = (Allocation(DeviceMesh.of_devices(cluster, 0, i, i), ParallelStrategy(1, 1, 1)) for i in (0, 1))
    return {mfc.name: two if mfc.role == "critic" else one for mfc in ppo()}, cluster


def test_calls_on_other_devices_overlap():
    plan = make_plan(ppo(), *split(), n_steps=4)
    run = SimulatedCluster(plan, CallDurations(SECONDS), draw).run()
    figures = figures_of(run)
    assert figures.period_s == pytest.approx(3 + 1 + 1 + 2)  # the critic's calls are beside the others
    assert figures.devices[1].idle == pytest.approx(1 - 3 / 7)
    assert "critic_train" not in figures.bounds


def test_a_slow_device_slows_its_calls_alone():
    plan = make_plan(ppo(), *split(), n_steps=4)
    durations = slowed(CallDurations(SECONDS), {1: 4.0})
    figures = figures_of(SimulatedCluster(plan, durations, draw).run())
    assert figures.calls["critic_train"].seconds == pytest.approx(8.0)
    assert figures.calls["actor_train"].seconds == pytest.approx(2.0)
    assert figures.period_s == pytest.approx(4 + 8)  # the next generation is beside critic_train


def test_a_replica_waits_for_its_slowest_rank():
    cluster = Cluster(1, 4)
    plan = make_plan(ppo(), on_all(ppo(), cluster, dp=2), cluster, n_steps=3)
    run = SimulatedCluster(plan, slowed(CallDurations(SECONDS), {3: 2.0}), draw).run()
    bars = {item.rank: item.span for item in spans_of(run) if item.span.name == "actor_gen"}
    assert [bars[rank].end_s - bars[rank].start_s for rank in range(4)] == pytest.approx([3.0, 3.0, 6.0, 6.0])


def test_messages_take_time():
    class Slow(CallDurations):
        def latency(self, rank):
            return 0.25

        def handling(self, n_events):
            return 0.5 * n_events

    cluster = Cluster(1, 1)
    mfcs = [
        MFCDef("a", "r", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=4),
        MFCDef("b", "s", TRAIN, "x", ("k",), n_seqs=4),
    ]
    plan = make_plan(mfcs, on_all(mfcs, cluster), cluster, n_steps=4)
    figures = figures_of(SimulatedCluster(plan, Slow({"a": 1.0, "b": 2.0}), draw).run())
    assert figures.bounds[MESSAGES] > 0
    assert figures.period_s == pytest.approx(3.0 + figures.bounds[MESSAGES])


def test_parameters_come_back_from_the_host():
    """A role in host memory delays its call by what its way back takes, unless that begins ahead of the call."""

    class Back(CallDurations):
        def onload(self, role, ranks):
            return dict.fromkeys(ranks, 1.5)

    cluster = Cluster(1, 1)
    mfcs = [
        MFCDef("a", "r", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=4, post_hooks=(OffloadHook(),)),
        MFCDef("b", "q", INFERENCE, "x", ("k",), ("l",), n_seqs=4),
        MFCDef("c", "s", TRAIN, "x", ("l",), n_seqs=4),
    ]
    seconds = Back({"a": 1.0, "b": 1.0, "c": 2.0})
    plan = make_plan(mfcs, on_all(mfcs, cluster), cluster, n_steps=4)
    run = SimulatedCluster(plan, seconds, draw).run()
    assert figures_of(run).period_s == pytest.approx(4.0 + 1.5)
    assert run.steps[2].report.metrics["time_s/realloc_wait"] == pytest.approx(1.5)
    early = Overlap(early={"a": frozenset({"a", "b", "c"})})
    plan = make_plan(mfcs, on_all(mfcs, cluster), cluster, n_steps=4, overlap=early)
    run = SimulatedCluster(plan, seconds, draw).run()
    assert figures_of(run).period_s == pytest.approx(4.0)


def test_a_checkpoint_is_written_beside_the_next_step():
    class Saving(CallDurations):
        def save(self, rank):
            return 0.5

        def write(self, rank):
            return 4.0

    cluster = Cluster(1, 1)
    plan = saved_every_step(make_plan(ppo(), on_all(ppo(), cluster), cluster, n_steps=3))
    run = SimulatedCluster(plan, Saving(SECONDS), draw).run()
    assert [round(s.report.metrics["time_s/step"], 6) for s in run.steps] == [10.0, 10.5, 10.5]
    assert run.committed[0].at_s == pytest.approx(run.steps[0].at_s + 4.5)


def test_a_death_before_any_checkpoint_costs_everything():
    cluster = Cluster(1, 1)
    plan = make_plan(ppo(), on_all(ppo(), cluster), cluster, n_steps=3)
    first, last = simulate(plan, CallDurations(SECONDS), draw, lost={0: 14.0})
    assert first.failure.message.startswith("worker 0 ended (killed by SIGKILL) in call 'rew_inf' of step 2")
    assert [step.report.step for step in last.steps] == [1, 2, 3]
    assert last.end_s == pytest.approx(14.0 + 30.0)


def test_a_cluster_that_cannot_go_on_is_an_error(monkeypatch):
    cluster = Cluster(1, 1)
    simulated = SimulatedCluster(make_plan(ppo(), on_all(ppo(), cluster), cluster), CallDurations(SECONDS), draw)
    monkeypatch.setattr(simulated._workers, "send", lambda *args, **kwargs: [])
    with pytest.raises(RunError, match=r"the simulated run is stuck at 0.0 s: 'actor_gen' waits for"):
        simulated.run()


def test_keys_that_a_call_renames_are_as_long_as_before():
    """The schema and the tokens that are counted do not depend on the name of the best of all responses."""
    for prefix in ("", "greedy_"):
        calls = best_of(prefix)
        plan = make_plan([dataclasses.replace(mfc, input_keys=mfc.input_keys[:1], n_seqs=4) for mfc in calls],
                         on_all(calls, Cluster(1, 1)), Cluster(1, 1))  # fmt: skip
        samples = Samples(plan, draw, {})
        assert set(samples.prefixes.values()) == {prefix}
        tokens, last = (samples.describe(["1/7"], [prefix + key]) for key in ("input_ids", "last_ids"))
        assert tokens.seqlens[prefix + "input_ids"] == last.seqlens[prefix + "last_ids"]
        assert tokens.schemas[prefix + "input_ids"] == last.schemas[prefix + "last_ids"]

"""Replays: a recording gives back the run that it is of."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realrl.errors import ConfigError
from realrl.mesh.device_mesh import Cluster
from realrl.runtime.output.trace import TraceWriter
from realrl.sched.events import RankSpan
from realrl.sched.messages import Span
from realrl.sim.cluster import SimulatedCluster
from realrl.sim.replay import Recorded, check_recording, dropped_shares, read_trace
from realrl.sim.report import compare
from tests.sched.plans import make_plan, on_all, plans, ppo
from tests.sim.durations import HashedDurations, draw
from tests.sim.test_cluster import spans_of

N_ROWS = 50


class Plain(HashedDurations):
    """Durations of what a trace tells: nothing of messages, and of the way back from host memory in hooks."""

    def onload(self, role, ranks):
        return dict.fromkeys(ranks, 0.0)

    def handling(self, n_events):
        return 0.0

    def latency(self, rank):
        return 0.0

    def load(self, n_samples):
        return 0.01 * n_samples

    def read(self, n_samples):
        return 0.0

    def free(self):
        return 0.0

    def save(self, rank):
        return 0.25

    def write(self, rank):
        return 0.0


def recorded(run, path):
    """The spans of a run, written to a trace and read back, without the phases inside of its calls."""
    writer = TraceWriter(path, start_s=0.0)
    for item in spans_of(run):
        writer.spans(item.rank, [item.span])
        if item.span.kind == "call":
            middle_s = (item.span.start_s + item.span.end_s) / 2
            writer.spans(item.rank, [Span("forward", "phase", item.span.start_s, middle_s)])
            writer.spans(item.rank, [Span("score", "reward", item.span.start_s, middle_s, {"process": 0})])
            writer.spans(None, [Span("schedule", "master", middle_s, item.span.end_s)])
    writer.close()
    return read_trace(path.read_text())


def metrics_of(run):
    return {step.report.step: step.report.metrics for step in run.steps}


@settings(deadline=None, suppress_health_check=[*HealthCheck], max_examples=30)
@given(plan=plans(), seed=st.integers(0, 1000))
def test_any_run_replays(plan, seed, tmp_path_factory):
    """The trace of a simulated run has all that its repetition needs: every step takes as long again."""
    plan = dataclasses.replace(plan, main=dataclasses.replace(plan.main, overlap=type(plan.main.overlap)()))
    run = SimulatedCluster(plan, Plain(seed), draw, n_rows=N_ROWS).run()
    spans = recorded(run, tmp_path_factory.mktemp("trace") / "trace.json")
    check_recording(plan, spans, "RUN")
    again = SimulatedCluster(plan, Recorded(spans), draw, n_rows=N_ROWS).run()
    for step, other in zip(run.steps, again.steps, strict=True):
        assert other.report.metrics["time_s/step"] == pytest.approx(step.report.metrics["time_s/step"], abs=1e-3)
    comparison = compare(again, metrics_of(run), spans, "RUN")
    assert comparison.period.error == pytest.approx(0.0, abs=1e-3)
    assert comparison.worst_start == pytest.approx(0.0, abs=1e-3)


def one_device(n_steps=3):
    cluster = Cluster(1, 1)
    return make_plan(ppo(), on_all(ppo(), cluster), cluster, n_steps=n_steps)


def test_steps_beyond_the_recording_take_what_is_usual():
    run = SimulatedCluster(one_device(3), Plain(), draw).run()
    longer = SimulatedCluster(one_device(6), Recorded(spans_of(run)), draw).run()
    late = [step.report.metrics["time_s/actor_gen"] for step in longer.steps[3:]]
    known = [step.report.metrics["time_s/actor_gen"] for step in run.steps[1:]]
    assert late == pytest.approx([sum(known) / 2] * 3)


def test_messages_are_measured_where_a_rank_waits():
    bars = [("a", "call", 0.0, 1.0), ("wait", "wait", 1.0, 1.3), ("b", "call", 1.3, 2.0)]
    args = {"step": 1, "dispatch": 0, "samples": 4, "tokens": 60}
    spans = [RankSpan(0, Span(name, kind, begin_s, end_s, args)) for name, kind, begin_s, end_s in bars]
    durations = Recorded(spans)
    assert durations.handling(1) + 2 * durations.latency(0) == pytest.approx(0.3)
    assert durations.draw("x").tokens == (15,)


def test_lengths_are_means_of_the_recording():
    args = {"step": 1, "dispatch": 0, "samples": 2, "tokens": 40, "responses": 4, "new_tokens": 20}
    durations = Recorded([RankSpan(0, Span("gen", "call", 0.0, 1.0, args))])
    assert dataclasses.astuple(durations.draw("x")) == ((5, 5), (5, 5))


def test_the_share_of_dropped_samples():
    rows = [
        {"n_samples": 8.0, "dropped/filter": 7.0, "dropped/surplus": 1.0},
        {"n_samples": 8.0, "dropped/filter": 1.0},
    ]
    assert dropped_shares(rows) == {"filter": pytest.approx(8 / 25)}


def test_a_trace_that_was_cut_short(tmp_path):
    run = SimulatedCluster(one_device(), Plain(), draw).run()
    whole = recorded(run, tmp_path / "trace.json")
    cut = read_trace((tmp_path / "trace.json").read_text()[:-400])
    assert 0 < len(cut) < len(whole)
    assert cut == whole[: len(cut)]


def test_recordings_of_other_runs_are_refused():
    plan, spans = one_device(), spans_of(SimulatedCluster(one_device(), Plain(), draw).run())
    with pytest.raises(ConfigError, match=r"RUN is of another graph: it has the calls .*, and this one actor_gen"):
        check_recording(plan, [s for s in spans if s.span.name != "rew_inf"], "RUN")
    with pytest.raises(
        ConfigError, match="RUN is of another plan: 'actor_gen' ran on devices 1, and here it runs on 0"
    ):
        check_recording(plan, [RankSpan(1, s.span) for s in spans], "RUN")
    with pytest.raises(ConfigError, match="RUN has no calls"):
        check_recording(plan, [], "RUN")
    with pytest.raises(ConfigError, match="RUN is of an older version of realrl"):
        check_recording(plan, [RankSpan(0, Span("actor_gen", "call", 0.0, 1.0, {"step": 1}))], "RUN")


def test_nothing_in_common_with_a_recording_is_refused():
    run = SimulatedCluster(one_device(), Plain(), draw).run()
    with pytest.raises(ConfigError, match="RUN has no step that the simulated run has"):
        compare(run, {7: {"time_s/step": 1.0}}, (), "RUN")
    assert json.loads(json.dumps(metrics_of(run)[1]))

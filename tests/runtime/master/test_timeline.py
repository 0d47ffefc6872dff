"""Events of the master in the trace."""

from __future__ import annotations

from pathlib import Path

from realrl.runtime.launchers.inline import InlineLauncher
from realrl.runtime.master.timeline import Timeline
from realrl.runtime.output.trace import TraceWriter
from realrl.sched.events import RankSpan
from realrl.sched.messages import Span
from tests.helpers.traces import load_trace


class Far(InlineLauncher):
    """Worker 1 is on a machine whose clock goes behind."""

    def __init__(self) -> None:
        pass

    def machine(self, rank: int) -> str:
        return "beta" if rank == 1 else ""

    def clock_offset_s(self, rank: int) -> float:
        return 5.0 * rank


def test_bars_of_workers_on_other_machines_are_those_of_the_masters_clock(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", start_s=0.0)
    timeline = Timeline(trace, Far())
    timeline.write([RankSpan(rank, Span("actor_gen", "call", 10.0, 11.0)) for rank in (0, 1)])
    trace.close()
    bars = [event for event in load_trace(tmp_path / "trace.json") if event["ph"] == "X"]
    assert [(bar["pid"], bar["ts"], bar["dur"]) for bar in bars] == [(0, 10e6, 1e6), (1, 15e6, 1e6)]


def test_bars_of_workers_and_master_and_counters(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json")
    timeline = Timeline(trace, Far())
    timeline.ends("start")
    with timeline.scheduling():
        timeline.memory(0, 1.5)
        timeline.memory(0, 1.501)  # hardly changed
        timeline.memory(1, 2.0)
        timeline.memory(0, 1.25)
        with timeline.writing("write responses"):
            pass
    timeline.took("evaluation", 0.0)
    timeline.ends("step 1", 1)
    spans = [RankSpan(rank, Span("actor_gen", "call", 0.0, 1.0)) for rank in (1, 0)]
    timeline.write(spans, 1, {"perf/tokens_per_s": 100.0, "reward/mean": 0.5, "kl/mean": 0.1})
    timeline.write([], 2, {})
    trace.close()
    events = load_trace(tmp_path / "trace.json")
    bars = [(event["cat"], event["name"]) for event in events if event["ph"] == "X"]
    assert bars == [
        ("call", "actor_gen"),
        ("call", "actor_gen"),
        ("step", "start"),
        ("step", "evaluation"),
        ("step", "step 1"),
        ("master", "schedule"),
        ("master", "write responses"),
    ]
    assert [(event["name"], event["args"]) for event in events if event["ph"] == "C"] == [
        ("memory", {"worker 0 (GB)": 1.5}),
        ("memory", {"worker 1 (GB)": 2.0}),
        ("memory", {"worker 0 (GB)": 1.25}),
        ("throughput", {"tokens/s": 100.0}),
        ("reward", {"mean": 0.5}),
    ]
    step, evaluation = (next(event for event in events if event["name"] == name) for name in ("step 1", "evaluation"))
    assert step["ts"] <= evaluation["ts"] <= evaluation["ts"] + evaluation["dur"] <= step["ts"] + step["dur"]

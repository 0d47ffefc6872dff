from __future__ import annotations

import json
import math
from pathlib import Path

from realrl.runtime.output.trace import MASTER_TID, STEPS_TID, TraceWriter
from realrl.sched.messages import Span
from tests.helpers.traces import load_trace

CALL = Span("actor_gen", "call", 100.5, 101.25, {"tokens": 64})
WAIT = Span("wait", "wait", 100.0, 100.5)


def write(path: Path) -> TraceWriter:
    trace = TraceWriter(path, start_s=100.0)
    trace.spans(1, [WAIT, CALL])
    trace.spans(None, [Span("plan", "call", 100.0, 100.001)])
    trace.counter("samples", {"alive": 32, "broken": math.nan}, at_s=100.75)
    return trace


def test_a_closed_trace_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = write(path)
    trace.close()
    trace.close()
    events = json.loads(path.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert spans[1] | {"ts": 500_000, "dur": 750_000, "pid": 0, "tid": 1, "cat": "call"} == spans[1]
    assert spans[1]["args"] == {"tokens": 64}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "worker 1", MASTER_TID: "master"}
    (counter,) = (event for event in events if event["ph"] == "C")
    assert (counter["ts"], counter["args"]) == (750_000, {"alive": 32, "broken": "nan"})
    assert load_trace(path) == events


def test_a_killed_runs_trace_still_loads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = write(path)
    text = path.read_text()
    trace.close()
    assert not text.rstrip().endswith("]")
    whole = json.loads(text + "]")  # the array form may stay open
    path.write_text(text)
    assert load_trace(path) == whole
    path.write_text(text[:-7])  # a last event cut short is dropped
    assert load_trace(path) == whole[:-1]


def test_everything_has_a_track_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with_phase = [CALL, Span("decode", "phase", 100.6, 101.0, {"tokens": 5})]
    trace = TraceWriter(path, start_s=100.0)
    trace.spans(2, [*with_phase, Span("actor to ref", "travel", 100.0, 101.0)])
    trace.spans(2, [Span("score", "reward", 100.0, 101.0, {"process": n}) for n in (0, 1)])
    trace.spans(None, [Span("schedule", "master", 100.0, 100.1), Span("step 1", "step", 100.0, 102.0)])
    trace.close()
    events = load_trace(path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    places = {event["name"]: names[event["tid"]] for event in events if event["ph"] == "X"}
    assert places == {
        "score": "worker 2, rewards 1",
        "actor_gen": "worker 2",
        "decode": "worker 2",
        "actor to ref": "worker 2, parameters",
        "schedule": "master",
        "step 1": "steps",
    }
    assert [names[event["tid"]] for event in events if event.get("cat") == "reward"] == [
        "worker 2, rewards 0",
        "worker 2, rewards 1",
    ]
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert sorted(order, key=lambda tid: order[tid])[:2] == [STEPS_TID, MASTER_TID]


def test_machines_are_processes_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, start_s=100.0)
    for rank, machine in ((2, "beta"), (0, "alpha"), (1, "alpha"), (3, "beta")):
        trace.spans(rank, [CALL, Span("actor to ref", "travel", 100.0, 101.0)], machine=machine)
    trace.spans(2, [Span("score", "reward", 98.0, 99.0)], machine="beta", shift_s=2.0)
    trace.spans(None, [Span("step 1", "step", 100.0, 102.0)])
    trace.close()
    events = load_trace(path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    found: dict[str, set[int]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(names[event["pid"]], set()).add(event["tid"] % 1_000_000)
    assert found == {"realrl": {STEPS_TID % 1_000_000}, "machine alpha": {0, 1}, "machine beta": {2, 3}}
    assert sorted(order, key=lambda pid: order[pid]) == [2, 1]
    assert next(event["ts"] for event in events if event["name"] == "score") == 0


def test_an_earlier_trace_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for _ in range(3):
        write(path).close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace-1.json", "trace-2.json", "trace.json"]


def test_a_full_disk_ends_the_trace_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path)
    trace._file.close()
    trace._file = open("/dev/full", "w")  # noqa: SIM115 - the writer closes it
    trace.spans(0, [CALL])
    trace.spans(0, [CALL])
    trace.close()

"""Times of a run, from traces."""

import pytest

from realrl.report.times import TICKS, attempts_of, last_steps, read_trace, time_use
from tests.report.folders import trace_text, write_run


def spans(n_steps, workers=2, first=1):
    """Each worker: 1 s generation, 0.5 s of rows, 2 s training, of 4 s; worker 1 does not train."""
    found = []
    for step in range(first, first + n_steps):
        at = 4.0 * (step - first)
        args = {"step": step, "dispatch": step, "role": "actor"}
        for worker in range(workers):
            found.append((worker, "actor_gen", "call", at, at + 1, {**args, "phase_s/decode": 0.75}))
            found.append((worker, "decode", "phase", at + 0.25, at + 1, {}))
            found.append((worker, "transfer for actor_train", "transfer", at + 1, at + 1.5, args))
        found.append((0, "actor_train", "call", at + 1.5, at + 3.5, args))
        found.append((0, "wait", "wait", at + 3.5, at + 4, {}))
        found.append((1_000_000, "plan", "master", at, at + 4, {}))
    return found


def test_shares_of_each_worker(tmp_path):
    trace = read_trace(write_run(tmp_path / "a", spans=spans(10)), 1_000_000)
    use = time_use(trace)
    assert use["keys"] == ["actor_gen", "actor_train", "rows of samples", "waiting"]
    assert use["is_call"] == [True, True, False, False]
    assert use["seconds"] == pytest.approx(39.5)
    assert use["steps"] == [1, 10]
    assert [(name, pytest.approx(seconds)) for name, seconds in use["workers"]] == [
        ("worker 0", [10, 20, 5, 4.5]),
        ("worker 1", [10, 0, 5, 24.5]),
    ]
    assert use["phases"] == {"actor_gen": {"decode": pytest.approx(15), "other": pytest.approx(5)}}
    for _, seconds in use["workers"]:
        assert sum(seconds) == pytest.approx(use["seconds"])


def test_the_last_steps(tmp_path):
    trace = read_trace(write_run(tmp_path / "a", spans=spans(10)), 1_000_000)
    last = last_steps(trace, 1000)
    assert last["steps"] == [8, 10]
    assert last["seconds"] == pytest.approx(11.5)
    assert [name for name, _ in last["tracks"]] == ["worker 0", "worker 1", "worker 1000000"]
    for _, flat in last["tracks"]:
        for begin, end in zip(flat[1::3], flat[2::3], strict=True):
            assert 0 <= begin <= end <= TICKS
    assert last_steps(trace, 12)["steps"] == [10, 10], "fewer steps where there are many bars"
    assert ["actor_train", "call", "actor"] in last["works"]


def test_of_a_long_trace_the_end_is_read(tmp_path):
    folder = write_run(tmp_path / "a", spans=spans(2000))
    trace = read_trace(folder, 100_000)
    assert not trace.is_whole
    use = time_use(trace)
    assert use["steps"][1] == 2000
    assert use["steps"][0] > 1900
    assert use["workers"][0][0] == "worker 0", "names stand at the beginning"


def test_a_killed_run_and_none(tmp_path):
    folder = write_run(tmp_path / "a")
    assert time_use(read_trace(folder, 1000)) is None
    assert last_steps(read_trace(folder, 1000), 10) is None
    text = trace_text(spans(2), end=',\n{"name":"actor_ge')
    (folder / "trace.json").write_text(
        text + "\n\xff\n{}\n" + '{"ph":"X","ts":"a"}\n{"ph":"X","ts":1,"dur":1,"tid":0}\n'
    )
    assert time_use(read_trace(folder, 1_000_000))["steps"] == [1, 2]


def test_attempts(tmp_path):
    folder = write_run(tmp_path / "a", spans=spans(3, first=21))
    assert attempts_of(folder) == []
    (folder / "trace-1.json").write_text(trace_text(spans(12)))
    (folder / "trace-2.json").write_text(trace_text(spans(10, first=11)))
    assert attempts_of(folder) == [11, 21]
    (folder / "trace-2.json").write_text(
        trace_text([(0, "eval_actor_gen", "call", 0.5, 1.5, {"step": 1}), *spans(10, first=11)])
    )
    assert attempts_of(folder) == [11, 21], "evaluations have steps of their own"

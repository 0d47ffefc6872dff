"""Other work, as a made-up /proc tells of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from realrl.runtime.processes import load
from realrl.runtime.processes.load import (
    WAIT_VARIABLES,
    CoreWaits,
    cores_of_others,
    share_cores,
    threads_beside,
    waiting_variables,
)

TICKS = os.sysconf("SC_CLK_TCK")


def write(proc: Path, *, running: int = 4, busy_s: float = 0.0, idle_s: float = 0.0, stolen_s: float = 0.0) -> None:
    columns = [round(seconds * TICKS) for seconds in (busy_s, 0, 0, idle_s, 0, 0, 0, stolen_s, 0, 0)]
    (proc / "loadavg").write_text(f"0.10 0.20 0.30 {running}/200 4711\n")
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, columns))}\ncpu0 0 0\n")


@pytest.fixture
def clock(monkeypatch):
    """A clock on which only sleeping takes time; `then` happens meanwhile."""
    now = {"s": 100.0, "then": lambda: None}

    def sleep(seconds):
        now["s"] += seconds
        now["then"]()

    monkeypatch.setattr(load.time, "monotonic", lambda: now["s"])
    monkeypatch.setattr(load.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(load.time, "sleep", sleep)
    return now


def test_what_processes_and_the_host_take(tmp_path, clock):
    write(tmp_path, busy_s=10.0, idle_s=5.0, stolen_s=1.0)
    clock["then"] = lambda: write(tmp_path, busy_s=10.5, idle_s=5.2, stolen_s=1.25)
    assert cores_of_others(0.5, proc=tmp_path) == pytest.approx(1.5)


def test_a_machine_with_one_runnable_thread_is_not_looked_at(tmp_path, clock):
    write(tmp_path, running=1)
    clock["then"] = pytest.fail
    assert cores_of_others(proc=tmp_path) == 0.0


@pytest.mark.parametrize("text", [None, "", "cpu", "cpu x y z a b c d"])
def test_where_nobody_tells_there_is_nothing(tmp_path, clock, text):
    if text is not None:
        write(tmp_path)
        (tmp_path / "stat").write_text(text)
    assert cores_of_others(proc=tmp_path) == 0.0


@pytest.mark.parametrize(
    ("n_busy", "environment", "expected"),
    [
        (0.4, {}, {}),
        (0.6, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (0.6, {"OMP_WAIT_POLICY": "ACTIVE"}, {}),
        (0.6, {"GOMP_SPINCOUNT": "10"}, {}),
        (0.6, {"OMP_NUM_THREADS": "2"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
    ],
)
def test_threads_sleep_where_others_need_the_cores(n_busy, environment, expected):
    assert waiting_variables(n_busy, 2, environment) == expected


@pytest.mark.parametrize(
    ("n_busy", "n_cores", "n_workers", "expected"),
    [(0.0, 2, 1, 2), (0.5, 2, 1, 2), (0.6, 2, 1, 1), (2.0, 2, 1, 1), (9.0, 2, 4, 1), (4.4, 16, 3, 4), (3.9, 16, 1, 16)],
)
def test_threads_find_a_core_each(n_busy, n_cores, n_workers, expected):
    assert threads_beside(n_busy, n_cores, n_workers) == expected


@pytest.mark.parametrize(
    ("n_busy", "environment", "n_before", "variables", "told"),
    [
        (0.0, {}, None, {"OMP_NUM_THREADS": "4"}, ""),
        (6.0, {}, None, {"OMP_NUM_THREADS": "1"}, "1 instead of 4, by which sums may be rounded otherwise"),
        (3.0, {}, None, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}, "sleep while they wait"),
        (6.0, {}, 0, {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}, "sleep while they wait"),
        (0.0, {}, 2, {"OMP_NUM_THREADS": "2"}, "2 instead of 4, as in the steps before"),
        (0.0, {}, 9, {"OMP_NUM_THREADS": "4"}, ""),
        (6.0, {"OMP_NUM_THREADS": "3"}, 1, {"OMP_WAIT_POLICY": "PASSIVE"}, "sleep while they wait"),
        (6.0, {"OMP_NUM_THREADS": "1"}, None, {}, ""),
    ],
)
def test_share_of_the_cores(n_busy, environment, n_before, variables, told):
    found = share_cores(n_busy, 8, 2, environment, n_before=n_before)
    assert found.variables == variables
    assert found.n_threads == int((variables | environment)["OMP_NUM_THREADS"])
    assert (told in found.notes[0]) if told else not found.notes


def test_threads_in_words_of_the_user_are_not_counted():
    assert share_cores(0.0, 8, 2, {"OMP_NUM_THREADS": "4,2"}).n_threads == 0


def test_waits_of_processes_that_come_and_go(tmp_path, clock):
    def waited(**seconds: float) -> None:
        for name, value in seconds.items():
            (tmp_path / name[1:]).mkdir(exist_ok=True)
            (tmp_path / name[1:] / "schedstat").write_text(f"7 {round(value * 1e9)} 3\n")

    waits = CoreWaits(proc=tmp_path)
    waited(p1=2.0, p2=1.0)
    assert waits.since_last([1, 2, 3]) is None
    waited(p1=3.0, p2=1.0)
    clock["s"] += 2.0
    assert waits.since_last([1, 2, 3]) == pytest.approx(0.25)
    waited(p1=7.0)
    (tmp_path / "2" / "schedstat").unlink()
    clock["s"] += 4.0
    assert waits.since_last([1, 2, 3]) == pytest.approx(1.0)
    assert waits.share == pytest.approx(4.5 / 6.0)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux counts")
def test_this_machine():
    assert 0.0 <= cores_of_others(0.01) <= 4096.0
    waits = CoreWaits()
    assert waits.since_last([os.getpid()]) is None
    share = waits.since_last([os.getpid()])
    assert share is not None
    assert 0.0 <= share <= 1.0


_INLINE = """
import os, types
from realrl.runtime.processes import load
load.cores_of_others = lambda: 1e4
from realrl.cli.launch import _share_cores
run = types.SimpleNamespace(launcher={launcher!r}, cluster=types.SimpleNamespace(device="auto"))
print(_share_cores(run), os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize(
    ("launcher", "first", "policy"), [("inline", "('other work takes", "PASSIVE"), ("local", "()", "None")]
)
def test_a_run_inside_this_process_decides_before_torch_is_there(launcher, first, policy):
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
    code = _INLINE.format(launcher=launcher)
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith(first)
    assert told.split()[-1] == policy

"""Profiles of this machine by the command line, and what a user may do wrong."""

import itertools
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from realrl import cli
from realrl.errors import RunError, UsageError
from realrl.profiler import program
from realrl.profiler.hardware_files import named_hardware
from realrl.profiler.program import _Workers
from realrl.runtime.launchers.base import WorkerEnd
from realrl.runtime.processes.lifeline import find_leftovers
from realrl.sched.messages import Goodbye, Heartbeat, Hello, Ready, WorkerFailed
from realrl.sim.probes import Probe
from tests.helpers.live import wait_until

SMALL = ("preset=tiny", "n_seqs=8", "dataset.max_prompt_tokens=8", "generation.max_new_tokens=4")
_MARK = "REALRL_TEST_MARK"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_profile_of_one_worker(tmp_path, temporary, capsys):
    out = tmp_path / "ours.yaml"
    raw, again = tmp_path / "raw.json", tmp_path / "again.yaml"
    options = ("--seconds", "1", "--measurements", str(raw), "--out", str(out))
    assert cli.main(["profile", "ppo", *SMALL, "launcher=inline", *options]) == 0
    assert cli.main(["profile", "ppo", "--from", str(raw), "--out", str(again)]) == 0
    assert again.read_text() == out.read_text()
    found = named_hardware(str(out))
    assert found.device.kind == "cpu"
    assert found.profile.n_workers == 1
    assert found.profile.models == ("actor",)
    assert set(found.profile.errors) == {
        "products",
        "inference",
        "train_step",
        "generate",
        "copies",
        "rows",
        "calls",
        "rewards",
    }
    assert found.host.start_s > 0
    assert 0 < found.host.message_s < 1
    assert out.read_text().startswith("# Measured by realrl profile ppo, with 1 worker")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.yaml", "ours.yaml", "raw.json", "tmp"]
    assert not any(temporary.iterdir())
    assert "next: train_step" in capsys.readouterr().out


def test_workers_that_differ():
    """Computing takes what a usual worker takes, a collective what all wait on average, and other things the most."""
    metrics = [{"seconds": 0.1, "repetition": 0.3}, {"seconds": 0.4, "repetition": 0.5}]
    times = {kind: program.timing_of(kind, metrics) for kind in ("train_step", "collectives", "rows")}
    assert {kind: one.seconds for kind, one in times.items()} == pytest.approx(
        {"train_step": 0.2, "collectives": 0.25, "rows": 0.4}
    )
    assert [one.scatter > 0 for one in times.values()] == [True, False, False]
    assert {one.repetition_s for one in times.values()} == {0.5}


class SlowForAWhile:
    """Workers of a machine on which everything takes three times as long between two times of its own clock."""

    def __init__(self, begin_s, end_s):
        self.now_s, self.slow = 0.0, (begin_s, end_s)
        self.asked = []

    def show(self, n_done, n_all, probe, number=1):
        assert n_done < n_all

    def time(self, probe, n):
        self.asked.append((probe, n))
        each = []
        for _ in range(n):
            begin_s, end_s = self.slow
            each.append(0.01 * probe.n_layers * (3.0 if begin_s <= self.now_s < end_s else 1.0))
            self.now_s += each[-1]
        return program.Timing(statistics.median(each), n / 100, sum(each) / n)


def test_a_machine_that_is_slow_for_a_while_does_not_spoil_a_class(monkeypatch):
    """A class measured in one go would lie inside of the slow stretch."""
    kinds = ("inference", "train_step")
    probes = [Probe(kind, "actor", depth, 1, 8, 8) for kind in kinds for depth in (1, 2, 3, 4, 5, 6)]
    workers = SlowForAWhile(2.0, 6.0)
    monkeypatch.setattr(program.time, "monotonic", lambda: workers.now_s)
    found = program._measure(workers, probes, 20.0)
    assert [one.probe for one in found] == probes
    assert [one.seconds for one in found] == pytest.approx([0.01 * probe.n_layers for probe in probes])
    for one in found:
        repetitions = [n for probe, n in workers.asked if probe == one.probe]
        assert repetitions[::2] == [1, 1, 1]  # of which nothing is kept: libraries may prepare sizes again
        assert one.scatter == pytest.approx(statistics.fmean(n / 100 for n in repetitions[1::2]))
    assert workers.now_s <= 20.0
    assert max(n for _, n in workers.asked) <= 11  # of 31 repetitions, a third at a time
    in_order = [probe for probe, _ in workers.asked[-48:]]
    engines = [(probe.model, probe.n_layers) for probe in in_order]
    assert sum(a != b for a, b in itertools.pairwise(engines)) < 12  # one change for each model of a pass


def test_what_takes_all_the_time_is_measured_once(monkeypatch):
    probes = [Probe("train_step", "actor", depth, 1, 8, 8) for depth in (100, 200, 300, 400, 500)]
    workers = SlowForAWhile(0.0, 0.0)
    monkeypatch.setattr(program.time, "monotonic", lambda: workers.now_s)
    found = program._measure(workers, probes, 8.0)
    assert workers.asked == [(probe, 1) for probe in probes[:4]]  # four in any case, and for another there is no time
    assert [one.probe for one in found] == probes[:4]


def start(folder, *arguments):
    mark = secrets.token_hex(8)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", _MARK: mark}
    command = [sys.executable, "-m", "realrl", "profile", "ppo", *SMALL, "cluster.n_devices_per_node=2", *arguments]
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True), mark


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path, temporary):
    out = tmp_path / "ours.yaml"
    out.write_text("what was there")
    process, mark = start(tmp_path, "--out", str(out))
    try:
        text = tmp_path / "output.txt"
        wait_until(lambda: "next: products" in text.read_text() or process.poll() is not None, "a measurement")
        assert process.poll() is None, text.read_text()
        assert len(find_leftovers(_MARK, mark)) >= 4  # this command, the master, two workers
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, text.read_text()
        wait_until(lambda: not find_leftovers(_MARK, mark), "the end of all processes")
    finally:
        process.kill()
        process.wait()
    assert out.read_text() == "what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.yaml", "output.txt", "tmp"]
    assert not any(temporary.iterdir())


def test_two_workers_measure_what_is_between_them(tmp_path, temporary):
    out = tmp_path / "ours.yaml"
    process, _ = start(tmp_path, "--seconds", "1", "--out", str(out))
    assert process.wait(100) == 0, (tmp_path / "output.txt").read_text()
    found = named_hardware(str(out))
    assert found.profile.n_workers == 2
    assert "collectives" in found.profile.errors
    assert 0 < found.device.scatter <= 1
    assert found.name.endswith(", 2 workers")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "."], "--out .: it is a folder, not a file"),
        (["--out", "none/a.yaml"], "--out none/a.yaml: its folder does not exist"),
        (["--seconds", "0"], "--seconds 0 is no time to measure"),
        (["--seconds", "nan"], "--seconds nan is no time to measure"),
        (["models.actor.path=none"], "model folder none does not exist"),
        (["--hardware", "h2000"], "--hardware h2000: there is no such hardware. Did you mean 'h200'"),
        (["cluster.n_nodes=2"], "cluster.n_nodes=2, but a profile measures the machine on which it is typed"),
    ],
)
def test_wrong_input_starts_nothing(arguments, message, tmp_path, temporary, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", "ppo", *SMALL, *arguments]) == UsageError.exit_code
    assert message in capsys.readouterr().err
    assert not any(temporary.iterdir())


# ---------------------------------------------------------------- workers that do not answer


def workers_of(replies, ended=()):
    """The workers of a session whose transport has these replies, and nothing after them."""
    waiting, dead = list(replies), list(ended)
    transport = SimpleNamespace(send=lambda rank, request: None, receive=lambda _: waiting.pop(0) if waiting else None)
    launcher = SimpleNamespace(
        start=lambda n, admission: None,
        poll=lambda: [dead.pop(0)] if dead and not waiting else [],
        log_path=lambda rank: f"worker_{rank}.log",
    )
    session = SimpleNamespace(
        transport=transport, launcher=launcher, admission=b"", run=b"", beat=lambda: None,
        progress=SimpleNamespace(phase=lambda text: None),
    )  # fmt: skip
    config = SimpleNamespace(cluster=SimpleNamespace(worker_timeout_s=0.05))
    return _Workers(session, SimpleNamespace(n_workers=2, config=config))


UP = [Hello(0, 1, "a"), Hello(1, 2, "b")]


def test_a_worker_that_ends_is_named_with_its_log():
    with pytest.raises(RunError, match=r"(?s)worker 1 ended with exit code -9 in the start.*worker_1.log"):
        workers_of(UP, ended=[WorkerEnd(1, -9)]).start()


def test_a_worker_that_fails_tells_why():
    failure = WorkerFailed(1, 0, None, None, "ConfigError", "no such device", "", 2)
    with pytest.raises(UsageError, match="worker 1 failed in the start: no such device"):
        workers_of([*UP, failure]).start()
    bug = WorkerFailed(0, 0, None, None, "KeyError", "'x'", "Traceback ...", 1)
    with pytest.raises(RunError, match=r"(?s)worker 0 failed in the start: 'x'.*Traceback"):
        workers_of([*UP, bug]).start()


def test_a_silent_worker_is_given_up(monkeypatch):
    times = iter(range(1000))
    monkeypatch.setattr("realrl.profiler.program.time", SimpleNamespace(monotonic=lambda: float(next(times))))
    with pytest.raises(RunError, match=r"worker . was silent for"):
        workers_of([*UP, Ready(0, 0, (), 0, ("{}",)), *[Heartbeat(0, 0, "", 0.0)] * 3]).start()


def test_workers_that_leave_have_ended_in_order():
    workers_of([Goodbye(0, 0), Goodbye(1, 0)], ended=[WorkerEnd(0, 0), WorkerEnd(1, 0)]).end()

"""Real processes: supervisor, master, two workers, a child of one. Whoever dies, the rest end and the user is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from realrl.runtime.processes.lifeline import RUN_ID, WORKERS_OF, socket_folder

REPOSITORY = Path(__file__).parents[3]
LIMIT_S = 60  # how long a test waits for something that normally takes a second
FAKES = "tests.runtime.processes.fake_programs"

_SUPERVISOR = """
import sys
from realrl.runtime.processes.session import SessionStart
from realrl.runtime.processes.recovery import Recover
from realrl.runtime.processes.supervise import run_supervised
run_dir, program, host, run, port, retries, timeout_s = sys.argv[1:]
start = SessionStart(run=run.encode(), run_dir=run_dir, program=program, host=host, port=int(port))
sys.exit(run_supervised(start, Recover(int(retries), master_timeout_s=float(timeout_s))))
"""


class Run:
    """A supervised run in processes of its own, as the command line starts it."""

    def __init__(
        self,
        run_dir: Path,
        program: str,
        *,
        host: str = "FakeHost",
        run: str = "",
        port: int = 0,
        retries: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        self.run_dir = run_dir
        self._output = run_dir.with_name("stderr.txt")
        command = [
            sys.executable,
            "-c",
            _SUPERVISOR,
            str(run_dir),
            f"{FAKES}:{program}",
            f"{FAKES}:{host}",
            run,
            str(port),
            str(retries),
            str(timeout_s),
        ]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},  # for the fakes: processes import nothing from cwd
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def pids(self) -> dict[str, int]:
        path = self.run_dir / "pids.json"
        wait_until(lambda: path.exists() or self.process.poll() is not None, "the workers to be at work")
        assert path.exists(), self.output()
        pids: dict[str, int] = json.loads(path.read_text())
        return pids

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)

    def output(self) -> str:
        return self._output.read_text()

    def kill_all(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # supervisor and master; the workers follow
            self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def starter(program: str, **options: str | int) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", program, **options))
        return runs[-1]

    yield starter
    for run in runs:
        run.kill_all()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.02)


def state(pid: int) -> str:
    """Letter of the system for a process: "T" is stopped, "Z" has ended, as has what is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def is_alive(pid: int) -> bool:
    return state(pid) != "Z"


def assert_all_end(pids: dict[str, int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids.values())), f"the end of {pids}")


def test_a_whole_life_leaves_nothing_behind(start: Callable[..., Run]) -> None:
    run = start("one_of_each")
    assert run.wait() == 0, run.output()
    results = json.loads((run.run_dir / "results.json").read_text())
    assert results == {
        "torch": False,  # the master process never imports it
        "stdin": 0,  # user code meets an empty stdin, not the lifeline
        "pull": len("rewards of 0/1 from 0"),
        "ended": [[0, 0], [1, 0]],
    }
    log = (run.run_dir / "logs" / "worker_1.log").read_text()
    assert f"{RUN_ID} {WORKERS_OF}\n" in log  # the only ones of ours: no key is in a worker's environment
    assert (run.run_dir / "trace.json").read_text().endswith("]\n")


def test_a_killed_master_is_reported_and_everything_ends(start: Callable[..., Run]) -> None:
    run = start("wait_for_worse")
    pids = run.pids()
    environment = Path(f"/proc/{pids['master']}/environ").read_bytes().split(b"\0")
    sockets = socket_folder(next(v.partition(b"=")[2].decode() for v in environment if v.startswith(RUN_ID.encode())))
    assert (sockets / "master").is_socket()
    os.kill(pids["master"], signal.SIGKILL)
    assert run.wait() == 1
    assert not sockets.exists()
    assert f"error: the master process ({pids['master']}) died: killed by SIGKILL" in run.output()
    assert "out of memory" in run.output()
    assert_all_end(pids)


def test_a_killed_master_is_started_again(start: Callable[..., Run]) -> None:
    run = start("dies_so_often", run="2", retries=2)
    assert run.wait() == 0, run.output()
    for n in (1, 2):
        assert f"restart {n} of 2: the master process died; going on from the beginning" in run.output()
        assert f"\n  it starts again by itself ({n} of 2), from the beginning\n" in run.output()
    assert run.output().count("realrl: warning: the master process (") == 2
    assert "error" not in run.output()
    assert "resume=auto" not in run.output()
    assert (run.run_dir / "results.json").exists()


@pytest.mark.parametrize(
    ("retries", "told"),
    [
        (1, "The run was started again once already (recover.retries)."),
        (9, "It happened at the same place 3 times without a step done in between"),
    ],
)
def test_a_master_that_is_killed_again_and_again(start: Callable[..., Run], retries: int, told: str) -> None:
    run = start("dies_so_often", run="99", retries=retries)
    assert run.wait() == 1
    assert told in run.output()
    assert run.output().count("died: killed by SIGKILL") == min(retries + 1, 3)
    final = run.output().partition("realrl: error: ")[2]  # the only one
    assert final.startswith("the master process (")
    assert "resume=auto" in final
    assert final.count("processes.session: Python") == 1  # the last attempt's log alone
    assert not (run.run_dir / "results.json").exists()


SHORT_S = 0.5  # the supervisor adds five seconds


def test_a_frozen_master_is_killed_and_everything_ends(start: Callable[..., Run]) -> None:
    run = start("wait_for_worse", timeout_s=SHORT_S)
    pids = run.pids()
    os.kill(pids["master"], signal.SIGSTOP)
    assert run.wait() == 1
    assert f"error: the master process ({pids['master']}) gave no sign of life for 6 s and was killed" in run.output()
    assert "cluster.worker_timeout_s" in run.output()
    assert_all_end(pids)


def test_a_frozen_master_is_started_again(start: Callable[..., Run]) -> None:
    run = start("freezes_at_first", retries=1, timeout_s=SHORT_S)
    assert run.wait() == 0, run.output()
    told = "restart 1 of 1: the master process gave no sign of life for 6 s; going on from the beginning"
    assert told in run.output()
    assert (run.run_dir / "results.json").exists()


def test_a_pause_of_all_processes_is_no_death(start: Callable[..., Run]) -> None:
    run = start("wait_for_worse", timeout_s=SHORT_S)
    pids = run.pids()
    for order in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids.values():
            os.kill(pid, order)
        time.sleep(7.0)
        assert run.process.poll() is None
    os.kill(pids["supervisor"], signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert "interrupted by SIGTERM: everything was stopped" in run.output()
    assert "sign of life" not in run.output()
    assert_all_end(pids)


def test_ctrl_z_stops_everything_until_it_goes_on(start: Callable[..., Run]) -> None:
    run = start("wait_for_worse", timeout_s=SHORT_S)
    pids = run.pids()
    os.kill(pids["supervisor"], signal.SIGTSTP)
    wait_until(lambda: all(state(pid) == "T" for pid in pids.values()), "everything to stop")
    time.sleep(7.0)
    os.kill(pids["supervisor"], signal.SIGCONT)
    wait_until(lambda: not any(state(pid) in "TZ" for pid in pids.values()), "everything to go on")
    os.kill(pids["supervisor"], signal.SIGINT)
    assert run.wait() == 130
    assert "sign of life" not in run.output()
    assert_all_end(pids)


def test_a_master_whose_output_nobody_reads_is_not_frozen(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "run"), f"{FAKES}:talkative", f"{FAKES}:FakeHost", "", "0", "0", str(SHORT_S)]
    settings = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", _SUPERVISOR, *arguments]
    run = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, env=settings)
    time.sleep(8.0)
    assert len(run.communicate(timeout=LIMIT_S)[0]) > 1_000_000
    assert run.returncode == 0


def test_a_killed_worker_is_reported_and_everything_ends(start: Callable[..., Run]) -> None:
    run = start("wait_for_worse")
    pids = run.pids()
    os.kill(pids["worker 1"], signal.SIGKILL)
    assert run.wait() == 1
    assert "error: worker 1 ended (killed by SIGKILL) in call 'sleep' of step 1" in run.output()
    assert "going to sleep" in run.output()  # the end of its log
    assert "waiting for it: worker 0" in run.output()
    assert_all_end(pids)


def test_a_killed_supervisor_takes_everything_along(start: Callable[..., Run]) -> None:
    run = start("wait_for_worse")
    pids = run.pids()
    os.kill(pids["supervisor"], signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert_all_end(pids)


@pytest.mark.parametrize("frozen", [("master",), ("worker 0",), ("master", "worker 0", "worker 1", "child")], ids=str)
def test_a_killed_supervisor_takes_frozen_processes_along(start: Callable[..., Run], frozen: tuple[str, ...]) -> None:
    run = start("wait_for_worse")
    pids = run.pids()
    for who in frozen:
        os.kill(pids[who], signal.SIGSTOP)
    os.kill(pids["supervisor"], signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert_all_end(pids)


def test_a_second_signal_ends_a_frozen_run(start: Callable[..., Run]) -> None:
    run = start("wait_for_worse")
    pids = run.pids()
    for who in ("master", "worker 0", "child"):
        os.kill(pids[who], signal.SIGSTOP)
    for _ in range(2):
        os.kill(pids["supervisor"], signal.SIGTERM)
        time.sleep(0.4)
    assert run.wait() == 128 + signal.SIGTERM
    assert_all_end(pids)


@pytest.mark.parametrize(
    ("victim", "signum"),
    [("supervisor", signal.SIGINT), ("supervisor", signal.SIGTERM), ("master", signal.SIGTERM)],
)
def test_a_signal_stops_everything_in_order(start: Callable[..., Run], victim: str, signum: signal.Signals) -> None:
    run = start("wait_for_worse")
    pids = run.pids()
    os.kill(pids[victim], signum)
    assert run.wait() == 128 + signum
    assert f"interrupted by {signum.name}" in run.output()
    assert "Traceback" not in run.output()
    assert_all_end(pids)


def test_ctrl_c_reaches_the_whole_group_and_counts_once(start: Callable[..., Run]) -> None:
    run = start("wait_for_worse")
    pids = run.pids()
    os.kill(pids["worker 0"], signal.SIGINT)  # a worker ignores it
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 130
    assert "interrupted by SIGINT" in run.output()
    assert "Traceback" not in run.output()
    assert_all_end(pids)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_at_once(start: Callable[..., Run], second: signal.Signals) -> None:
    run = start("stubborn")
    pids = run.pids()
    os.kill(pids["supervisor"], signal.SIGINT)
    wait_until((run.run_dir / "interrupted").exists, "the master to hear of it")
    assert run.process.poll() is None
    time.sleep(0.4)  # nobody presses twice within one keypress
    os.kill(pids["supervisor"], second)
    assert run.wait() == 130
    assert "stopped at once after SIGINT" in run.output()
    assert_all_end(pids)


@pytest.mark.parametrize(
    ("call", "host", "exit_code", "expected"),
    [
        (
            "raise",
            "FakeHost",
            2,
            ["realrl: error: the reward is broken", "Mend it."],
        ),
        ("exit", "FakeHost", 1, ["SystemExit", "sys.exit(3)"]),
        ("tensor", "FakeHost", 1, ["TransportError", "a CallDone message cannot be encoded"]),
        ("echo", "broken_host", 1, ["ImportError", "no accelerator library"]),
    ],
)
def test_user_code_that_fails_is_reported(
    start: Callable[..., Run], call: str, host: str, exit_code: int, expected: list[str]
) -> None:
    run = start("failing_calls", run=call, host=host)
    assert run.wait() == exit_code
    assert run.output().startswith("realrl: error: ")
    assert "waiting for it: worker 1 (actor_train)" in run.output()
    assert len(run.output().splitlines()) <= 24
    for text in expected:
        assert text in run.output()


def test_a_bug_in_the_master_is_reported(start: Callable[..., Run]) -> None:
    run = start("buggy")
    assert run.wait() == 1
    assert "realrl itself failed: ZeroDivisionError" in run.output()
    assert "a bug" in (run.run_dir / "logs" / "master.log").read_text()


def test_a_taken_port_is_refused_with_a_remedy(start: Callable[..., Run]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = start("one_of_each", port=port)
        assert run.wait() == 2
    assert f"error: port {port} on 127.0.0.1 is taken by another program" in run.output()
    assert "choose another port" in run.output()
    assert "Traceback" not in run.output()


def test_an_unwritable_run_folder_is_refused(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "run0").write_text("a file where the folder should be")
    run = start("one_of_each")
    assert run.wait() == 2
    assert "cannot write to the run folder" in run.output()

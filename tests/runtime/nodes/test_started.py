"""Agents that a run starts itself, and its end when they are lost. srun is a script here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from realrl.errors import UsageError
from realrl.runtime.nodes.started import SrunAgents
from realrl.sched.nodes.jobs import Allocation
from realrl.sched.nodes.slurm import Loss

REPOSITORY = Path(__file__).parents[3]
ALLOCATION = Allocation("7", ("alpha", "beta"), 2)
_SUPERVISOR = """
import sys
from realrl.runtime.processes.session import SessionStart
from realrl.runtime.processes.recovery import Recover
from realrl.runtime.processes.supervise import run_supervised
from realrl.sched.nodes.slurm import Tasks

class Agents:
    def __init__(self):
        self.tasks = Tasks(2, 2)
    def loss(self):
        return self.tasks.loss()

agents = Agents()
agents.tasks.end(-9)
fake = "tests.runtime.processes.fake_programs:"
start = SessionStart(run=b"", run_dir=sys.argv[1], program=fake + "wait_for_worse", host=fake + "FakeHost")
sys.exit(run_supervised(start, Recover(int(sys.argv[2])), agents=agents))
"""


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], SrunAgents]:
    """A function from what srun does, for the shell, to agents that it has started."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def started(text: str) -> SrunAgents:
        program = tmp_path / "bin" / "srun"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o700)
        return SrunAgents(ALLOCATION, 2, Path("/shared/join.json"), tmp_path / "run" / "logs" / "agents.log")

    return started


def loss_of(agents: SrunAgents) -> Loss:
    deadline_s = time.monotonic() + 60
    while (loss := agents.loss()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return loss


def test_what_srun_and_agents_say_is_logged_and_read(srun: Callable[[str], SrunAgents], tmp_path: Path) -> None:
    agents = srun('echo "$@"; echo "srun: error: beta: task 1: Killed" >&2; exec sleep 60')
    loss = loss_of(agents)
    assert (loss.exit_code, loss.is_total) == (75, False)
    agents.close(patience_s=0.1)
    said = (tmp_path / "run" / "logs" / "agents.log").read_text()
    assert "--nodes=2 --ntasks=2" in said
    assert said.splitlines()[0].endswith("-m realrl node --join /shared/join.json")
    assert "srun: error: beta: task 1: Killed" in said


def test_the_last_words_of_srun_are_told(srun: Callable[[str], SrunAgents]) -> None:
    agents = srun('echo "srun: error: Unable to create step" >&2; exit 1')
    loss = loss_of(agents)
    assert (loss.message, loss.exit_code) == ("srun ended with exit code 1: srun: error: Unable to create step", 1)
    agents.close()


def test_without_srun_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="starts agents by srun, and there is no such program here"):
        SrunAgents(ALLOCATION, 2, tmp_path / "join.json", tmp_path / "agents.log")


@pytest.mark.parametrize("retries", ["0", "2"])
def test_a_run_without_agents_ends_to_be_queued_again(tmp_path: Path, retries: str) -> None:
    command = [sys.executable, "-c", _SUPERVISOR, str(tmp_path / "run"), retries]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=REPOSITORY)
    assert done.returncode == 75, done.stderr
    assert "realrl: error: srun was killed by signal 9\n" in done.stderr
    assert "restart" not in done.stdout + done.stderr

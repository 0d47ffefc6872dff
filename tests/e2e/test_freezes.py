"""Frozen, paused, left by code of the user, or started twice: what ends ends soon, and a pause ends nothing."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.live import LiveRun, wait_until
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, run_ppo

pytestmark = pytest.mark.timeout(400)

TIMEOUT_S = 8.0  # long enough for a worker to start on a busy machine
SHORT = (f"cluster.worker_timeout_s={TIMEOUT_S:g}", "steps=6")


@pytest.mark.slow
def test_a_run_goes_on_after_a_frozen_master(start: Callable[..., LiveRun]) -> None:
    run = start(*SHORT, "recover.retries=1")
    run.wait_for("step")
    os.kill(run.pid("master"), signal.SIGSTOP)
    assert run.end(n_attempts=2) == 0, run.output + run.errors
    assert "warning: the master process (" in run.errors
    assert ") gave no sign of life for 13 s and was killed" in run.errors
    assert "restart 1 of 1: the master process gave no sign of life for 13 s; going on from the " in run.output
    assert [row["step"] for row in read_metrics(run.run_dir)] == list(range(1, 7))


@pytest.mark.slow
def test_a_run_goes_on_after_a_frozen_worker(start: Callable[..., LiveRun]) -> None:
    run = start(*SHORT, "recover.retries=1")
    run.wait_for("step")
    os.kill(run.pid("worker 1"), signal.SIGSTOP)
    assert run.end(n_attempts=2) == 0, run.output + run.errors
    assert "restart 1 of 1: worker 1 gave no sign of life for " in run.output
    assert [row["step"] for row in read_metrics(run.run_dir)] == list(range(1, 7))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "how", "allocation"),
    [
        ("step", "all", "split"),
        ("step", "all", "t2"),  # which is in a collective most of the time
        ("start", "all", "split"),
        ("step", "Ctrl-Z", "split"),
        ("step", "job", "t2"),
    ],
)
def test_a_pause_is_no_death(
    start: Callable[..., LiveRun], tmp_path: Path, moment: str, how: str, allocation: str
) -> None:
    """Longer than any silence may be: all processes, by Ctrl-Z, or those of the shell's job only."""
    run = start(*SHORT, f"allocation={allocation}")  # without restarts
    run.wait_for(moment)
    everybody, cli = run.processes(), run.pid("cli")
    for order in (signal.SIGSTOP, signal.SIGCONT):
        if how == "Ctrl-Z":
            os.killpg(cli, signal.SIGTSTP if order == signal.SIGSTOP else order)
        elif how == "job":
            os.killpg(cli, order)
        else:
            for pid in everybody:
                os.kill(pid, order)
        time.sleep(2 * TIMEOUT_S)
    assert run.end() == 0, run.output + run.errors
    assert run.errors == ""
    assert "restart" not in run.output
    quiet = run_ppo(tmp_path / "quiet", "steps=6", "cluster.n_devices_per_node=2", f"allocation={allocation}")
    assert_same_numbers(read_metrics(run.run_dir), quiet, rel=0.0, floor=0.0)


def can_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.mark.slow
def test_the_folder_stays_locked_until_the_master_has_ended(start: Callable[..., LiveRun]) -> None:
    run = start()
    run.wait_for("step")
    os.kill(run.pid("worker 1"), signal.SIGSTOP)  # which takes its master two seconds to end
    os.kill(run.pid("cli"), signal.SIGKILL)
    run.process.wait()
    with (run.run_dir / ".lock").open() as lock:
        assert not can_lock(lock.fileno())
        run.end()
        wait_until(lambda: can_lock(lock.fileno()), "the lock")


LEAVING = """
import dataclasses
import os
import re

from realrl.algo.policy.critic import PPOCritic
from realrl.experiment.registry import register_interface
from realrl.experiment.discovery import load_experiment
from realrl.graph.mfc import InterfaceRef


@register_interface("leaving_critic")
class LeavingCritic(PPOCritic):
    def inference(self, model, batch, ctx):
        {statement}


def mfcs(config):
    return [
        dataclasses.replace(mfc, interface_impl=InterfaceRef("leaving_critic")) if mfc.role == "critic" else mfc
        for mfc in PPO.mfcs(config)
    ]


PPO = load_experiment("ppo")
EXPERIMENT = dataclasses.replace(PPO, name="leaving", mfcs=mfcs)
"""


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        # the reply to the call before may be lost with the process, and then the error names that call
        ("os._exit(3)", r"error: worker 1 ended \(exited with code 3\) in call '(rew|critic)_inf' of step 1"),
        pytest.param("os._exit(0)", r"worker 1 ended \(exited with code 0\)", marks=pytest.mark.slow),
        pytest.param("raise KeyboardInterrupt", "of step 1: KeyboardInterrupt", marks=pytest.mark.slow),
        pytest.param("raise SystemExit(3)", "of step 1: SystemExit: 3", marks=pytest.mark.slow),
        pytest.param("raise type('Odd', (BaseException,), {})", "exited with code 1", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_exit_that_would_come_again_is_not_tried_again(
    start: Callable[..., LiveRun], tmp_path: Path, statement: str, told: str
) -> None:
    file = tmp_path / "leaving.py"
    file.write_text(LEAVING.format(statement=statement))
    overrides = ("algorithm.reward_function=realrl.data.tiny:toy_reward", "recover.retries=9")
    run = start(*overrides, experiment=str(file))
    assert run.end() == 1
    assert re.search(told, run.errors)
    assert "restart" not in run.output


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["never", "auto"])
def test_of_two_starts_at_once_one_is_refused(tmp_path: Path, resume: str) -> None:
    start_twice(tmp_path, resume)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("attempt", range(20))
def test_of_two_starts_at_once_one_is_always_refused(tmp_path: Path, attempt: int) -> None:
    start_twice(tmp_path, "auto" if attempt % 2 else "never")


def start_twice(folder: Path, resume: str) -> None:
    """Start the same command twice at the same moment: one run does all its steps, the other one does nothing."""
    overrides = ("steps=2", "launcher=inline", f"run_dir={folder / 'run'}", f"resume={resume}", "save.every_steps=1")
    command = [sys.executable, "-m", "realrl", "run", "ppo", *SMALL, *overrides]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [run.communicate(timeout=180) for run in runs]
    finally:
        for run in runs:
            run.kill()
    by_code = {run.returncode: (run.pid, *output) for run, output in zip(runs, outputs, strict=True)}
    assert set(by_code) == {0, 2}, outputs
    winner, refused = by_code[0][0], by_code[2][2]
    is_late = "holds the results of an earlier run" in refused or "step is left to do" in refused
    assert is_late or f"another run is going on in run_dir={folder / 'run'}: process {winner}" in refused
    assert [row["step"] for row in read_metrics(folder / "run")] == [1, 2]
    assert (folder / "run" / "checkpoints" / "latest").resolve().name == "step_2"
    assert not (folder / "run" / ".lock").exists()

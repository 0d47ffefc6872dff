"""A run in processes of its own: wait for its moments, hurt it, check that no process stays behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from realrl.runtime.processes.lifeline import find_leftovers
from tests.helpers.runs import SMALL

LIMIT_S = 90.0  # several times what a busy two-core machine needs
TWO_WORKERS = ("cluster.n_devices_per_node=2", "allocation=split")
_MARK = "REALRL_TEST_MARK"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll `condition`; fails after `LIMIT_S`."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {LIMIT_S:.0f} s for {what}"
        time.sleep(0.005)


class LiveRun:
    """``realrl run`` of PPO with two workers and a checkpoint after every step, without end and without restarts."""

    def __init__(self, folder: Path, *overrides: str, experiment: str = "ppo") -> None:
        self.run_dir = folder / "run"
        self._output, self._errors = folder / "stdout.txt", folder / "stderr.txt"
        self._mark = secrets.token_hex(8)
        command = [sys.executable, "-m", "realrl", "run", experiment, *SMALL, *TWO_WORKERS]
        command += [f"run_dir={self.run_dir}"]
        command += ["steps=100000", "save.every_steps=1", "recover.retries=0", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", _MARK: self._mark}
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=errors, env=environment, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def wait_for(self, moment: str) -> None:
        """Wait for "start" (a worker is up), "step" (the first one is done) or "saving" (a later checkpoint begins)."""
        reached: dict[str, Callable[[], bool]] = {
            "start": lambda: "is up" in self.output,
            "step": lambda: "step 1/" in self.output,
            "saving": lambda: (self.checkpoints / "step_1").exists() and any(self.checkpoints.glob(".step_*")),
        }
        wait_until(lambda: reached[moment]() or self.process.poll() is not None, moment)
        assert self.process.poll() is None, self.output + self.errors

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def pid(self, who: str) -> int:
        """Process id of "cli", "master" or "worker R"."""
        if who == "cli":
            return self.process.pid
        arguments = f"worker\0--rank\0{who.split()[1]}\0" if who.startswith("worker") else "master\0"
        found: list[int] = []

        def find() -> bool:
            found[:] = [pid for pid in self.processes() if arguments in _command_line(pid)]
            return bool(found) or self.process.poll() is not None

        wait_until(find, who)
        return found[0]

    def processes(self) -> list[int]:
        """Ids of all living processes of this run, whoever started them."""
        return find_leftovers(_MARK, self._mark)

    def end(self, n_attempts: int = 1) -> int:
        """Wait for the exit code, and until no process is left."""
        exit_code = self.process.wait(n_attempts * LIMIT_S)
        wait_until(lambda: not self.processes(), "the run's processes to end")
        return exit_code

    def clean_up(self) -> None:
        """Kill all processes that a failed test left."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""

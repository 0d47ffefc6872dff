"""Agents that a run starts by itself: one on each machine of a SLURM job, by srun; or one here, as part of a job."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Protocol

from realrl.errors import RunError, UsageError
from realrl.files import open_output
from realrl.runtime.nodes.key import KEY_VARIABLE
from realrl.sched.nodes.jobs import Allocation
from realrl.sched.nodes.slurm import Loss, Tasks, srun_words

AGENTS_LOG = "agents.log"
_AGENT = (sys.executable, "-P", "-m", "realrl", "node")
_PATIENCE_S = 10.0  # after the end of the run
_HARD_PATIENCE_S = 5.0


class StartedAgents(Protocol):
    """Agents whose ends the supervisor of a run looks at."""

    def loss(self) -> Loss | None:
        """The loss for which the run cannot go on, if there is one."""


class SrunAgents:
    """An agent on each machine of an allocation, by one srun in a process group of its own.

    Args:
        n_needed: machines without which the run cannot go on.
        join: the file by which agents join.
        log: file of what srun and the agents write.

    Raises:
        UsageError: there is no srun.
    """

    def __init__(self, allocation: Allocation, n_needed: int, join: Path, log: Path) -> None:
        check_srun()
        self._tasks = Tasks(len(allocation.hosts), n_needed)
        self._log = _opened(log)
        # Where tasks are bound to cores was decided for the step that this process is in, if it is in one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_CPU_BIND")}
        words = [*srun_words(allocation), *_AGENT, "--join", str(join)]
        self._process = _spawn(words, environment, stdin=subprocess.DEVNULL, output=self._log, errors=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, name="srun", daemon=True)
        self._reader.start()

    def loss(self) -> Loss | None:
        if self._process.poll() is not None:
            self._reader.join(1.0)  # its last words; a task that outlives it may hold the pipe
            self._tasks.end(self._process.returncode)
        return self._tasks.loss()

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait for the agents, which end with the run, or end them."""
        _end(self._process, patience_s)
        self._reader.join(1.0)
        self._log.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            for line in errors:
                with contextlib.suppress(OSError, ValueError):  # a full disk; closed
                    self._log.write(line)
                self._tasks.hear(line.decode(errors="replace").rstrip())


class OwnAgent:
    """The agent of this machine, where every machine of a job runs the same command. It ends with this process.

    Args:
        place: where it joins, ``HOST:PORT``.
        log: file of what it writes.
    """

    def __init__(self, place: str, key: bytes, log: Path) -> None:
        self._log = _opened(log)
        environment = {**os.environ, KEY_VARIABLE: key.hex()}  # which it takes out at once
        words = [*_AGENT, place, "--with-parent"]
        self._process = _spawn(words, environment, stdin=subprocess.PIPE, output=self._log, errors=self._log)

    def loss(self) -> Loss | None:
        exit_code = self._process.poll()
        if exit_code is None:
            return None
        remedy = f"It has told why, in {AGENTS_LOG} among the logs."
        code = 2 if exit_code == UsageError.exit_code else 75
        return Loss(f"the agent of this machine ended with exit code {exit_code}", remedy, code, is_total=False)

    def close(self) -> None:
        """Wait for the agent, which ends with the run, or end it."""
        _end(self._process, _PATIENCE_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()


def check_srun() -> None:
    """Raise `UsageError` if there is no srun."""
    if shutil.which("srun") is None:
        raise UsageError(
            "launcher=slurm starts agents by srun, and there is no such program here",
            remedy="Start this on a machine of the cluster; or take launcher=external, and start `realrl node` on each "
            "machine in another way.",
        )


def _opened(log: Path) -> IO[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    return open_output(log, append=True)


def _spawn(
    words: list[str], environment: dict[str, str], *, stdin: int, output: IO[bytes], errors: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(words, stdin=stdin, stdout=output, stderr=errors, env=environment, process_group=0)
    except OSError as error:
        raise RunError(f"cannot start {words[0]}: {error.strerror}") from error


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_HARD_PATIENCE_S)
    if process.poll() is None:
        process.kill()
        process.wait()

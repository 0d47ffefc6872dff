"""Workers as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from realrl.errors import RunError
from realrl.files import open_output
from realrl.runtime.launchers.base import WorkerEnd, threads_per_worker
from realrl.runtime.output.logs import log_path
from realrl.runtime.processes.lifeline import RUN_ID, WORKERS_OF, framed, kill_leftovers, write_lease

STACK_SIGNAL = signal.SIGUSR1
DEFAULT_HOST = "realrl.runtime.worker.model_worker:ModelWorker"


class LocalLauncher:
    """Starts ``python -m realrl.runtime.processes.main worker`` once per worker of this machine.

    Each worker leads its own process group, so a Ctrl-C on the terminal does not reach it and its children end with
    it. Its stdout and stderr go to its log; its stdin is the lifeline by which it notices that the master is gone.

    Args:
        run_dir: folder of the run; logs go below it.
        run_id: id of the run, carried in the environment of all its processes.
        host: dotted path ``package.module:factory`` of a worker's host.
        environments: further environment variables of each worker; none where it is empty.
        first_rank: global rank of the first worker.
        directory: working directory of the workers; None is this process's own.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        *,
        host: str = DEFAULT_HOST,
        environments: Sequence[Mapping[str, str]] = (),
        first_rank: int = 0,
        directory: str | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._host = host
        self._environments = environments
        self._first_rank = first_rank
        self._directory = directory
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._reported: set[int] = set()

    def start(self, n_workers: int, admission: bytes) -> None:
        threads = str(threads_per_worker(n_workers))
        variables = {"OMP_NUM_THREADS": threads, **os.environ}
        variables |= {RUN_ID: self._run_id, WORKERS_OF: self._run_id, "PYTHONUNBUFFERED": "1"}
        for rank in range(self._first_rank, self._first_rank + n_workers):
            own = self._environments[rank - self._first_rank] if self._environments else {}
            self._processes[rank] = self._spawn(rank, {**variables, **own})
            self._admit(rank, admission)

    def poll(self) -> list[WorkerEnd]:
        ended = []
        for rank, process in self._processes.items():
            exit_code = process.poll()
            if exit_code is not None and rank not in self._reported:
                self._reported.add(rank)
                ended.append(WorkerEnd(rank, exit_code))
        return ended

    def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        if self._processes:
            kill_leftovers(WORKERS_OF, self._run_id)

    def dump_stack(self, rank: int) -> None:
        process = self._processes[rank]
        if process.poll() is None:
            process.send_signal(STACK_SIGNAL)

    def log_path(self, rank: int) -> Path | None:
        return log_path(self._run_dir, rank)

    def machine(self, rank: int) -> str:
        return ""

    def clock_offset_s(self, rank: int) -> float:
        return 0.0

    def renew(self, end_s: float) -> None:
        """Let workers that were admitted with a lease live until then, on the clock of leases."""
        for process in self._processes.values():
            if process.stdin is not None and not process.stdin.closed:
                os.set_blocking(process.stdin.fileno(), False)
                write_lease(process.stdin.fileno(), end_s)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def _spawn(self, rank: int, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        path = log_path(self._run_dir, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "realrl.runtime.processes.main", "worker"]
        command += ["--rank", str(rank), "--host", self._host]
        # Signals that arrive before the child can handle them wait until it can.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            with open_output(path, append=True) as log:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=dict(variables),
                    cwd=self._directory,
                    process_group=0,
                )
        except OSError as error:
            raise RunError(
                f"cannot start the process of worker {rank}: {error}",
                remedy="The limit on processes (`ulimit -u`) or open files (`ulimit -n`) may be too low.",
                worker=rank,
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _admit(self, rank: int, admission: bytes) -> None:
        """Send a worker its admission; the pipe stays open as its lifeline."""
        stdin = self._processes[rank].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # dead already, as `poll` will tell
            os.write(stdin.fileno(), framed(admission))

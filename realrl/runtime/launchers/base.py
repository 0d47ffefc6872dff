"""The protocol of launchers, which start and end workers for the master."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple, Protocol


class WorkerEnd(NamedTuple):
    """A worker that ended.

    Attributes:
        exit_code: negative ones are signals; None if it was lost with its machine.
        detail: what is known beside the exit code, in words, or "".
    """

    rank: int
    exit_code: int | None
    detail: str = ""


class Launcher(Protocol):
    """Starts, watches and ends worker processes."""

    def start(self, n_workers: int, admission: bytes) -> None:
        """Start workers 0 .. n_workers - 1, which connect to the master.

        Args:
            admission: the run's addresses and keys, for each worker and nobody else to read.
        """

    def poll(self) -> list[WorkerEnd]:
        """The workers that ended since the last call."""

    def stop(self) -> None:
        """End all workers at once; reaps everything. May be called twice."""

    def dump_stack(self, rank: int) -> None:
        """Make worker `rank` write the stacks of its threads to its log, if it can still be reached.

        Only for a worker that is given up: faulthandler may crash it, because it reads stacks while they change.
        """

    def log_path(self, rank: int) -> Path | None:
        """Log file of worker `rank`; None if it cannot be read from here."""

    def machine(self, rank: int) -> str:
        """Name of the machine of worker `rank`; "" if it is the master's."""

    def clock_offset_s(self, rank: int) -> float:
        """Seconds by which the master's wall clock is ahead of that of worker `rank`'s machine."""


def available_cores() -> int:
    """Cores that this process may use: its affinity mask, and a container's CPU quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def threads_per_worker(n_workers: int) -> int:
    """Compute threads for each of `n_workers` that share this node."""
    return max(1, available_cores() // n_workers)

"""Other work on this machine, and how long processes of a run wait for a core. Where Linux's /proc is missing: none.

A thread of OpenMP that waits for others keeps its core for a while, as they come soon. On a core that others want, too,
those it waits for do not come meanwhile: it has spent its share when they do, and a step takes many times as long. Even
where it sleeps, each piece of work takes as long as the thread that gets its core last. One thread waits for nobody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables by which a user decides how threads wait."""

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Environment variable of the number of compute threads of a worker."""

_SLEEPING = "threads of workers sleep while they wait for each other"
_MUCH = 0.25  # share of the cores
_PAUSE_S, _LASTING_S = 0.2, 0.5
_IDLE_COLUMNS = 3, 4  # of /proc/stat: idle, and waiting for a disk
_N_COLUMNS = 8  # up to what a host of virtual machines takes; guests are counted among users
_Path = str | os.PathLike[str]


def cores_of_others(pause_s: float = _PAUSE_S, *, proc: _Path = "/proc") -> float:
    """Return how many cores others take now: processes, and the host of a virtual machine.

    It takes no time while nothing else runs.
    """
    try:
        if int(Path(proc, "loadavg").read_text().split()[3].partition("/")[0]) <= 1:
            return 0.0
        (before, own), begin_s = (_busy_s(proc), time.process_time()), time.monotonic()
        time.sleep(pause_s)
        took_s = time.monotonic() - begin_s
        return max(0.0, (_busy_s(proc) - before - (time.process_time() - own)) / took_s)
    except (OSError, ValueError, IndexError):
        return 0.0


def _busy_s(proc: _Path) -> float:
    """Return the seconds that all cores together were busy since the machine started."""
    columns = [int(word) for word in Path(proc, "stat").read_text().split("\n")[0].split()[1 : 1 + _N_COLUMNS]]
    return (sum(columns) - sum(columns[i] for i in _IDLE_COLUMNS)) / os.sysconf("SC_CLK_TCK")


def is_crowded(n_busy: float, n_cores: int) -> bool:
    """Return True if so many cores, of all, are too many for threads that keep theirs while they wait."""
    return n_busy > _MUCH * n_cores


def waiting_variables(n_busy: float, n_cores: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make threads sleep while they wait, if others need the cores.

    On an idle machine sleeping would cost: small models have thousands of short parallel pieces of work a second.

    Args:
        n_busy: cores that others take.
        environment: the user's; what it says about waiting stays.
    """
    if not is_crowded(n_busy, n_cores) or any(name in environment for name in WAIT_VARIABLES):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def threads_beside(n_busy: float, n_cores: int, n_workers: int) -> int:
    """Return the compute threads of each worker that find a core of their own where others take so many."""
    n_free = n_cores - round(n_busy) if is_crowded(n_busy, n_cores) else n_cores
    return max(1, n_free // n_workers)


@dataclass(frozen=True)
class CoreShare:
    """Part of a machine's cores that the workers of a run take.

    Attributes:
        n_threads: compute threads of each worker; 0 if the user's environment says it in words of its own.
        variables: environment variables of each worker that make it so.
        notes: messages to the user.
    """

    n_threads: int
    variables: dict[str, str]
    notes: tuple[str, ...] = ()


def share_cores(
    n_busy: float, n_cores: int, n_workers: int, environment: Mapping[str, str], *, n_before: int | None = None
) -> CoreShare:
    """Choose how many threads workers have, and how these wait.

    Args:
        n_busy: cores that others take.
        environment: the user's; what it says stays.
        n_before: threads of a worker in the steps before these, which round sums in their way; 0 as many as fit. None
            where there are none.
    """
    usual, given = threads_beside(0.0, n_cores, n_workers), environment.get(THREADS_VARIABLE)
    if given is not None:
        n_threads = int(given) if given.isdecimal() else 0
    elif n_before is not None:
        n_threads = min(n_before or usual, usual)
    else:
        n_threads = threads_beside(n_busy, n_cores, n_workers)
    waiting = {} if n_threads == 1 else waiting_variables(n_busy, n_cores, environment)
    told = [_SLEEPING] if waiting else []
    if given is None and n_threads < usual:
        reason = "as in the steps before" if n_before else "by which sums may be rounded otherwise"
        told.append(f"{THREADS_VARIABLE} of each worker is {n_threads} instead of {usual}, {reason}")
    variables = waiting if given is not None else {**waiting, THREADS_VARIABLE: str(n_threads)}
    found = _of_others(n_busy, n_cores) if is_crowded(n_busy, n_cores) else ""
    return CoreShare(n_threads, variables, (found + "; ".join(told),) if told else ())


def _of_others(n_busy: float, n_cores: int) -> str:
    return f"other work takes {n_busy:.1f} of {n_cores} cores: "


def waiting_now(n_cores: int, environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Look at the machine; return its `waiting_variables`, and a note to the user if there are any."""
    n_busy = cores_of_others()
    found = waiting_variables(n_busy, n_cores, environment)
    return found, (_of_others(n_busy, n_cores) + _SLEEPING,) if found else ()


def lasting_cores_of_others(n_cores: int) -> float:
    """Return `cores_of_others`; work that is over within a moment does not count."""
    n_busy = cores_of_others()
    return min(n_busy, cores_of_others(_LASTING_S)) if is_crowded(n_busy, n_cores) else n_busy


class CoreWaits:
    """Time for which processes could have computed, but had no core."""

    def __init__(self, *, proc: _Path = "/proc") -> None:
        self._proc = proc
        self._last: dict[int, float] = {}
        self._last_s = time.monotonic()
        self._total_s = self._waited_s = 0.0

    def since_last(self, pids: Iterable[int]) -> float | None:
        """Return the share of the time since the last call, in the mean over processes; None if nobody knows.

        A process counts from the second call on in which it is there; of its threads the first one counts.
        """
        now_s, found = time.monotonic(), dict[int, float]()
        for pid in pids:
            try:
                found[pid] = int(Path(self._proc, str(pid), "schedstat").read_text().split()[1]) / 1e9
            except (OSError, ValueError, IndexError):  # it has ended, or the kernel does not count
                continue
        took_s, self._last_s = now_s - self._last_s, now_s
        waited = [found[pid] - self._last[pid] for pid in found if pid in self._last]
        self._last = found
        if not waited or took_s <= 0.0:
            return None
        self._total_s += took_s
        self._waited_s += sum(waited) / len(waited)
        return min(1.0, sum(waited) / len(waited) / took_s)

    @property
    def share(self) -> float:
        """Share of all the time that was looked at."""
        return self._waited_s / self._total_s if self._total_s else 0.0

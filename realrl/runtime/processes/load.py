"""Other work on this machine, and how long processes of a run wait for a core. Where Linux's /proc is missing: none.

A thread of OpenMP that waits for others keeps its core for a while, as they come soon. On a core that others want, too,
those it waits for do not come meanwhile: it has spent its share when they do, and a step takes many times as long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables by which a user decides how threads wait."""

_MUCH = 0.25  # share of the cores
_PAUSE_S = 0.2
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


def waiting_now(n_cores: int, environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Look at the machine; return its `waiting_variables`, and a note to the user if there are any."""
    n_busy = cores_of_others()
    found = waiting_variables(n_busy, n_cores, environment)
    told = f"other work takes {n_busy:.1f} of {n_cores} cores: threads of workers sleep while they wait for each other"
    return found, (told,) if found else ()


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

"""Lifelines, by which a child process ends with its parent, and the search for leftovers of a run.

A child's stdin is a pipe or socket whose other end only the parent holds: end of file means that the parent is gone, on
every system. The first message down it is for the child alone: every user may read command lines, and children of user
code would inherit an environment. On Linux the kernel also signals the child when its parent dies. A worker is killed
by that, even if it is stopped or stuck in native code. A master that is stopped goes on, reads the end of file and ends
the run in order. A worker that an agent has started has a lease as well: down its lifeline come times until which it
may live, so that it ends when the master is out of reach, also if the agent is stopped. Every process of a run carries
the run's id in its environment (`RUN_ID`, below a worker also `WORKERS_OF`). By that id `kill_leftovers` finds
processes that neither reached, such as children of a killed worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import select
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

RUN_ID = "REALRL_RUN_ID"
WORKERS_OF = "REALRL_WORKERS_OF"
_PR_SET_PDEATHSIG = 1
_LEASE = struct.Struct("=d")
_LEFTOVER_PATIENCE_S = 5.0
_MAX_FOLDER_LENGTH = 80  # the system's limit on a socket's path is about 100

_log = logging.getLogger(__name__)


def take_stdin() -> int:
    """Return stdin, the lifeline, as a private descriptor and give the process an empty stdin.

    User code that reads stdin (a breakpoint, ``input()``) then meets its end instead of waiting on the lifeline.
    """
    lifeline = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return lifeline


def framed(message: bytes) -> bytes:
    """Put its length before a message that goes down a lifeline."""
    return len(message).to_bytes(8, "big") + message


def read_framed(lifeline: int) -> bytes:
    """Read one message from a lifeline; ends the process if the parent is gone."""
    return _read_exactly(lifeline, int.from_bytes(_read_exactly(lifeline, 8), "big"))


def _read_exactly(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            sys.exit("the start message of this process ended early: its parent is gone")
        data += chunk
    return data


def lease_clock() -> float:
    """Seconds on the clock of leases, which goes on while the machine is suspended, where the system has such a one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def write_lease(lifeline: int, end_s: float) -> None:
    """Tell a process by its lifeline, which must not block, until when it may live."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it is stopped, or gone
        os.write(lifeline, _LEASE.pack(end_s))


def die_with_parent(
    lifeline: int, *, death_signal: signal.Signals, on_parent_gone: Callable[[], None], lease_end_s: float = 0.0
) -> None:
    """Call `on_parent_gone` in a thread when `lifeline` ends; on Linux the kernel sends `death_signal` as well.

    The parent is the thread that started this process: it must live as long as its process.

    Args:
        lease_end_s: time on the clock of leases at which the parent counts as gone, unless `write_lease` has told a
            later one by then; 0 means never.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)

    def watch() -> None:
        with contextlib.suppress(ConnectionResetError):  # a socket's end, if the parent left something unread
            end_s = lease_end_s or math.inf
            while (told := _read_until(lifeline, end_s)) is not None:
                if lease_end_s:
                    end_s = max(end_s, *(time_s for (time_s,) in _LEASE.iter_unpack(told)))
        on_parent_gone()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _read_until(lifeline: int, end_s: float) -> bytes | None:
    """Read what comes down the lifeline; None at its end, or when the time is over."""
    waiting = select.poll()
    waiting.register(lifeline, select.POLLIN)
    while True:
        # The time is read before the look: a later end that came while this thread had no turn counts.
        left_s = end_s - lease_clock()
        if waiting.poll(None if math.isinf(end_s) else min(1000.0, max(0.0, left_s) * 1000)):
            return os.read(lifeline, 4096) or None
        if left_s <= 0.0:
            _log.error("the lease of this process is over: its machine hears nothing of the master")
            return None


def kill_leftovers(mark: str, run_id: str) -> list[int]:
    """Kill every process but this one whose environment says ``mark=run_id``; returns their pids.

    Does nothing outside Linux.
    """
    killed: list[int] = []
    deadline_s = time.monotonic() + _LEFTOVER_PATIENCE_S
    while (pids := find_leftovers(mark, run_id)) and time.monotonic() < deadline_s:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            if pid not in killed:
                killed.append(pid)
        time.sleep(0.01)
    if killed:
        _log.info("killed leftover processes of the run: %s", killed)
    return killed


def socket_folder(run_id: str) -> Path:
    """Folder of a run's sockets: among the temporary files, as far as the length of their paths allows."""
    folder = Path(tempfile.gettempdir(), f"realrl-{run_id}")
    return folder if len(os.fsencode(folder)) <= _MAX_FOLDER_LENGTH else Path("/tmp", folder.name)


def find_leftovers(mark: str, run_id: str) -> list[int]:
    """Pids of living processes other than this one whose environment says ``mark=run_id`` (Linux)."""
    wanted = f"{mark}={run_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()  # empty for a zombie
        except OSError:  # ended meanwhile, or another user's
            continue
        if wanted in environment.split(b"\0") and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found

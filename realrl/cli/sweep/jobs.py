"""Runs of a sweep as processes: so many at a time, their ends, and the signals of the user.

sweep ── realrl run, run_dir=.../seed=1 ──► console.log
  │ └─── realrl run, run_dir=.../seed=2 ──► console.log
  └ Ctrl-C, SIGTERM, SIGHUP, Ctrl-Z: passed on; after the first nothing new is started, a second one stops at once
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from realrl.errors import RunError
from realrl.files import open_output

CONSOLE_FILE = "console.log"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1
_SAME_KEYPRESS_S = 0.3  # a wrapper may pass on the Ctrl-C that the terminal has delivered already


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        number: place in the sweep, from 0.
        words: arguments of ``realrl``.
        folder: gets what the run prints.
    """

    number: int
    words: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class JobEnded:
    """A run is over; a negative exit code is a signal."""

    job: Job
    exit_code: int
    seconds: float


class Jobs:
    """Runs jobs, each in a slot of its own.

    Args:
        slots: environment variables of each of the runs that go on at the same time, beside those that all inherit.
    """

    def __init__(self, slots: Sequence[Mapping[str, str]]) -> None:
        self.received: int | None = None  # the first signal
        self._received_at_s = 0.0
        self._slots = slots
        self._running: dict[int, tuple[Job, subprocess.Popen[bytes], float]] = {}  # by slot

    def run(self, jobs: Sequence[Job]) -> Iterator[Job | JobEnded]:
        """Yield each job when it starts, and its end.

        Must be called from the main thread: it handles signals until it returns.

        Raises:
            RunError: a process cannot be started.
        """
        handled = [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup
        previous = {signum: signal.signal(signum, self._on_signal) for signum in handled}
        previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_stop)
        try:
            waiting = list(jobs)
            while self._running or (waiting and self.received is None):
                free = [slot for slot in range(len(self._slots)) if slot not in self._running]
                if free and waiting and self.received is None:
                    job = waiting.pop(0)
                    self._running[free[0]] = (job, self._start(job, self._slots[free[0]]), time.monotonic())
                    if self.received is not None:  # while it was started
                        self._pass_on(self.received)
                    yield job
                    continue
                time.sleep(_LOOK_S)
                for slot, (job, process, start_s) in list(self._running.items()):
                    if process.poll() is not None:
                        del self._running[slot]
                        yield JobEnded(job, process.returncode, time.monotonic() - start_s)
        finally:
            for _, process, _ in self._running.values():  # only when an exception ended the loop
                process.terminate()
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _start(self, job: Job, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        job.folder.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-P", "-m", "realrl", *job.words]
        try:
            with open_output(job.folder / CONSOLE_FILE, append=True) as log:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **variables},
                    process_group=0,
                    preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                )
        except OSError as error:
            raise RunError(f"cannot start 'realrl {' '.join(job.words[:2])}': {error}") from error

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.received is None:
            self.received, self._received_at_s = signum, now_s
        elif now_s - self._received_at_s <= _SAME_KEYPRESS_S:
            return
        self._pass_on(signum)

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        self._pass_on(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._pass_on(signal.SIGCONT)

    def _pass_on(self, signum: int) -> None:
        for _, process, _ in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)


def _end_with_parent() -> None:
    """Let the kernel end this run in order when the sweep is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)

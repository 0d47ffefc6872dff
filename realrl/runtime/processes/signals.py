"""Signals by which the user ends a run, as the master takes them: at once, or after the step under way.

    SIGINT, SIGTERM, SIGHUP ─ before the first step, or a run that is not saved ──► SignalReceived
                            └ later ─► received: the master's loop finishes and saves the step ─ once more, inline ──┘

A master process has a supervisor, which kills it at the second signal. A terminal, a wrapper or a job scheduler may
signal both of them, so the master itself counts no repetitions. Without a supervisor (``launcher=inline``) it does.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from types import FrameType

from realrl.errors import MachinesError

ORPHANED = signal.SIGUSR2  # the supervisor is gone: nobody waits for the step
SAME_KEYPRESS_S = 0.3  # a wrapper may pass on the Ctrl-C that the terminal has delivered already


class SignalReceived(BaseException):
    """A signal asked the master to stop in order; raised once, in the main thread.

    Not an `Exception`, so that no handler of ordinary errors swallows it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The shell's convention: 130 for Ctrl-C."""
        return 128 + self.signum


def interrupted_exit_code(signum: int, *, is_on_machines: bool) -> int:
    """Return the exit code of a run that a signal ended: 130 for Ctrl-C, as shells have it.

    On machines of a job scheduler SIGTERM and SIGUSR1 mean that it wants them back: the job may be queued again.
    """
    is_preempted = is_on_machines and signum in (signal.SIGTERM, signal.SIGUSR1)
    return MachinesError.exit_code if is_preempted else 128 + signum


def ignore_from_now_on() -> None:
    """Ignore the signals that end a run until this process has exited.

    The interpreter gives a handler of Python's up while it shuts down: a signal that the supervisor passes on at that
    moment would kill a process that has ended the run in order.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, ORPHANED):
        signal.signal(signum, signal.SIG_IGN)


@dataclass
class Signals:
    """The signals of one session.

    Attributes:
        counts: a second signal, later than `SAME_KEYPRESS_S` after the first, raises.
        received: the first signal that did not raise; None before it.
    """

    counts: bool = True
    received: int | None = None
    _waits: bool = field(default=False, repr=False)
    _received_at_s: float = field(default=0.0, repr=False)
    _is_over: bool = field(default=False, repr=False)

    def catch(self) -> None:
        """Handle signals from now on, those that were held back while the process started included.

        Raises:
            SignalReceived: here, or wherever the main thread is when the signal comes.
        """
        signals = [signal.SIGINT, signal.SIGTERM, ORPHANED]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            signals.append(signal.SIGHUP)
        for signum in signals:
            signal.signal(signum, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def wait_for_step(self) -> None:
        """Keep the next signal in `received` instead of raising it."""
        self._waits = True

    def note(self, name: str) -> None:
        """Take a signal that came to another machine of the run as one to this process."""
        self._on_signal(signal.Signals[name], None)

    def ignore(self) -> None:
        """Ignore signals from now on: shutdown is under way."""
        self._is_over = True

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._is_over:
            return
        if signum == ORPHANED:
            self._raise(signal.SIGTERM)
        if self.received is None and self._waits:
            self.received, self._received_at_s = signum, now_s
        elif self.received is None or (self.counts and now_s - self._received_at_s > SAME_KEYPRESS_S):
            self._raise(signum)

    def _raise(self, signum: int) -> None:
        self.ignore()
        raise SignalReceived(signum)

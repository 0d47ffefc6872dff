"""Whether a run that ended is started again: a pure state machine over its attempts.

attempt ──ended well, by the user, or by an error that would come again──► over
   ▲   └──a process was lost, retries are left, and it is not where one was lost before──┐
   └──────────────────────────────────── Restart ◄──────────────────────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from realrl.errors import TransportError
from realrl.sched.events import Failure, FailureKind

_LOST = (FailureKind.WORKER_LOST, FailureKind.WORKER_SILENT)


class AttemptEnded(msgspec.Struct, frozen=True):
    """The master process is gone.

    Attributes:
        exit_code: of the master; a negative one is the signal that killed it.
        failure: what it said last; None if it said nothing.
        step: the last step that it reported.
        is_interrupted: the user asked for the end.
    """

    exit_code: int
    failure: Failure | None
    step: int
    is_interrupted: bool = False


@dataclass(frozen=True)
class Restart:
    """Start again from the newest checkpoint.

    Attributes:
        number: of the restart, from 1.
        lost: what happened, to follow "restart 1 of 2: ".
    """

    number: int
    lost: str


@dataclass(frozen=True)
class GiveUp:
    """The run is over; `why` is to be told, if not empty."""

    why: str = ""


class Recovery:
    """Decides after each attempt.

    Args:
        retries: restarts at most.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._n_restarts = 0
        self._known: set[tuple[str, str | None, int | None]] = set()

    def handle(self, event: AttemptEnded) -> Restart | GiveUp:
        """An attempt ended; what to do."""
        is_lost, what, where = _diagnose(event)
        if not is_lost or event.is_interrupted or not self._retries:
            return GiveUp()
        if where in self._known:
            return GiveUp("It happened at the same place before, so the run is not started again.")
        if self._n_restarts == self._retries:
            return GiveUp(f"The run was started again {self._n_restarts} times already (recover.retries).")
        self._known.add(where)
        self._n_restarts += 1
        return Restart(self._n_restarts, what)


def _diagnose(event: AttemptEnded) -> tuple[bool, str, tuple[str, str | None, int | None]]:
    """Whether a process was lost, in words, and where that was, to compare with other losses."""
    failure = event.failure
    if failure is None:
        return event.exit_code < 0, "the master process died", ("master", None, event.step)
    is_lost = failure.kind in _LOST or failure.error == TransportError.__name__
    step = event.step if failure.step is None else failure.step
    return is_lost, failure.message, (failure.kind.value, failure.call, step)

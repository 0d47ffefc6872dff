"""The decision to start a run again after it ended: a pure state machine over its attempts.

attempt ──ended well, by the user, or by an error or exit that would come again──► over
   ▲   └──a process was lost, retries are left, and it was not lost there too often─────────────────┐
   └────────────────────────────────────────── Restart ◄────────────────────────────────────────────┘

A worker that ends itself, by an exit status and no signal, was told to by code that would run again. Processes that are
killed at random may well be killed twice at one place. The third loss at a place ends the run,
unless the run got further in between: otherwise it could restart without end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from realrl.sched.events import Failure, FailureKind

LOSSES_AT_ONE_PLACE = 3
UNLESS_OFTEN = f", unless it has ended at this place {LOSSES_AT_ONE_PLACE - 1} times before"

_LOST = (FailureKind.WORKER_LOST, FailureKind.WORKER_SILENT)
_Place = tuple[str, str | None, int]  # who or how, call, step


class AttemptEnded(msgspec.Struct, frozen=True):
    """The master process is gone.

    Attributes:
        exit_code: the master's; a negative one is the signal that killed it.
        failure: the master's last report; None if there was none.
        step: the last step that the master reported.
        is_interrupted: the user asked for the end.
        silent_s: the silence of the master, in seconds, for which it was killed; 0 if it was not.
    """

    exit_code: int
    failure: Failure | None
    step: int
    is_interrupted: bool = False
    silent_s: float = 0.0


@dataclass(frozen=True)
class Restart:
    """Start again from the newest checkpoint.

    Attributes:
        number: count of restarts, from 1.
        lost: description of the loss, to follow "restart 1 of 2: ".
    """

    number: int
    lost: str


@dataclass(frozen=True)
class GiveUp:
    """The run is over; the user is told `why`, unless it is empty."""

    why: str = ""


class Recovery:
    """Decides after each attempt whether the run starts again.

    Args:
        retries: restarts at most, over the whole run.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._n_restarts = 0
        self._furthest_step = 0  # that an attempt completed
        self._losses: Counter[_Place] = Counter()  # since then

    @property
    def restarts_left(self) -> int:
        """Further restarts, at most."""
        return self._retries - self._n_restarts

    def handle(self, event: AttemptEnded) -> Restart | GiveUp:
        """Return the decision after an attempt."""
        is_lost, what, place = _diagnose(event)
        if not is_lost or event.is_interrupted or not self._retries:
            return GiveUp()
        if event.step > self._furthest_step:
            self._furthest_step = event.step
            self._losses.clear()
        self._losses[place] += 1
        if self._losses[place] == LOSSES_AT_ONE_PLACE:
            return GiveUp(
                f"It happened at the same place {LOSSES_AT_ONE_PLACE} times without a step done in between, so the run "
                "is not started again."
            )
        if self._n_restarts == self._retries:
            times = "once" if self._n_restarts == 1 else f"{self._n_restarts} times"
            return GiveUp(f"The run was started again {times} already (recover.retries).")
        self._n_restarts += 1
        return Restart(self._n_restarts, what)


def is_loss(failure: Failure) -> bool:
    """True if a process was lost, and not code at fault: the run may start again."""
    return failure.kind in _LOST or failure.lost_peer


def _diagnose(event: AttemptEnded) -> tuple[bool, str, _Place]:
    """Return True if a process was lost, the loss in words, and its place, to compare with other losses."""
    failure = event.failure
    if failure is None:
        silence = f"gave no sign of life for {event.silent_s:.0f} s"
        what = f"the master process {silence if event.silent_s else 'died'}"
        return event.exit_code < 0, what, ("master", None, event.step)
    step = event.step if failure.step is None else failure.step
    return is_loss(failure), failure.message, (failure.kind.value, failure.call, step)

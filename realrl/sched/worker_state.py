"""The worker's logic: requests in order, one at a time, and nothing but the end after a failure.

    NEW ──► BUSY ◄──► IDLE        a request begins; it is done
             │
             ├──► FAILED ──► BUSY (Shutdown only)
             └──► CLOSED          Shutdown is done

Time is an argument; the shell reads the clock. `heartbeat` may be called from another thread: it reads one object,
which the others replace as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from realrl.errors import InvalidTransitionError
from realrl.sched.messages import (
    FreeSamples,
    Heartbeat,
    Initialize,
    LoadSamples,
    MoveRows,
    ReadSamples,
    Request,
    RunCall,
    RunHooks,
    SaveCheckpoint,
    Shutdown,
)
from realrl.sched.story import Stories

IDLE_ACTIVITY = "idle"


class WorkerPhase(Enum):
    """State of the worker."""

    NEW = "new"  # nothing is initialised
    IDLE = "idle"
    BUSY = "busy"
    FAILED = "failed"
    CLOSED = "closed"


_NEXT_PHASES = {
    WorkerPhase.NEW: {WorkerPhase.BUSY},  # Initialize, or Shutdown, came
    WorkerPhase.IDLE: {WorkerPhase.BUSY},  # a request came
    WorkerPhase.BUSY: {
        WorkerPhase.IDLE,  # the request is done
        WorkerPhase.FAILED,  # the request raised
        WorkerPhase.CLOSED,  # the request was Shutdown, and is done
    },
    WorkerPhase.FAILED: {WorkerPhase.BUSY},  # Shutdown came
    WorkerPhase.CLOSED: set[WorkerPhase](),
}


@dataclass(frozen=True)
class _Current:
    """The request being executed, for the heartbeat; `seq` is -1 when idle."""

    seq: int
    activity: str
    since_s: float


class WorkerState:
    """One worker, from its first request to its last.

    Args:
        rank: global rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.phase = WorkerPhase.NEW
        self._next_seq = 0
        self._request: Request | None = None
        self._has_failed = False
        self._current = _Current(-1, IDLE_ACTIVITY, 0.0)
        self._story = Stories()

    @property
    def request(self) -> Request | None:
        """The request being executed."""
        return self._request

    def begin(self, request: Request, *, now_s: float) -> bool:
        """Handle a request; return True if it is to be executed.

        A refused one must be dropped without an answer: an earlier one failed, and the master knows.

        Raises:
            InvalidTransitionError: the request is out of sequence or comes while another is executed; the message tells
                the story so far.
        """
        self._story.n_events += 1
        what = f"request {request.seq}, {describe(request)}"
        if request.seq != self._next_seq:
            kind = "twice" if request.seq < self._next_seq else "too early"
            raise self._illegal(f"worker {self.rank} got {what}, {kind}: it expects request {self._next_seq}")
        if self._request is not None:
            raise self._illegal(f"worker {self.rank} got {what}, while it executes request {self._request.seq}")
        if self.phase is WorkerPhase.NEW and not isinstance(request, Initialize | Shutdown):
            raise self._illegal(f"worker {self.rank} got {what}, before it was initialised")
        if self.phase is not WorkerPhase.NEW and isinstance(request, Initialize):
            raise self._illegal(f"worker {self.rank} got {what}, but it was initialised before")
        self._next_seq += 1
        if self._has_failed and not isinstance(request, Shutdown):
            self._story.note(f"{what}: refused")
            return False
        self._enter(WorkerPhase.BUSY, what)
        self._request = request
        self._current = _Current(request.seq, describe(request), now_s)
        return True

    def finish(self, *, now_s: float) -> None:
        """Handle that the request being executed is done.

        Raises:
            InvalidTransitionError: none is being executed.
        """
        done = WorkerPhase.CLOSED if isinstance(self._request, Shutdown) else WorkerPhase.IDLE
        self._end(done, "is done", now_s)

    def fail(self, *, now_s: float) -> None:
        """Handle that the request being executed raised.

        Raises:
            InvalidTransitionError: none is being executed.
        """
        self._end(WorkerPhase.FAILED, "raised", now_s)
        self._has_failed = True

    def heartbeat(self, now_s: float) -> Heartbeat:
        """Return the worker's activity, and for how long it has lasted."""
        current = self._current
        busy_s = max(0.0, now_s - current.since_s) if current.seq >= 0 else 0.0
        return Heartbeat(self.rank, current.seq, current.activity, busy_s)

    def story(self) -> list[str]:
        """Return the last things that happened."""
        return self._story.lines()

    def validate(self) -> None:
        """Check invariants, which hold between any two events.

        Raises:
            InvalidTransitionError: one of them is broken.
        """
        is_busy = self.phase is WorkerPhase.BUSY
        if is_busy != (self._request is not None) or is_busy != (self._current.seq >= 0):
            raise self._illegal(f"worker {self.rank} is {self.phase.value}, but executes {self._request}")

    def _end(self, phase: WorkerPhase, how: str, now_s: float) -> None:
        self._story.n_events += 1
        if self._request is None:
            raise self._illegal(f"worker {self.rank} executes nothing that could end")
        self._enter(phase, f"request {self._request.seq} {how}")
        self._request = None
        self._current = _Current(-1, IDLE_ACTIVITY, now_s)

    def _enter(self, phase: WorkerPhase, why: str) -> None:
        if phase not in _NEXT_PHASES[self.phase]:
            raise self._illegal(f"worker {self.rank} cannot go from {self.phase.value} to {phase.value}: {why}")
        self._story.note(f"{self.phase.value} -> {phase.value}: {why}")
        self.phase = phase

    def _illegal(self, message: str) -> InvalidTransitionError:
        return InvalidTransitionError(message, self._story.lines())


def describe(request: Request) -> str:
    """Return the words for a request's execution in heartbeats."""
    match request:
        case RunCall(call=call):
            return call
        case MoveRows(call=call):
            return f"moving rows for {call}"
        case RunHooks(call=call, when=when):
            return f"hooks {when} {call}"
        case Initialize():
            return "starting"
        case LoadSamples():
            return "loading samples"
        case ReadSamples(step=step):
            return f"reading out samples of step {step}"
        case FreeSamples():
            return "freeing samples"
        case SaveCheckpoint(step=step):
            return f"saving step {step}"
        case Shutdown():
            return "shutting down"

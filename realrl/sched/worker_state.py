"""The worker's logic: requests in order, one at a time, and nothing but the end after a failure.

    NEW ──► BUSY ◄──► IDLE        a request begins; it is done
             │
             ├──► FAILED ──► BUSY (Shutdown only)
             └──► CLOSED          Shutdown is done

Time is an argument; the shell reads the clock. `heartbeat` may be called from another thread: it reads one object,
which `handle` replaces as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

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
from realrl.sched.story import Story

IDLE_ACTIVITY = "idle"


class RequestFinished(msgspec.Struct, frozen=True, tag=True):
    """The request being executed is done."""


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """The request being executed raised."""


class ActivityChanged(msgspec.Struct, frozen=True, tag=True):
    """The request being executed came to another part of its work, such as a transfer."""

    activity: str


WorkerEvent = Request | RequestFinished | RequestFailed | ActivityChanged


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Execute `request` and report its end."""

    request: Request


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Drop `request`: an earlier one failed, and the master knows. It must not be executed nor answered."""

    request: Request


WorkerInstruction = Execute | Refuse


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
        self._story = Story()
        self._n_events = 0

    @property
    def request(self) -> Request | None:
        """The request being executed."""
        return self._request

    def handle(self, event: WorkerEvent, now_s: float) -> list[WorkerInstruction]:
        """Take in one event and return the instructions.

        Raises:
            InvalidTransitionError: a request is out of sequence or comes while another is executed, or something ended
                that was never begun; the message tells the story so far.
        """
        self._n_events += 1
        if isinstance(event, RequestFinished | RequestFailed):
            self._end(event, now_s)
            return []
        if isinstance(event, ActivityChanged):
            if self._request is None:
                raise self._illegal(f"worker {self.rank} is not busy, but says it is at '{event.activity}'")
            self._current = _Current(self._request.seq, event.activity, self._current.since_s)
            return []
        return [self._begin(event, now_s)]

    def begin(self, request: Request, *, now_s: float) -> bool:
        """Handle a request; return True if it is to be executed. A refused one must be dropped without an answer."""
        return isinstance(self.handle(request, now_s)[0], Execute)

    def finish(self, *, now_s: float) -> None:
        """Handle that the request being executed is done."""
        self.handle(RequestFinished(), now_s)

    def fail(self, *, now_s: float) -> None:
        """Handle that the request being executed raised."""
        self.handle(RequestFailed(), now_s)

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

    def _begin(self, request: Request, now_s: float) -> WorkerInstruction:
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
            self._note(f"{what}: refused")
            return Refuse(request)
        self._enter(WorkerPhase.BUSY, what)
        self._request = request
        self._current = _Current(request.seq, describe(request), now_s)
        return Execute(request)

    def _end(self, event: RequestFinished | RequestFailed, now_s: float) -> None:
        request = self._request
        if request is None:
            raise self._illegal(f"worker {self.rank} executes nothing that could end")
        if isinstance(event, RequestFailed):
            self._has_failed = True
            self._enter(WorkerPhase.FAILED, f"request {request.seq} raised")
        else:
            done = WorkerPhase.CLOSED if isinstance(request, Shutdown) else WorkerPhase.IDLE
            self._enter(done, f"request {request.seq} is done")
        self._request = None
        self._current = _Current(-1, IDLE_ACTIVITY, now_s)

    def _enter(self, phase: WorkerPhase, why: str) -> None:
        if phase not in _NEXT_PHASES[self.phase]:
            raise self._illegal(f"worker {self.rank} cannot go from {self.phase.value} to {phase.value}: {why}")
        self._note(f"{self.phase.value} -> {phase.value}: {why}")
        self.phase = phase

    def _note(self, line: str) -> None:
        self._story.note(self._n_events, line)

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

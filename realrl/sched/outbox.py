"""Requests to every worker: numbered without gaps, each answered by exactly one reply.

A request is remembered with its owner, which gets the reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from realrl.sched.events import Send
from realrl.sched.messages import (
    CallDone,
    CheckpointSaved,
    FreeSamples,
    Goodbye,
    HooksDone,
    Initialize,
    LoadSamples,
    MoveRows,
    ReadSamples,
    Ready,
    Request,
    RowsMoved,
    RunCall,
    RunHooks,
    SamplesFreed,
    SamplesLoaded,
    SamplesRead,
    SaveCheckpoint,
    Shutdown,
    WorkerFailed,
)

NumberedReply = (
    Ready
    | SamplesLoaded
    | CallDone
    | RowsMoved
    | HooksDone
    | SamplesRead
    | SamplesFreed
    | CheckpointSaved
    | Goodbye
    | WorkerFailed
)

ANSWER_TO: dict[type[Request], type[NumberedReply]] = {
    Initialize: Ready,
    LoadSamples: SamplesLoaded,
    RunCall: CallDone,
    MoveRows: RowsMoved,
    RunHooks: HooksDone,
    ReadSamples: SamplesRead,
    FreeSamples: SamplesFreed,
    SaveCheckpoint: CheckpointSaved,
    Shutdown: Goodbye,
}


class Owner(Enum):
    """Sender of requests, which also gets the replies."""

    MASTER = "master"
    MAIN = "main track"
    EVALUATION = "evaluation"


class Outbox:
    """Open requests by worker; also numbers requests, dispatches and parts."""

    def __init__(self, n_ranks: int) -> None:
        self._next_seq = [0] * n_ranks
        self._open: list[dict[int, tuple[Request, Owner]]] = [{} for _ in range(n_ranks)]
        self._n_dispatches = self._n_parts = 0

    def next_seq(self, rank: int) -> int:
        """Return the number that the next request to `rank` must carry."""
        return self._next_seq[rank]

    def next_dispatch(self) -> int:
        """Return a number that no other dispatch has."""
        self._n_dispatches += 1
        return self._n_dispatches - 1

    def next_part(self) -> int:
        """Return the position, in the order of all parts, of the part that is sent now."""
        self._n_parts += 1
        return self._n_parts - 1

    def send(self, rank: int, request: Request, owner: Owner = Owner.MASTER) -> Send:
        """Remember that `request`, numbered by `next_seq`, goes out to `rank`."""
        assert request.seq == self._next_seq[rank]
        self._next_seq[rank] += 1
        self._open[rank][request.seq] = (request, owner)
        return Send(rank, request)

    def problem_with(self, reply: NumberedReply) -> str | None:
        """Return why `reply` answers no open request, or None when it does."""
        asked = self._open[reply.rank].get(reply.seq)
        if asked is not None and (type(reply) is ANSWER_TO[type(asked[0])] or isinstance(reply, WorkerFailed)):
            return None
        name, who = type(reply).__name__, f"worker {reply.rank}"
        if asked is None:
            known = 0 <= reply.seq < self._next_seq[reply.rank]
            state = "is answered already" if known else "was never sent"
            return f"{who} sent {name} for request {reply.seq}, which {state}"
        return f"{who} answered request {reply.seq}, a {type(asked[0]).__name__}, with {name}"

    def close(self, rank: int, seq: int) -> tuple[Request, Owner]:
        """Return the open request `seq` of `rank`, which is answered now, and its owner."""
        return self._open[rank].pop(seq)

    def oldest(self, rank: int) -> Request | None:
        """Return the request that `rank` executes now or next; checkpoints are written beside the others."""
        requests = [request for request, _ in self._open[rank].values()]
        return next((r for r in requests if not isinstance(r, SaveCheckpoint)), requests[0] if requests else None)

    def of_rank(self, rank: int, owner: Owner) -> Iterator[Request]:
        """Yield the open requests of one owner to one worker, in order."""
        return (request for request, asker in self._open[rank].values() if asker is owner)

    @property
    def is_empty(self) -> bool:
        """True if every request is answered."""
        return not any(self._open)

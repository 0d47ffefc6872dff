"""Requests to every worker: numbered without gaps, each answered once by the reply that belongs to it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

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
    """Who sends requests and gets the replies."""

    MASTER = "master"
    MAIN = "main track"
    EVALUATION = "evaluation"


class Outbox:
    """What each worker was asked and has not answered yet."""

    def __init__(self, n_ranks: int) -> None:
        self._next_seq = [0] * n_ranks
        self._open: list[dict[int, Request]] = [{} for _ in range(n_ranks)]

    def next_seq(self, rank: int) -> int:
        """The number that the next request to `rank` must carry."""
        return self._next_seq[rank]

    def add(self, rank: int, request: Request) -> None:
        """Remember that `request`, numbered by `next_seq`, goes out to `rank`."""
        assert request.seq == self._next_seq[rank]
        self._next_seq[rank] += 1
        self._open[rank][request.seq] = request

    def problem_with(self, reply: NumberedReply) -> str | None:
        """Return why `reply` answers no open request, or None when it does."""
        name, who = type(reply).__name__, f"worker {reply.rank}"
        request = self._open[reply.rank].get(reply.seq)
        if request is None:
            known = 0 <= reply.seq < self._next_seq[reply.rank]
            state = "is answered already" if known else "was never sent"
            return f"{who} sent {name} for request {reply.seq}, which {state}"
        if isinstance(reply, WorkerFailed) or type(reply) is ANSWER_TO[type(request)]:
            return None
        return f"{who} answered request {reply.seq}, a {type(request).__name__}, with {name}"

    def close(self, rank: int, seq: int) -> Request:
        """Return the open request `seq` of `rank`, which is answered now."""
        return self._open[rank].pop(seq)

    def discard(self, rank: int, seq: int) -> None:
        """Forget a request that may or may not be open."""
        self._open[rank].pop(seq, None)

    def oldest(self, rank: int) -> Request | None:
        """What `rank` is executing, or will next: all but checkpoints, which are written beside, go in order."""
        requests = list(self._open[rank].values())
        return next((r for r in requests if not isinstance(r, SaveCheckpoint)), requests[0] if requests else None)

    def of_rank(self, rank: int) -> Iterator[Request]:
        """Open requests of one worker, in order."""
        return iter(self._open[rank].values())

    @property
    def is_empty(self) -> bool:
        """Whether every request is answered."""
        return not any(self._open)

"""The end of a run: every worker is told to shut down, and waited for."""

from __future__ import annotations

from realrl.sched.events import Failure, FailureKind, Instruction, WorkerLost, WorkerSilent
from realrl.sched.master.workers import Workers
from realrl.sched.messages import Goodbye, Hello, Shutdown, WorkerFailed
from realrl.sched.track.faults import Fatal

_INTERRUPTED_EXIT_CODE = 130


class Farewell:
    """The workers that were told to shut down.

    Args:
        workers: of the run; those that are there must leave.
        interrupted: why the run ends early, or "" when it is complete. An interrupted run is patient: it takes a
            worker that fails or dies on the way out for one that left.
    """

    def __init__(self, workers: Workers, interrupted: str) -> None:
        self.interrupted = interrupted
        self._workers = workers
        self._staying = set(workers.hellos)
        self._left: set[int] = set()

    @property
    def is_over(self) -> bool:
        """Whether every worker has left."""
        return not self._staying

    def begin(self) -> list[Instruction]:
        """Send everybody away."""
        return [*self._workers.ask_all(lambda rank, seq: Shutdown(seq))]

    def add(self, reply: Hello) -> list[Instruction]:
        """A worker appeared late, and is told to leave at once."""
        self._workers.add(reply)
        self._staying.add(reply.rank)
        return [self._workers.ask(reply.rank, lambda rank, seq: Shutdown(seq))]

    def interrupt(self, reason: str) -> None:
        """The user wants the run to end.

        Raises:
            Fatal: not for the first time.
        """
        if self.interrupted:
            message = f"interrupted twice: {reason}; workers that had not left yet were stopped"
            raise Fatal(Failure(kind=FailureKind.INTERRUPTED, message=message, exit_code=_INTERRUPTED_EXIT_CODE))
        self.interrupted = reason

    def take_leave(self, reply: Goodbye) -> None:
        """A worker is done with everything."""
        self._workers.answered_late(reply)
        self._leave(reply.rank)

    def excuses(self, event: WorkerFailed | WorkerLost | WorkerSilent) -> bool:
        """Whether a worker's end is no failure any more; then it left."""
        if isinstance(event, WorkerFailed):
            if not self.interrupted:
                return False
            asked = self._workers.answered_late(event)
            if asked is not None and isinstance(asked.request, Shutdown):
                self._leave(event.rank)
            return True
        ended_well = isinstance(event, WorkerLost) and event.exit_code == 0
        if self.interrupted or ended_well:
            self._leave(event.rank)
        return event.rank in self._left

    def _leave(self, rank: int) -> None:
        self._staying.discard(rank)
        self._left.add(rank)

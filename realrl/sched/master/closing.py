"""The end of a run: the master tells every worker to shut down, and waits for all of them."""

from __future__ import annotations

from realrl.sched.events import Failure, FailureKind, Instruction, WorkerLost, WorkerSilent
from realrl.sched.master.workers import Workers
from realrl.sched.messages import Goodbye, Hello, Shutdown, WorkerFailed
from realrl.sched.track.faults import Fatal

_INTERRUPTED_EXIT_CODE = 130


class Farewell:
    """The workers that were told to shut down.

    Args:
        workers: the run's; those that said Hello must leave.
        interrupted: the reason for an early end, or "" when the run is complete. In an interrupted run a worker that
            fails or dies on the way out counts as one that left.
    """

    def __init__(self, workers: Workers, interrupted: str) -> None:
        self.interrupted = interrupted
        self._workers = workers
        self._staying = set(workers.hellos)
        self._left: set[int] = set()

    @property
    def is_over(self) -> bool:
        """True if every worker has left."""
        return not self._staying

    def begin(self) -> list[Instruction]:
        """Tell every worker to shut down."""
        return [*self._workers.ask_all(lambda rank, seq: Shutdown(seq))]

    def add(self, reply: Hello) -> list[Instruction]:
        """Tell a worker that appeared late to leave at once."""
        self._workers.add(reply)
        self._staying.add(reply.rank)
        return [self._workers.ask(reply.rank, lambda rank, seq: Shutdown(seq))]

    def interrupt(self, reason: str) -> None:
        """Note that the user wants the run to end.

        Raises:
            Fatal: the run was interrupted before.
        """
        if self.interrupted:
            raise interrupted_twice(reason)
        self.interrupted = reason

    def take_leave(self, reply: Goodbye) -> None:
        """Note that a worker is done with everything."""
        self._workers.answered_late(reply)
        self._leave(reply.rank)

    def excuses(self, event: WorkerFailed | WorkerLost | WorkerSilent) -> bool:
        """Return True if a worker's end counts as leaving, not as a failure."""
        if isinstance(event, WorkerFailed):
            if not self.interrupted:
                return False
            asked = self._workers.answered_late(event)
            if asked is not None and isinstance(asked[0], Shutdown):
                self._leave(event.rank)
            return True
        ended_well = isinstance(event, WorkerLost) and event.exit_code == 0
        if self.interrupted or ended_well:
            self._leave(event.rank)
        return event.rank in self._left

    def _leave(self, rank: int) -> None:
        self._staying.discard(rank)
        self._left.add(rank)


def interrupted_twice(reason: str) -> Fatal:
    """Return the end of a run whose user does not wait for an orderly one."""
    message = f"interrupted twice: {reason}; workers that had not left yet were stopped"
    return Fatal(Failure(kind=FailureKind.INTERRUPTED, message=message, exit_code=_INTERRUPTED_EXIT_CODE))

"""The start of a run: Start and a Hello from every worker, then Initialize, then Ready from every worker."""

from __future__ import annotations

from realrl.errors import InvalidTransitionError
from realrl.sched.events import Instruction, ReportStart, Start
from realrl.sched.master import diagnosis
from realrl.sched.master.workers import Workers
from realrl.sched.messages import PROTOCOL_VERSION, Hello, Initialize, Ready, Request
from realrl.sched.track.faults import Fatal


class Startup:
    """Workers that said Hello, and those that are ready.

    Args:
        dataset_rank: the rank that reports the dataset's rows.
    """

    def __init__(self, workers: Workers, dataset_rank: int) -> None:
        self._workers = workers
        self._dataset_rank = dataset_rank
        self._start: Start | None = None
        self._readies: dict[int, Ready] = {}

    @property
    def is_connected(self) -> bool:
        """True if the shell said Start and every worker Hello."""
        return self._start is not None and len(self._workers.hellos) == self._workers.n_ranks

    @property
    def is_ready(self) -> bool:
        """True if every worker is ready."""
        return len(self._readies) == self._workers.n_ranks

    @property
    def dataset(self) -> Ready:
        """The reply of the worker that holds the dataset."""
        return self._readies[self._dataset_rank]

    def add_start(self, event: Start) -> None:
        """Note that the shell listens."""
        if self._start is not None:
            raise InvalidTransitionError("the run was started twice")
        self._start = event

    def add_hello(self, reply: Hello) -> None:
        """Note that a worker appeared.

        Raises:
            Fatal: the worker speaks another protocol version.
        """
        self._workers.add(reply)
        if reply.protocol_version != PROTOCOL_VERSION:
            raise Fatal(diagnosis.wrong_version(reply))

    def add_ready(self, reply: Ready) -> None:
        """Note that a worker has built its groups, models and data."""
        self._workers.answered(reply)
        self._readies[reply.rank] = reply

    def initialize(self) -> list[Instruction]:
        """Ask every worker to get ready."""
        start, hellos = self._start, self._workers.hellos
        assert start is not None
        peers = tuple(hellos[rank].data_address for rank in sorted(hellos))

        def request(rank: int, seq: int) -> Request:
            return Initialize(seq, start.run, peers, start.resume_from)

        return [*self._workers.ask_all(request)]

    def report(self, first_step: int, last_step: int) -> ReportStart:
        """Return the report of the run's length and data, once every worker is ready."""
        replies = [self._readies[rank] for rank in sorted(self._readies)]
        return ReportStart(
            first_step=first_step,
            last_step=last_step,
            n_rows=len(self.dataset.row_ids),
            n_dropped=sum(reply.n_dropped for reply in replies),
            notes=tuple(dict.fromkeys(note for reply in replies for note in reply.notes)),
        )

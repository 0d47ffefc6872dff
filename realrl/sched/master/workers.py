"""The workers as the master knows them: their start, open requests and spans.

At the start come Start and a Hello from every worker, then Initialize, then Ready from every worker.
"""

from __future__ import annotations

from collections.abc import Callable

from realrl.errors import InvalidTransitionError
from realrl.sched.events import Instruction, RankSpan, ReportStart, Send, Start
from realrl.sched.messages import Hello, Initialize, Ready, Request
from realrl.sched.outbox import NumberedReply, Outbox, Owner
from realrl.sched.story import Stories


class Workers:
    """All workers of a run.

    Args:
        n_ranks: number of workers.
        dataset_rank: the rank that reports the dataset's rows.
        stories: accounts for the error when a reply answers nothing.
    """

    def __init__(self, n_ranks: int, dataset_rank: int, stories: Stories) -> None:
        self.n_ranks = n_ranks
        self.hellos: dict[int, Hello] = {}
        self.outbox = Outbox(n_ranks)
        self._dataset_rank = dataset_rank
        self._stories = stories
        self._start: Start | None = None
        self._readies: dict[int, Ready] = {}
        self._spans: list[RankSpan] = []

    def add(self, reply: Hello) -> None:
        """Note that a worker appeared.

        Raises:
            InvalidTransitionError: there is no such worker, or it said Hello before.
        """
        if not 0 <= reply.rank < self.n_ranks:
            raise InvalidTransitionError(f"a worker calls itself rank {reply.rank}; there are {self.n_ranks}")
        if reply.rank in self.hellos:
            raise InvalidTransitionError(f"worker {reply.rank} said Hello twice")
        self.hellos[reply.rank] = reply

    def ask_all(self, make: Callable[[int, int], Request]) -> list[Send]:
        """Send ``make(rank, seq)`` to every worker that said Hello."""
        return [self.ask(rank, make) for rank in sorted(self.hellos)]

    def ask(self, rank: int, make: Callable[[int, int], Request]) -> Send:
        """Send ``make(rank, seq)`` to one worker."""
        return self.outbox.send(rank, make(rank, self.outbox.next_seq(rank)))

    def answered(self, reply: NumberedReply) -> tuple[Request, Owner]:
        """Close and return the request that a reply answers, with its owner.

        Raises:
            InvalidTransitionError: it answers no open request.
        """
        asked = self.answered_late(reply)
        if asked is None:
            call = getattr(reply, "call", None)
            story = self._stories.lines(call if call in self._stories else None)
            raise InvalidTransitionError(self.outbox.problem_with(reply) or "", story)
        return asked

    def answered_late(self, reply: NumberedReply) -> tuple[Request, Owner] | None:
        """Close and return the request that a reply answers, or None: in a closing run stray replies are no bug.

        Raises:
            InvalidTransitionError: there is no such worker.
        """
        if not 0 <= reply.rank < self.n_ranks:
            raise InvalidTransitionError(f"{type(reply).__name__} came from rank {reply.rank}, which does not exist")
        for span in getattr(reply, "spans", ()):
            self._spans.append(RankSpan(reply.rank, span))
        return None if self.outbox.problem_with(reply) is not None else self.outbox.close(reply.rank, reply.seq)

    def take_spans(self) -> tuple[RankSpan, ...]:
        """Return the spans that arrived since this was last called."""
        spans, self._spans = tuple(self._spans), []
        return spans

    # ------------------------------------------------------------ start

    @property
    def is_connected(self) -> bool:
        """True if the shell said Start and every worker Hello."""
        return self._start is not None and len(self.hellos) == self.n_ranks

    @property
    def is_ready(self) -> bool:
        """True if every worker is ready."""
        return len(self._readies) == self.n_ranks

    @property
    def dataset(self) -> Ready:
        """The reply of the worker that holds the dataset."""
        return self._readies[self._dataset_rank]

    def add_start(self, event: Start) -> None:
        """Note that the shell listens."""
        if self._start is not None:
            raise InvalidTransitionError("the run was started twice")
        self._start = event

    def add_ready(self, reply: Ready) -> None:
        """Note that a worker has built its groups, models and data."""
        self.answered(reply)
        self._readies[reply.rank] = reply

    def initialize(self) -> list[Instruction]:
        """Ask every worker to get ready."""
        start, hellos = self._start, self.hellos
        assert start is not None
        peers = tuple(hellos[rank].data_address for rank in sorted(hellos))

        def request(rank: int, seq: int) -> Request:
            return Initialize(seq, start.run, peers, start.resume_from)

        return [*self.ask_all(request)]

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

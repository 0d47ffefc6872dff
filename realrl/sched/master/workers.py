"""The workers as the master knows them: their Hellos, open requests and spans."""

from __future__ import annotations

from collections.abc import Callable

from realrl.errors import InvalidTransitionError
from realrl.sched.events import RankSpan, Send
from realrl.sched.messages import Hello, Request
from realrl.sched.outbox import Asked, NumberedReply, Outbox
from realrl.sched.story import Stories


class Workers:
    """All workers of a run.

    Args:
        n_ranks: number of workers.
        stories: accounts for the error when a reply answers nothing.
    """

    def __init__(self, n_ranks: int, stories: Stories) -> None:
        self.n_ranks = n_ranks
        self.hellos: dict[int, Hello] = {}
        self.outbox = Outbox(n_ranks)
        self._stories = stories
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

    def answered(self, reply: NumberedReply) -> Asked:
        """Close and return the request that a reply answers.

        Raises:
            InvalidTransitionError: it answers no open request.
        """
        asked = self.answered_late(reply)
        if asked is None:
            call = getattr(reply, "call", None)
            story = self._stories.lines(call if call in self._stories else None)
            raise InvalidTransitionError(self.outbox.problem_with(reply) or "", story)
        return asked

    def answered_late(self, reply: NumberedReply) -> Asked | None:
        """Close and return the request that a reply answers, or None: in a closing run stray replies are no bug.

        Raises:
            InvalidTransitionError: there is no such worker.
        """
        if not 0 <= reply.rank < self.n_ranks:
            raise InvalidTransitionError(f"{type(reply).__name__} came from rank {reply.rank}, which does not exist")
        self._spans += [RankSpan(reply.rank, span) for span in getattr(reply, "spans", ())]
        return None if self.outbox.problem_with(reply) is not None else self.outbox.close(reply.rank, reply.seq)

    def take_spans(self) -> tuple[RankSpan, ...]:
        """Return the spans that arrived since this was last called."""
        spans, self._spans = tuple(self._spans), []
        return spans

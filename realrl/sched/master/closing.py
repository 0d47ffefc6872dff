"""Who has still to leave when a run ends."""

from __future__ import annotations

from collections.abc import Iterable


class Farewell:
    """The workers that were told to shut down.

    Args:
        ranks: workers that must leave.
        interrupted: why the run ends early, or "" when it is complete. An interrupted run is patient: it takes a
            worker that fails or dies on the way out for one that left.
    """

    def __init__(self, ranks: Iterable[int], interrupted: str) -> None:
        self.interrupted = interrupted
        self._staying = set(ranks)
        self._left: set[int] = set()

    @property
    def is_patient(self) -> bool:
        """Whether a lost worker is as good as one that said Goodbye."""
        return bool(self.interrupted)

    @property
    def is_over(self) -> bool:
        """Whether every worker has left."""
        return not self._staying

    def has_left(self, rank: int) -> bool:
        """Whether `rank` said Goodbye or was lost."""
        return rank in self._left

    def add(self, rank: int) -> None:
        """A worker appeared late, and is told to leave at once."""
        self._staying.add(rank)

    def remove(self, rank: int) -> None:
        """`rank` said Goodbye or was lost."""
        self._staying.discard(rank)
        self._left.add(rank)

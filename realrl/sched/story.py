"""Bounded accounts of events, for the message of an illegal transition."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_LINES = 24


class Story:
    """The last lines of one call, or of the run."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=_LINES)
        self._n_dropped = 0

    def note(self, n_events: int, line: str) -> None:
        """Remember `line`, which the event number `n_events` brought about."""
        self._n_dropped += len(self._lines) == _LINES
        self._lines.append((n_events, line))

    def lines(self) -> list[str]:
        """Return the story, oldest line first."""
        told = [f"event {n_events}: {line}" for n_events, line in self._lines]
        return [f"({self._n_dropped} earlier lines left out)", *told] if self._n_dropped else told


class Stories:
    """The story of the run, and that of each call.

    Attributes:
        n_events: number of events so far.
    """

    def __init__(self, calls: Iterable[str]) -> None:
        self.n_events = 0
        self._run = Story()
        self._calls = {call: Story() for call in calls}

    def __contains__(self, call: str | None) -> bool:
        return call in self._calls

    def note(self, line: str, call: str | None = None) -> None:
        """Remember a consequence of the event being handled, for a call or for the run."""
        (self._run if call is None else self._calls[call]).note(self.n_events, line)

    def lines(self, call: str | None = None) -> list[str]:
        """Return the story of a call, or of the run."""
        return (self._run if call is None else self._calls[call]).lines()


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as people write them: ``0-3,6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

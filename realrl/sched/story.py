"""Bounded accounts of events, for the message of an illegal transition."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_LINES = 24


class Stories:
    """The last lines of the run, or of a worker, and those of each call.

    Attributes:
        n_events: number of events so far.
    """

    def __init__(self, calls: Iterable[str] = ()) -> None:
        self.n_events = 0
        self._lines: dict[str | None, deque[str]] = {call: deque(maxlen=_LINES) for call in (None, *calls)}
        self._n_noted = dict.fromkeys(self._lines, 0)

    def __contains__(self, call: str | None) -> bool:
        return call in self._lines

    def note(self, line: str, call: str | None = None) -> None:
        """Remember a consequence of the event being handled, for a call or for the run."""
        self._n_noted[call] += 1
        self._lines[call].append(f"event {self.n_events}: {line}")

    def lines(self, call: str | None = None) -> list[str]:
        """Return the story of a call, or of the run, oldest line first."""
        n_dropped = self._n_noted[call] - len(self._lines[call])
        return [*([f"({n_dropped} earlier lines left out)"] if n_dropped else []), *self._lines[call]]


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as people write them: ``0-3,6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

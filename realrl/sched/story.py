"""Bounded accounts of events, for the message of an illegal transition."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

_LINES = 24
_REGULAR = 5  # equal runs of ranks of which only the first two and the last are shown


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
    """Return ranks as people write them: ``0-3,6``; many equal runs at equal distances as ``1-7,9-15,...,57-63``."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    words: list[str] = []
    while runs:
        n = _n_regular(runs)
        shown = runs[:2] if n >= _REGULAR else runs[:1]
        words += [str(first) if first == last else f"{first}-{last}" for first, last in shown]
        words += ["..."] if n >= _REGULAR else []
        runs = runs[n - 1 :] if n >= _REGULAR else runs[1:]  # the last of equal runs is shown too
    return ",".join(words)


def _n_regular(runs: Sequence[tuple[int, int]]) -> int:
    """Return how many runs, from the first on, are equally long and equally far from each other."""
    (first, last), step = runs[0], runs[1][0] - runs[0][0] if len(runs) > 1 else 0
    expected = ((first + i * step, last + i * step) for i in range(len(runs)))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(runs, expected, strict=True)))

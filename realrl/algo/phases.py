"""Phases of calls: what one rank, and processes that serve it, do inside of a call, for the trace.

A phase costs two readings of the clock. The recorder holds a bounded number of phases: the first ones of each call one
by one, and of a long run those of every second, fourth, eighth, ... step. Seconds are summed up over all of them.

On CUDA the host runs ahead of its device: a phase ends when its work is queued, and the next one that needs a result
waits for all of it. Nothing here waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

MOST_OF_A_CALL = 400
MOST_OF_A_STRIDE = 20_000
_ONE_BAR_S = 0.05
_NO_GAP_S = 0.001


class Phase(NamedTuple):
    """A stretch of a call's time; seconds since the epoch of the host's clock."""

    name: str
    begin_s: float
    end_s: float
    n_tokens: int = 0


class Work(NamedTuple):
    """A stretch of a helper process's time, in which it did a number of things; see `Phase`."""

    name: str
    begin_s: float
    end_s: float
    process: int
    count: int = 1


@dataclass(frozen=True)
class CallPhases:
    """The phases of a call in their order, work of helper processes, and name -> seconds of all phases."""

    phases: Sequence[Phase]
    work: Sequence[Work]
    seconds: Mapping[str, float]


class Phases:
    """Recorder of the phases of one rank's calls.

    Phases follow each other; they do not overlap.

    Args:
        most_of_a_call: number of phases of a call that are kept one by one; 0 records nothing.
        most_of_a_stride: number of kept phases after which half as many steps keep theirs.
    """

    def __init__(self, most_of_a_call: int = 0, most_of_a_stride: int = MOST_OF_A_STRIDE) -> None:
        self._most_of_a_call, self._most_of_a_stride = most_of_a_call, most_of_a_stride
        self._phases: list[Phase] = []
        self._work: list[Work] = []
        self._latest: dict[int, int] = {}  # process -> place of its latest work
        self._seconds: dict[str, float] = {}
        self._stride, self._n_kept = 1, 0

    @contextmanager
    def phase(self, name: str, n_tokens: int = 0) -> Iterator[None]:
        """Record the block; one that raises is left out.

        Args:
            n_tokens: number of tokens that it works on.
        """
        begin_s = time.time()
        yield
        self.add(name, begin_s, n_tokens)

    def add(self, name: str, begin_s: float, n_tokens: int = 0, *, goes_on: bool = False) -> float:
        """Record a phase that ends now; returns its end.

        Args:
            goes_on: True makes one phase of this one and the one before, if that has the same name.
        """
        end_s = time.time()
        if not self._most_of_a_call:
            return end_s
        self._seconds[name] = self._seconds.get(name, 0.0) + end_s - begin_s
        if len(self._phases) == self._most_of_a_call:
            return end_s
        last = self._phases[-1] if goes_on and self._phases else None
        if last is not None and last.name == name:
            self._phases[-1] = Phase(name, last.begin_s, end_s, last.n_tokens + n_tokens)
        else:
            self._phases.append(Phase(name, begin_s, end_s, n_tokens))
        return end_s

    def beside(self, name: str, begin_s: float, end_s: float, *, process: int) -> None:
        """Record what a helper process did; short works that follow each other become one.

        Args:
            process: number of the process among those that help this rank.
        """
        place = self._latest.get(process)
        last = None if place is None else self._work[place]
        is_next = last is not None and last.name == name and -_ONE_BAR_S < begin_s - last.end_s < _NO_GAP_S
        if last is not None and place is not None and is_next and last.end_s - last.begin_s < _ONE_BAR_S:
            self._work[place] = Work(name, last.begin_s, max(end_s, last.end_s), process, last.count + 1)
        elif len(self._work) < self._most_of_a_call:
            self._latest[process] = len(self._work)
            self._work.append(Work(name, begin_s, end_s, process))

    def take(self, step: int) -> CallPhases:
        """End a call; of a step that keeps no phases, there are but the sums."""
        taken = CallPhases(self._phases, self._work, self._seconds)
        self._phases, self._work, self._latest, self._seconds = [], [], {}, {}
        if step % self._stride:
            return CallPhases((), (), taken.seconds)
        self._n_kept += len(taken.phases) + len(taken.work)
        if self._n_kept >= self._most_of_a_stride:
            self._stride, self._n_kept = 2 * self._stride, 0
        return taken

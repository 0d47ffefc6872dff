"""Replacement of dropped samples: the place of each sample in its step, and the number of further samples.

A step has `step_size` places. Each sample of its first round has one; a sample that a call drops leaves its place
vacant. When the fate of a whole round is known, further samples are loaded for the vacant places: as many as will fill
them if calls keep the same share as so far in this step, at most `step_size`. The oldest survivors take the vacant
places, in order; the others are surplus. The step is settled when no place is vacant; the samples of the next one are
loaded after that.

Invariants:
    - the samples of a settled step, their places, and the samples loaded afterwards depend only on the set of dropped
      samples, not on the order in which it becomes known;
    - every place is taken once; a sample has at most one place;
    - a sample takes the place of an older one only.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class Rounds:
    """The rounds of one step after another; samples are numbered from 0 in load order.

    Args:
        step_size: places of a step.
    """

    def __init__(self, step_size: int) -> None:
        self.n_loaded = 0  # over all steps
        self.n_settled = 0  # steps
        self.n_refills = 0  # of the step
        self.n_wanted = 0  # samples of the round that must be loaded next
        self.n_dropped: dict[str, int] = {}  # of the step, by call
        self.n_surplus = 0  # of the step
        self._step_size = step_size
        self._is_open = False
        self._first = 0  # sample of the step
        self._n_kept = 0  # of the step, surplus included
        self._vacant: list[int] = []
        self._undecided: set[int] = set()  # of the round
        self._kept: list[int] = []  # of the round, ascending
        self._loaded_at_end: list[int] = []  # by settled step: samples loaded up to there

    @property
    def is_open(self) -> bool:
        """True if a step is begun and not settled."""
        return self._is_open

    @property
    def n_vacant(self) -> int:
        """Places of the step that lost their sample, as far as that is known."""
        return len(self._vacant)

    @property
    def n_loaded_in_step(self) -> int:
        """Samples of all rounds of the step so far."""
        return self.n_loaded - self._first

    def loaded_at_end(self, step: int) -> int:
        """Return the number of samples that the first `step` steps, which must be settled, took in all."""
        return self._loaded_at_end[step - 1] if step else 0

    def open_round(self) -> range:
        """Begin a round of the wanted samples, or else of the next step's first ones; return their numbers."""
        if self._is_open:
            assert self.n_wanted
            self.n_refills += 1
            size, self.n_wanted = self.n_wanted, 0
        else:
            self._is_open = True
            self._first = self.n_loaded
            self._n_kept = self.n_refills = self.n_surplus = 0
            self.n_dropped = {}
            size = self._step_size
        samples = range(self.n_loaded, self.n_loaded + size)
        self.n_loaded += size
        self._undecided = set(samples)
        self._kept = []
        return samples

    def decide(
        self, call: str, *, kept: Iterable[int] = (), dropped: Iterable[int] = ()
    ) -> tuple[dict[int, int], tuple[int, ...]]:
        """Note samples of the round that `call` dropped, or kept with no call after it that can drop them.

        Returns:
            Number of a surviving sample -> its place, counted over all steps; survivors of the round without a place.
        """
        places = {}
        for sample in dropped:
            self._undecided.remove(sample)
            self.n_dropped[call] = self.n_dropped.get(call, 0) + 1
            if not self.n_refills:
                bisect.insort(self._vacant, self._place(sample))
        for sample in kept:
            self._undecided.remove(sample)
            self._n_kept += 1
            if self.n_refills:
                bisect.insort(self._kept, sample)
            else:
                places[sample] = self._place(sample)
        if not self._undecided:
            return places | self._fill_vacant(), self._end_round()
        return places, ()

    def _place(self, sample: int) -> int:
        """Return the place of a sample of the first round."""
        return self.n_settled * self._step_size + sample - self._first

    def _fill_vacant(self) -> dict[int, int]:
        """Give the vacant places to survivors of a refill, the oldest first."""
        places = dict(zip(self._kept, self._vacant))
        self._kept, self._vacant = self._kept[len(places) :], self._vacant[len(places) :]
        return places

    def _end_round(self) -> tuple[int, ...]:
        """Settle the step, or compute how many samples it still wants; return the surplus survivors."""
        self.n_surplus += len(self._kept)
        if self._vacant:
            self.n_wanted = self._size_of_refill()
        else:
            self._is_open = False
            self.n_settled += 1
            self._loaded_at_end.append(self.n_loaded)
        return tuple(self._kept)

    def _size_of_refill(self) -> int:
        if not self._n_kept:
            return self._step_size
        expected = (2 * len(self._vacant) * self.n_loaded_in_step + self._n_kept) // (2 * self._n_kept)  # rounded
        return min(self._step_size, expected)

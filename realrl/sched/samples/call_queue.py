"""Queues of one call's samples, which decide its next batch.

Samples are numbered from 0 in load order; `step_size` of them make a step. A call finishes a step before it takes
samples of the next one. A call that does not stream takes fixed windows: its j-th batch is the samples ``j * n_seqs``
to ``(j + 1) * n_seqs - 1``, in whatever order they become ready. A streaming call takes the oldest samples that are
ready, between `min_n_seqs` and `n_seqs` of them, such that the rest of the step can be taken in the same way. Where the
number of all samples is given, the last window, and with it the last step, may be smaller.

A call that drops samples, or precedes one that does, has a `RoundQueue`. A step has one round or more for it: first
samples, then replacements for dropped ones. A round is complete when all its samples are taken, or dropped before that.
A call that does not stream takes fixed windows of `n_seqs` samples of a round, less the samples that an earlier call
dropped; the last window may be smaller, and a window without samples is left out. A streaming call takes the oldest
samples that are ready, between `min_n_seqs` and `n_seqs` of them, and fewer only where the rest of a round cannot be
taken otherwise.
"""

from __future__ import annotations

import heapq
from collections import Counter


class CallQueue:
    """The ready and the taken samples of one call; every operation is amortised constant or logarithmic time.

    `n_total` is the number of samples of the whole run; None: whole steps of them.
    """

    def __init__(self, *, n_seqs: int, min_n_seqs: int | None, step_size: int, n_total: int | None = None) -> None:
        self._n_seqs = n_seqs
        self._min_n_seqs = min_n_seqs
        self._step_size = step_size
        self._n_total = n_total
        self._n_taken = 0
        self._n_finished = 0
        self._n_ready_in_window: dict[int, int] = {}
        self._ready: list[int] = []  # heap; streaming only
        self._n_ready_in_step: dict[int, int] = {}  # streaming only

    @property
    def steps_taken(self) -> int:
        """Whole steps of samples taken."""
        return self._steps(self._n_taken)

    @property
    def steps_finished(self) -> int:
        """Whole steps of samples that the call is done with."""
        return self._steps(self._n_finished)

    @property
    def steps_begun(self) -> int:
        """The same as `steps_taken`: no replacements come later (see `RoundQueue`)."""
        return self.steps_taken

    @property
    def steps_read(self) -> int:
        """The same as `steps_finished`."""
        return self.steps_finished

    def add_ready(self, *indices: int) -> bool:
        """All inputs of these samples exist; return whether that may have made a batch complete."""
        is_batch = False
        if self._min_n_seqs is None:
            n_ready_in, n_seqs = self._n_ready_in_window, self._n_seqs
            first, last = min(indices) // n_seqs, max(indices) // n_seqs
            n_new = {first: len(indices)} if first == last else Counter([index // n_seqs for index in indices])
            for window, n in n_new.items():
                n_ready_in[window] = n_ready_in.get(window, 0) + n
            return any(n_ready_in[window] == self._window_size(window) for window in n_new)
        for index in indices:
            heapq.heappush(self._ready, index)
            step = index // self._step_size
            n_ready = self._n_ready_in_step.get(step, 0) + 1
            self._n_ready_in_step[step] = n_ready
            is_batch |= n_ready >= self._min_n_seqs
        return is_batch

    def batch_size(self, n_more: int = 0) -> int:
        """Samples that the call could take now, or as soon as `n_more` of `candidates` are ready too; or 0."""
        if self._min_n_seqs is None:
            window = self._n_taken // self._n_seqs
            size = self._window_size(window)
            return size if self._n_ready_in_window.get(window, 0) + n_more == size else 0
        return self._streamed_batch_size(self._min_n_seqs, n_more)

    def candidates(self) -> range:
        """The samples that the next batch is taken from."""
        if self._min_n_seqs is None:
            return range(self._n_taken, self._n_taken + self._window_size(self._n_taken // self._n_seqs))
        first = self.steps_taken * self._step_size
        last = first + self._step_size
        return range(first, last if self._n_total is None else min(last, self._n_total))

    def peek(self) -> list[int]:
        """The next batch: indices, oldest first. Only after `batch_size` said that there is one."""
        size = self.batch_size()
        if self._min_n_seqs is None:
            return list(range(self._n_taken, self._n_taken + size))
        return heapq.nsmallest(size, self._ready)

    def take(self) -> list[int]:
        """Take the next batch, as `peek` tells it."""
        size = self.batch_size()
        if self._min_n_seqs is None:
            del self._n_ready_in_window[self._n_taken // self._n_seqs]
            indices = list(range(self._n_taken, self._n_taken + size))
        else:
            self._n_ready_in_step[self.steps_taken] -= size
            indices = [heapq.heappop(self._ready) for _ in range(size)]
        self._n_taken += size
        if self._n_taken % self._step_size == 0:
            self._n_ready_in_step.pop(self.steps_taken - 1, None)
        return indices

    def finish(self, size: int) -> None:
        """The batch taken last, of `size` samples, is done."""
        self._n_finished += size

    def _steps(self, n_samples: int) -> int:
        """Whole steps of samples; the last one may be smaller."""
        return self._n_steps_in_all if n_samples == self._n_total else n_samples // self._step_size

    @property
    def _n_steps_in_all(self) -> int:
        assert self._n_total is not None
        return -(-self._n_total // self._step_size)

    def _window_size(self, window: int) -> int:
        left = self._n_seqs if self._n_total is None else self._n_total - window * self._n_seqs
        return max(0, min(self._n_seqs, left))

    def _streamed_batch_size(self, min_n_seqs: int, n_more: int) -> int:
        available = self._n_ready_in_step.get(self.steps_taken, 0) + n_more
        rest = self._step_size - self._n_taken % self._step_size
        if self._n_total is not None and self._n_total - self._n_taken < rest:  # no batch sizes need sum up to it
            rest = self._n_total - self._n_taken
            return min(available, self._n_seqs) if available >= min(min_n_seqs, rest) else 0
        for size in range(min(available, self._n_seqs), min_n_seqs - 1, -1):
            if is_sum_of_batches(rest - size, min_n_seqs, self._n_seqs):
                return size
        return 0


class RoundQueue:
    """The queue of a call that drops samples or precedes one that does; the costs are those of `CallQueue`."""

    def __init__(self, *, n_seqs: int, min_n_seqs: int | None) -> None:
        self._n_seqs = n_seqs
        self._min_n_seqs = min_n_seqs
        self._start = self._end = 0  # of the round
        self._n_left = 0  # samples of the round that are neither taken nor dropped
        self._n_rounds = 0  # of the step
        self._ready: list[int] = []  # heap
        self._window = 0  # in the round
        self._n_ready_in: dict[int, int] = {}  # window -> samples; these two without streaming only
        self._n_dropped_in: dict[int, int] = {}
        self._n_steps = 0
        self._before_batch: tuple[int, int] | None = None  # steps taken, and begun, before the batch under way

    @property
    def steps_taken(self) -> int:
        """Whole steps of samples taken that will get no more replacements."""
        return self._n_steps

    @property
    def steps_finished(self) -> int:
        """Whole steps of samples that the call is done with."""
        return self._n_steps if self._before_batch is None else self._before_batch[0]

    @property
    def steps_begun(self) -> int:
        """Steps whose samples, apart from replacements, are all taken."""
        is_begun = self._n_rounds > 1 or (self._n_rounds == 1 and self._n_left == 0)
        return self._n_steps + is_begun

    @property
    def steps_read(self) -> int:
        """Steps whose samples, apart from replacements, the call is done with; later calls have no say in it."""
        return self.steps_begun if self._before_batch is None else self._before_batch[1]

    def open(self, size: int) -> None:
        """Begin a round of the next `size` samples; all earlier ones are taken, or dropped."""
        assert self._n_left == 0
        self._start, self._end = self._end, self._end + size
        self._n_left = size
        self._n_rounds += 1
        self._window = 0
        self._n_ready_in.clear()
        self._n_dropped_in.clear()

    def close_step(self) -> None:
        """Note that the step needs no further round."""
        assert self._n_left == 0
        assert self._n_rounds > 0
        self._n_rounds = 0
        self._n_steps += 1

    def add_ready(self, *indices: int) -> bool:
        """All inputs of these samples exist; return whether that may have made a batch complete."""
        for index in indices:
            heapq.heappush(self._ready, index)
            self._count(self._n_ready_in, index)
        return self.batch_size() > 0

    def add_dropped(self, index: int) -> bool:
        """Note that the sample, not ready yet, was dropped; return True if that may have made a batch complete."""
        self._n_left -= 1
        self._count(self._n_dropped_in, index)
        return self.batch_size() > 0

    def batch_size(self) -> int:
        """Samples that the call could take now, or 0."""
        if self._min_n_seqs is not None:
            return self._streamed_batch_size(self._min_n_seqs)
        while self._start + self._window * self._n_seqs < self._end:
            size = min(self._n_seqs, self._end - self._start - self._window * self._n_seqs)
            n_dropped = self._n_dropped_in.get(self._window, 0)
            if n_dropped < size:
                is_complete = self._n_ready_in.get(self._window, 0) + n_dropped == size
                return size - n_dropped if is_complete else 0
            self._window += 1
        return 0

    def peek(self) -> list[int]:
        """The next batch: indices, oldest first. Only after `batch_size` said that there is one."""
        return heapq.nsmallest(self.batch_size(), self._ready)

    def take(self) -> list[int]:
        """Take the next batch, as `peek` tells it; the one before is done."""
        size = self.batch_size()
        self._before_batch = self._n_steps, self.steps_begun
        if self._min_n_seqs is None:
            # Later windows may be ready before this one, but their samples are younger.
            self._window += 1
        indices = [heapq.heappop(self._ready) for _ in range(size)]
        self._n_left -= size
        return indices

    def finish(self, size: int) -> None:
        """The batch taken last, of `size` samples, is done."""
        self._before_batch = None

    def _count(self, n_in: dict[int, int], index: int) -> None:
        window = (index - self._start) // self._n_seqs
        n_in[window] = n_in.get(window, 0) + 1

    def _streamed_batch_size(self, min_n_seqs: int) -> int:
        largest = min(len(self._ready), self._n_seqs)
        for size in range(largest, min_n_seqs - 1, -1):
            if is_sum_of_batches(self._n_left - size, min_n_seqs, self._n_seqs):
                return size
        # What was dropped is missing in the sum: the last batches of the round are then smaller.
        return largest if len(self._ready) == self._n_left else 0


def is_sum_of_batches(rest: int, min_n_seqs: int, n_seqs: int) -> bool:
    """Return True if `rest` samples are a sum of batches between `min_n_seqs` and `n_seqs`."""
    fewest_batches = -(-rest // n_seqs)
    return fewest_batches * min_n_seqs <= rest

"""Which samples one call takes next.

Samples are numbered from 0 in load order; N of them make a step. A call finishes a step before it takes samples of the
next one. A call that does not stream takes fixed windows: its j-th batch is the samples ``j * n_seqs`` to
``(j + 1) * n_seqs - 1``, whatever the order in which they become ready. A streaming call takes the oldest samples that
are ready, between `min_n_seqs` and `n_seqs` of them, and leaves no rest of a step that could not be taken like that.
Where the number of all samples is given, the last window, and with it the last step, may be smaller.
"""

from __future__ import annotations

import heapq


class CallQueue:
    """The ready and the taken samples of one call; every operation is amortised constant or logarithmic time.

    `n_total`: samples that there will ever be; None: whole steps of them.
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
        """The same as `steps_taken`: no replacements come later (see `round_queue`)."""
        return self.steps_taken

    def add_ready(self, index: int) -> bool:
        """All inputs of the sample exist; return whether that may have made a batch complete."""
        if self._min_n_seqs is None:
            window = index // self._n_seqs
            n_ready = self._n_ready_in_window.get(window, 0) + 1
            self._n_ready_in_window[window] = n_ready
            return n_ready == self._window_size(window)
        heapq.heappush(self._ready, index)
        step = index // self._step_size
        n_ready = self._n_ready_in_step.get(step, 0) + 1
        self._n_ready_in_step[step] = n_ready
        return n_ready >= self._min_n_seqs

    def batch_size(self) -> int:
        """Samples that the call could take now, or 0."""
        if self._min_n_seqs is None:
            window = self._n_taken // self._n_seqs
            size = self._window_size(window)
            return size if self._n_ready_in_window.get(window, 0) == size else 0
        return self._streamed_batch_size(self._min_n_seqs)

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

    def _streamed_batch_size(self, min_n_seqs: int) -> int:
        available = self._n_ready_in_step.get(self.steps_taken, 0)
        rest = self._step_size - self._n_taken % self._step_size
        if self._n_total is not None and self._n_total - self._n_taken < rest:  # no batch sizes need sum up to it
            rest = self._n_total - self._n_taken
            return min(available, self._n_seqs) if available >= min(min_n_seqs, rest) else 0
        for size in range(min(available, self._n_seqs), min_n_seqs - 1, -1):
            if is_sum_of_batches(rest - size, min_n_seqs, self._n_seqs):
                return size
        return 0


def is_sum_of_batches(rest: int, min_n_seqs: int, n_seqs: int) -> bool:
    """Whether `rest` samples are a sum of batches between `min_n_seqs` and `n_seqs`."""
    fewest_batches = -(-rest // n_seqs)
    return fewest_batches * min_n_seqs <= rest

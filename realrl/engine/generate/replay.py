"""Work that a device does again and again with equal shapes, recorded once and then launched as a whole.

A decode step has dozens of small kernels for each block. Launched one by one, they take the host longer than the device
needs for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

Work = Callable[[], None]
"""A function whose inputs and results are tensors that stay in place."""


class Recorder(Protocol):
    """A maker of records."""

    def warm_up(self, work: Work) -> None:
        """Do the work in a way that lets work of these shapes be recorded."""

    def record(self, work: Work) -> Work:
        """Return what does the work again, on the same tensors, without the host's part; the work is not done yet."""


class Replays:
    """Work by its shapes: done as it is the first time, recorded the second time, and replayed from then on.

    Args:
        recorder: maker of the records.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._warm: set[Hashable] = set()
        self._records: dict[Hashable, Work] = {}

    def run(self, shapes: Hashable, work: Work) -> None:
        """Do the work, by its record if there is one.

        Args:
            shapes: what decides the operations and the tensors of the work.
        """
        replay = self._records.get(shapes)
        if replay is None:
            if shapes not in self._warm:
                self._warm.add(shapes)
                self._recorder.warm_up(work)
                return
            replay = self._records[shapes] = self._recorder.record(work)
        replay()

    def forget(self) -> None:
        """Drop all records, since tensors that they use have moved; libraries stay warm."""
        self._records.clear()

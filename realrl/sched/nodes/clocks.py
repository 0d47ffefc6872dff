"""Estimate of how far another machine's clock is ahead of this one's, from messages and their answers.

A message goes out at `sent` and is answered at `answered`, on the other clock; the answer is heard at `heard`. The
other clock is ahead by answered - (sent + heard) / 2, and that is wrong by half the round trip at most, when one of the
two ways takes all of it (Cristian 1989). The quickest of the last answers counts, as in NTP's clock filter (RFC 5905).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_KEPT = 20  # measurements: beats of as many seconds, in which quartz clocks part by a millisecond at most
_SET_S = 1e-3  # a wall clock that moves by more than this against the other clock was set


@dataclass(frozen=True)
class _Measured:
    offset_s: float
    error_s: float


class ClockOffset:
    """The estimate of one machine.

    It changes only when the quickest answer excludes it. So it does not follow noise, which would let bars of a trace
    overlap, and is 0 where both clocks may be the same.

    Attributes:
        offset_s: seconds by which the other clock is ahead; 0 before the first measurement.
        error_s: most by which that is wrong; infinite before the first measurement.
    """

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.error_s = math.inf
        self._measured: deque[_Measured] = deque(maxlen=_KEPT)

    def note(self, *, sent_s: float, heard_s: float, answered_s: float, delay_s: float) -> None:
        """Take in a message and its answer.

        Args:
            sent_s, heard_s: on this machine's wall clock.
            answered_s: on the other machine's wall clock.
            delay_s: seconds between sending and hearing, on a clock that nobody sets.
        """
        if abs(heard_s - sent_s - delay_s) > _SET_S:
            self._measured.clear()
            return
        new = _Measured(answered_s - (sent_s + heard_s) / 2, delay_s / 2)
        if any(abs(new.offset_s - old.offset_s) > new.error_s + old.error_s for old in self._measured):
            self._measured.clear()  # one of the clocks was set
        self._measured.append(new)
        best = min(self._measured, key=lambda one: one.error_s)
        if abs(best.offset_s - self.offset_s) > best.error_s:
            self.offset_s = best.offset_s
        self.error_s = best.error_s + abs(best.offset_s - self.offset_s)

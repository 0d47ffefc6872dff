"""Judgement of silence: who was not heard for too long, on a clock that a pause of the judge does not advance.

A judge that was stopped itself (Ctrl-Z, a stalled machine) has heard nobody meanwhile, and whoever was stopped with it
could not speak. So its clock counts the time between two of its looks as one turn at most: after a pause everybody has
nearly a full limit again, and messages that waited are heard before the limit is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

LONGEST_TURN_S = 1.0
_TURNS_PER_LIMIT = 4  # at least: a pause costs a quarter of the limit at most

Who = TypeVar("Who", bound=Hashable)


class AwakeClock:
    """Seconds that a process has been running, as its looks at the time tell.

    Args:
        now_s: the time.
        longest_turn_s: most that the time between two looks counts; a running process looks more often.
    """

    def __init__(self, now_s: float, longest_turn_s: float = LONGEST_TURN_S) -> None:
        self.awake_s = 0.0
        self._last_look_s = now_s
        self._longest_turn_s = longest_turn_s

    def look(self, now_s: float) -> float:
        """Return the seconds awake at the time `now_s`."""
        self.awake_s += min(now_s - self._last_look_s, self._longest_turn_s)
        self._last_look_s = now_s
        return self.awake_s


class Silences(Generic[Who]):
    """Processes that are expected to be heard.

    Args:
        limit_s: silence that is too long.
        expected: the processes.
        now_s: the time; the silence of each begins here.
    """

    def __init__(self, limit_s: float, expected: Iterable[Who], *, now_s: float) -> None:
        self._limit_s = limit_s
        self._clock = AwakeClock(now_s, min(LONGEST_TURN_S, limit_s / _TURNS_PER_LIMIT))
        self._heard_s = dict.fromkeys(expected, 0.0)

    def hear(self, who: Who) -> None:
        """Note a sign of life; of a process that is not expected, or not any more, it means nothing."""
        if who in self._heard_s:
            self._heard_s[who] = self._clock.awake_s

    def forget(self, who: Who) -> None:
        """Expect nothing of a process any more."""
        self._heard_s.pop(who, None)

    def look(self, now_s: float) -> list[tuple[Who, float]]:
        """Return those that are silent for too long, with the seconds; each is told once.

        To be asked several times a second, when everything that has arrived was heard.
        """
        awake_s = self._clock.look(now_s)
        silent = [(who, awake_s - heard_s) for who, heard_s in self._heard_s.items()]
        too_long = [(who, silent_s) for who, silent_s in silent if silent_s > self._limit_s]
        for who, _ in too_long:
            self.forget(who)
        return too_long

"""Places in memory for the living samples: a column holds one property of all of them.

A sample has a slot, ``number % size``, and keeps it while it lives, unless the columns grow. Samples that were loaded
one after another lie side by side, so that a whole batch is a range of slots, and most operations on it are single
operations on a slice. `size` is a multiple of a step's samples: no step is cut in two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")

Slots = range | list[int]
"""Slots of some samples: side by side in the order of their numbers, or anyhow."""


class Columns:
    """Slots of the living samples, and columns, whose owners change them in place.

    Args:
        step_size: samples of a step.

    Attributes:
        slot_of: sample id -> slot.
        ids: slot -> sample id; "" where there is none.
        numbers: slot -> number of the sample.
    """

    def __init__(self, step_size: int) -> None:
        self._size = 2 * step_size
        self._bytes: list[tuple[bytearray, int]] = []  # with what a vacant slot has
        self._lists: list[tuple[list, object]] = []  # type: ignore[type-arg]
        self.slot_of: dict[str, int] = {}
        self.ids = self.values("")
        self.numbers = self.values(0)

    def bytes(self, vacant: int = 0) -> bytearray:
        """Return a new column of small numbers."""
        column = bytearray((vacant,)) * self._size
        self._bytes.append((column, vacant))
        return column

    def values(self, vacant: T) -> list[T]:
        """Return a new column of anything."""
        column = [vacant] * self._size
        self._lists.append((column, vacant))
        return column

    def add(self, first_number: int, ids: Sequence[str]) -> None:
        """Give slots to new samples, numbered from `first_number` on; all columns are vacant there."""
        numbers = range(first_number, first_number + len(ids))
        slots = self.at(numbers)
        while any(of(self.ids, slots)):
            self._grow()
            slots = self.at(numbers)
        put(self.ids, slots, ids)
        put(self.numbers, slots, numbers)
        self.slot_of.update(zip(ids, slots, strict=True))

    def at(self, numbers: Sequence[int]) -> Slots:
        """Return the slots of samples by their numbers, which ascend."""
        size, n = self._size, len(numbers)
        if n and numbers[-1] - numbers[0] == n - 1 and numbers[0] // size == numbers[-1] // size:
            start = numbers[0] % size
            return range(start, start + n)
        return [number % size for number in numbers]

    def slots(self, ids: Sequence[str]) -> Slots:
        """Return the slots of living samples.

        Raises:
            KeyError: one of them does not live.
        """
        slot_of, n = self.slot_of, len(ids)
        if n > 1:
            start = slot_of[ids[0]]
            if slot_of[ids[-1]] - start == n - 1 and tuple(self.ids[start : start + n]) == tuple(ids):
                return range(start, start + n)
        return [slot_of[sample_id] for sample_id in ids]

    def remove(self, slots: Slots) -> None:
        """Forget samples: all columns are vacant there again."""
        for sample_id in of(self.ids, slots):
            del self.slot_of[sample_id]
        for small, number in self._bytes:
            fill(small, slots, number)
        for column, vacant in self._lists:
            put(column, slots, [vacant] * len(slots))

    def _grow(self) -> None:
        old_size = self._size
        self._size *= 2
        moved = {slot: self.numbers[slot] % self._size for slot in self.slot_of.values()}
        for small, number in self._bytes:
            before = small[:]
            small[:] = bytearray((number,)) * self._size
            for slot, new in moved.items():
                small[new] = before[slot]
        for column, vacant in self._lists:
            held = column[:]
            column[:] = [vacant] * (2 * old_size)
            for slot, new in moved.items():
                column[new] = held[slot]
        for sample_id, slot in self.slot_of.items():
            self.slot_of[sample_id] = moved[slot]


# ---------------------------------------------------------------- some slots of a column


def of(column: Sequence[T], slots: Slots) -> Sequence[T]:
    """Return what a column holds there, in the order of the slots."""
    if isinstance(slots, range):
        return column[slots.start : slots.stop]
    return reader(slots)(column)


def reader(slots: Slots) -> Callable[[Sequence[T]], Sequence[T]]:
    """Return what reads many columns there faster than `of` does."""
    if isinstance(slots, range):
        return itemgetter(slice(slots.start, slots.stop))
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda column: [column[slot] for slot in slots]


def side_by_side(slots: list[int]) -> tuple[Slots, Callable[[Sequence[T]], Sequence[T]]]:
    """Return distinct slots as a range if they fill one, and what brings values of the slots into that order."""
    first, n = min(slots), len(slots)
    if n == 1 or max(slots) - first != n - 1:
        return slots, lambda values: values
    order = [0] * n
    for i, slot in enumerate(slots):
        order[slot - first] = i
    return range(first, first + n), itemgetter(*order)


def put(column: list[T], slots: Slots, values: Sequence[T]) -> None:
    """Write values into a column, one for each slot."""
    if isinstance(slots, range):
        assert len(values) == len(slots), f"{len(values)} values for {len(slots)} samples"
        column[slots.start : slots.stop] = values
    else:
        for slot, value in zip(slots, values, strict=True):
            column[slot] = value


def fill(column: bytearray, slots: Slots, number: int) -> None:
    """Write one number everywhere there."""
    if isinstance(slots, range):
        column[slots.start : slots.stop] = bytes((number,)) * len(slots)
    else:
        for slot in slots:
            column[slot] = number


def add(column: bytearray, slots: Slots, number: int) -> None:
    """Add a number, which may be negative, modulo 256."""
    if isinstance(slots, range):
        column[slots.start : slots.stop] = column[slots.start : slots.stop].translate(_sums(number))
    else:
        for slot in slots:
            column[slot] = (column[slot] + number) & 255


def where(column: bytearray, slots: Slots, number: int) -> Slots:
    """Return the slots at which a column holds a number."""
    if isinstance(slots, range):
        n = column.count(number, slots.start, slots.stop)
        if n in (0, len(slots)):
            return slots if n else []
    return [slot for slot in slots if column[slot] == number]


def is_everywhere(column: bytearray, slots: Slots, number: int) -> bool:
    """Return True if a column holds a number at all slots."""
    return len(where(column, slots, number)) == len(slots)


@cache
def _sums(number: int) -> bytes:
    return bytes((value + number) & 255 for value in range(256))

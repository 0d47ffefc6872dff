"""Memory of a device over the time of a timeline: the most that each call may need there, and less between calls.

Invariants of `series_of`:
    - pieces follow each other without a gap, from the first tick to the last;
    - during a part of a call, its hooks included, they have the usage of the call;
    - between two calls they have what both have of parameters, optimizer state and the like, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from realrl.plan.memory.plan import SAVE, MemoryPlan, Usage
from realrl.planner.page.timeline import TICKS, Group, Row, Work

FIELDS = ("runtime", "parameters", "optimizer", "gradients", "copies", "cache", "activations", "rows", "host")
"""The fields of `Usage`, as they are stacked: what stays the longest is below."""
assert {*FIELDS} == {part.name for part in fields(Usage)}
_STAYING = [name in ("parameters", "optimizer", "gradients", "rows", "runtime", "host") for name in FIELDS]

Bytes = tuple[int, ...]
"""Bytes by `FIELDS`."""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a run's devices.

    Attributes:
        capacity: bytes that a plan may use of a device.
        is_host: devices are CPUs, where host memory is the same memory.
    """

    plan: MemoryPlan
    capacity: int
    is_host: bool = False

    def needs(self, usage: Usage) -> int:
        """Return the bytes of a device that a usage takes."""
        return usage.total + (usage.host if self.is_host else 0)

    def peak(self, rank: int) -> tuple[str, Usage] | None:
        """Return the call in which a rank needs the most, and its usage; None where nothing runs."""
        found = [(name, by_rank[rank]) for name, by_rank in self.plan.calls.items() if rank in by_rank]
        return max(found, key=lambda one: self.needs(one[1]), default=None)

    def fullest(self, ranks: Sequence[int]) -> int:
        """Return the rank that needs the most, the first of several."""
        return max(ranks, key=lambda rank: (self._most(rank), -rank))

    def _most(self, rank: int) -> int:
        peak = self.peak(rank)
        return -1 if peak is None else self.needs(peak[1])

    def by_call(self, rank: int) -> dict[str, Bytes]:
        """Return call -> bytes on a rank; host memory counts on CPUs alone."""
        return {name: self._bytes(by_rank[rank]) for name, by_rank in self.plan.calls.items() if rank in by_rank}

    def _bytes(self, usage: Usage) -> Bytes:
        counts = (name != "host" or self.is_host for name in FIELDS)
        return tuple(getattr(usage, name) if is_counted else 0 for name, is_counted in zip(FIELDS, counts, strict=True))


class Piece(NamedTuple):
    """A stretch of time with the same memory."""

    begin: int
    end: int
    n_bytes: Bytes


def series_of(row: Row, works: Sequence[Work], by_call: Mapping[str, Bytes]) -> list[Piece]:
    """Return the memory of a row's device over the window.

    Args:
        by_call: call -> bytes, from `DeviceMemory.by_call`.
    """
    found: list[Piece] = []
    for bar in row.bars:
        name = works[bar.work].name
        n_bytes = by_call.get(SAVE if works[bar.work].kind == "save" else name)
        if n_bytes is not None:
            found.append(Piece(bar.begin, bar.end, n_bytes))
    if not found:
        return []
    pieces: list[Piece] = []
    last, at = found[-1], 0  # the steps repeat, so the last of the window stands for the one ahead of it
    for piece in found:
        if piece.begin > at:
            both = zip(last.n_bytes, piece.n_bytes, _STAYING, strict=True)
            pieces.append(Piece(at, piece.begin, tuple(min(a, b) if stays else 0 for a, b, stays in both)))
        if pieces and pieces[-1].n_bytes == piece.n_bytes and pieces[-1].end == piece.begin:
            piece = Piece(pieces.pop().begin, piece.end, piece.n_bytes)
        pieces.append(piece)
        last, at = piece, piece.end
    if at < TICKS:
        both = zip(last.n_bytes, found[0].n_bytes, _STAYING, strict=True)
        pieces.append(Piece(at, TICKS, tuple(min(a, b) if stays else 0 for a, b, stays in both)))
    return pieces


def fullest_row(group: Group, memory: DeviceMemory) -> tuple[Row, int]:
    """Return the row of a group's fullest rank, and this rank."""
    rank = memory.fullest(group.ranks)
    return next(row for row in group.rows if rank in row.ranks), rank

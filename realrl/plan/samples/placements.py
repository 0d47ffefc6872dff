"""Places of the rows of samples: the ranks that have them, key by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import cast

import msgspec


class Placement(msgspec.Struct, frozen=True, gc=False):  # a struct: there are millions of them, compared and hashed
    """Global ranks that have, or will have, the rows of one (sample, key).

    Ranks of `held` have them. Ranks of `incoming` fetch them before a call that is dispatched but not finished.
    """

    held: frozenset[int]
    incoming: frozenset[int] = frozenset()

    @property
    def present(self) -> frozenset[int]:
        """Ranks that have the rows, or will before anything dispatched later can run there."""
        return self.held | self.incoming if self.incoming else self.held


class PlacementColumn(Mapping[str, Placement]):
    """Sample id -> placement of one key, in a column whose owner goes on writing it.

    Args:
        slot_of: sample id -> place in the column.
        column: placements; None: no rank has the rows.
    """

    __slots__ = ("column", "slot_of")

    def __init__(self, slot_of: Mapping[str, int], column: Sequence[Placement | None]) -> None:
        self.slot_of = slot_of
        self.column = column

    def __getitem__(self, sample_id: str) -> Placement:
        placement = self.column[self.slot_of[sample_id]]
        if placement is None:
            raise KeyError(sample_id)
        return placement

    def __iter__(self) -> Iterator[str]:
        return (sample_id for sample_id, slot in self.slot_of.items() if self.column[slot] is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def lying(
    placements: Mapping[str, Mapping[str, Placement]], ids: Sequence[str]
) -> list[tuple[tuple[str, ...], Sequence[Placement]]]:
    """Return the placement of each sample, for keys, one after another, whose samples lie alike.

    Raises:
        KeyError: a sample has no placement.
    """
    found: list[tuple[tuple[str, ...], Sequence[Placement]]] = []
    slot_of: Mapping[str, int] | None = None
    gather: Callable[[Sequence[Placement | None]], tuple[Placement | None, ...]] = tuple
    for key, placement_of in placements.items():
        if len(ids) > 1 and isinstance(placement_of, PlacementColumn):
            if placement_of.slot_of is not slot_of:
                slot_of = placement_of.slot_of
                gather = itemgetter(*[slot_of[sample_id] for sample_id in ids])
            gathered = gather(placement_of.column)
            if not all(gathered):
                raise KeyError(ids[gathered.index(None)])
            lie = cast("tuple[Placement, ...]", gathered)
        else:
            lie = tuple([placement_of[sample_id] for sample_id in ids])
        if found and found[-1][1] == lie:
            found[-1] = (*found[-1][0], key), lie
        else:
            found.append(((key,), lie))
    return found

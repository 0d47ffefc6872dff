"""Rows of the living samples: where those of each key are, and how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import repeat

from realrl.plan.samples.placements import Placement
from realrl.plan.samples.transfer import Arrival
from realrl.sched.messages import KeySchema, Per
from realrl.sched.samples.columns import Columns, Slots, put, reader


@cache
def on_rank(rank: int) -> Placement:
    """Return the placement of rows that one rank alone has: one object, which is quickly compared."""
    return Placement(frozenset((rank,)))


class Rows:
    """Placements and lengths, in columns.

    Attributes:
        placements: key -> column; None where no rank has the rows.
        schemas: key -> the last schema that a rank told.
    """

    def __init__(self, columns: Columns) -> None:
        self.placements: dict[str, list[Placement | None]] = {}
        self.schemas: dict[str, KeySchema] = {}
        self._columns = columns
        self._n_rows: dict[str, list[int]] = {}  # of keys that count as tokens

    def are_known(self, keys: Iterable[str], slots: Slots) -> bool:
        """Return True if some rank has rows of one of these keys for one of these samples."""
        read = reader(slots)
        return any(any(read(self.placements[key])) for key in keys if key in self.placements)

    def add(
        self,
        key: str,
        schema: KeySchema,
        slots: Slots,
        lie: Sequence[Placement],
        seqlens: Iterable[tuple[int, ...]],
    ) -> None:
        """Note where new rows of a key are, and how many there are."""
        if key not in self.schemas:
            self.placements[key] = self._columns.values(None)
        self.schemas[key] = schema
        put(self.placements[key], slots, lie)
        if _counts_as_tokens(schema):
            if key not in self._n_rows:
                self._n_rows[key] = self._columns.values(0)
            put(self._n_rows[key], slots, [*map(sum, seqlens)])

    def number_keys(self) -> list[str]:
        """Return the keys with one number per sequence or per sample, as `SampleBuffer.number_keys` does."""
        rows = self.schemas.items()
        return sorted(k for k, schema in rows if schema.per in (Per.SEQUENCE, Per.SAMPLE) and not schema.trailing)

    def holders(self, key: str, slot: int) -> frozenset[int]:
        """Return the ranks that hold a key's rows of a sample."""
        placement = self.placements[key][slot] if key in self.placements else None
        return frozenset() if placement is None else placement.held

    def token_counts(self, slots: Slots, keys: Iterable[str] | None = None) -> list[int]:
        """Return tokens of each sample, as `SampleBuffer.token_counts` does."""
        read = reader(slots)
        counts: list[Sequence[int]] = []
        for key in self.schemas if keys is None else keys:
            if _counts_as_tokens(self.schemas[key]):
                n_rows = read(self._n_rows[key])
                if n_rows not in counts:
                    counts.append(n_rows)
        return list(map(max, repeat(1, len(slots)), *counts)) if counts else [1] * len(slots)

    def lying_on(self, ids: Sequence[str], slots: Slots) -> Iterator[tuple[frozenset[int], list[str]]]:
        """Yield ranks that have rows, or will, of some key, and samples of which they do, which lie alike."""
        lay: list[Sequence[Placement | None]] = []
        read = reader(slots)
        for column in self.placements.values():
            found = read(column)
            if found not in lay:  # what many keys have alike is looked at once
                lay.append(found)
        ids_on: dict[tuple[int, ...], list[str]] = {}
        # By number: placements are hashed and compared once for each object, of which many samples have the same.
        number_of, same, present = dict[int, int](), dict[Placement | None, int](), list[frozenset[int]]()
        columns: list[list[int]] = []
        for found in lay:
            for one in found:
                if id(one) not in number_of:
                    number = number_of[id(one)] = same.setdefault(one, len(present))
                    if number == len(present):
                        present.append(frozenset() if one is None else one.present)
            columns.append([number_of[id(one)] for one in found])
        for sample_id, numbers in zip(ids, zip(*columns)):
            if numbers in ids_on:
                ids_on[numbers].append(sample_id)
            else:
                ids_on[numbers] = [sample_id]
        for numbers, members in ids_on.items():
            yield frozenset[int]().union(*[present[number] for number in numbers]), members

    def replace(
        self,
        arrivals: Iterable[Arrival],
        change: Callable[[Placement, frozenset[int]], Placement],
    ) -> None:
        """Change where the rows that arrive are.

        Args:
            change: ``change(placement, targets)`` -> the new placement.
        """
        # Rows that lie alike share one object. Ids of objects, which are kept beside: hashing them takes longer.
        changed: dict[tuple[int, tuple[int, ...]], tuple[Placement, Placement]] = {}
        of_keys: dict[tuple[str, ...], list[Arrival]] = {}
        for arrival in arrivals:
            of_keys.setdefault(arrival.keys, []).append(arrival)
        for keys, of_these in of_keys.items():
            slots = [self._columns.slot_of[sample_id] for arrival in of_these for sample_id in arrival.ids]
            last: Sequence[Placement | None] = ()
            new: list[Placement] = []
            read = reader(slots)
            for key in keys:
                lie = read(self.placements[key])
                if lie != last:
                    last, new = lie, []
                    for arrival in of_these:
                        targets, first, n = arrival.targets, len(new), len(arrival.ids)
                        alike = lie[first : first + n]
                        is_same = alike.count(alike[0]) == n
                        for old in alike[:1] if is_same else alike:
                            assert old is not None
                            found = changed.get((id(old), targets))
                            if found is None:
                                found = changed[id(old), targets] = old, change(old, frozenset(targets))
                            new.append(found[1])
                        if is_same and n > 1:
                            new.extend(repeat(new[-1], n - 1))
                put(self.placements[key], slots, new)


def _counts_as_tokens(schema: KeySchema) -> bool:
    return schema.per in (Per.TOKEN, Per.TRANSITION) and schema.dtype != "uint8"

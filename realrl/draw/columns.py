"""The order of things in each column, and their heights: a layered drawing after Sugiyama, Tagawa and Toda (1981).

Calls stand in even columns and pills in odd ones. A branch that passes columns has a *bend* in each of them, so every
link joins neighbouring columns. The order in each column is found by sweeps of barycentres and swaps of neighbours from
several starts, keeping the arrangement with the fewest crossings. The heights come from least squares, then from least
absolute distances, each column being solved exactly by pooling adjacent violators, and at last by making links level
one by one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from realrl.draw.geometry import spread

_STARTS, _SWEEPS = 16, 8
_SMOOTH, _STRAIGHTEN, _SNAPS = 40, 60, 12


class ItemKind(Enum):
    """What stands in a column."""

    CARD = "card"
    PILL = "pill"
    BEND = "bend"


_ROOM = {ItemKind.CARD: 38.0, ItemKind.PILL: 13.0, ItemKind.BEND: 15.0}


@dataclass(frozen=True)
class Item:
    """Something that needs a height.

    Attributes:
        kind: what it is.
        column: from 0.
        width: of the item alone, not of its column.
        up, down: how much of it lies above and below the line where links meet it.
        ports: height over which several links spread on a side (see `geometry.spread`).
    """

    kind: ItemKind
    column: int
    width: float = 0.0
    up: float = 0.0
    down: float = 0.0
    ports: float = 0.0


@dataclass(frozen=True)
class Links:
    """For each item, its neighbours in the column before and in the column after."""

    before: Mapping[str, Sequence[str]]
    after: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, items: Mapping[str, Item], pairs: Sequence[tuple[str, str]]) -> Links:
        """Both directions of a list of pairs."""
        before: dict[str, list[str]] = {name: [] for name in items}
        after: dict[str, list[str]] = {name: [] for name in items}
        for a, b in pairs:
            after[a].append(b)
            before[b].append(a)
        return cls(before, after)


def arrange(
    items: Mapping[str, Item], pairs: Sequence[tuple[str, str]], loops: Sequence[tuple[str, str]] = ()
) -> dict[str, float]:
    """Height of every item.

    Args:
        items: name -> item; the order decides where nothing else does.
        pairs: links between items of neighbouring columns, left to right.
        loops: pairs of cards that will be joined around the columns, and should stand at the same end of theirs.

    Returns:
        name -> y. In a column, items do not overlap and keep some room between each other.
    """
    links = Links.of(items, pairs)
    n_columns = max(item.column for item in items.values()) + 1
    start = [[name for name, item in items.items() if item.column == c] for c in range(n_columns)]
    columns = _order(items, start, links, loops)
    return _heights(items, columns, links)


# ---------------------------------------------------------------- order


def crossings(columns: Sequence[Sequence[str]], links: Links) -> int:
    """Number of pairs of links that cross."""
    return sum(_crossings_after(a, b, links) for a, b in itertools.pairwise(columns))


def _crossings_after(left: Sequence[str], right: Sequence[str], links: Links) -> int:
    place = {name: i for i, name in enumerate(right)}
    ends = [end for name in left for end in sorted(place[other] for other in links.after[name])]
    return sum(a > b for a, b in itertools.combinations(ends, 2))


def _order(
    items: Mapping[str, Item], start: Sequence[Sequence[str]], links: Links, loops: Sequence[tuple[str, str]]
) -> list[list[str]]:
    """The best of all sweeps from all starts: the fewest crossings, then the fewest cards in the way of loops."""
    shuffler = random.Random(0)  # the same picture every time
    best, least = [list(column) for column in start], (math.inf, math.inf)
    for turn in range(_STARTS):
        columns = [list(column) for column in start]
        for column in columns if turn else ():
            shuffler.shuffle(column)
        for sweep in range(_SWEEPS):
            _sweep(columns, links, forward=sweep % 2 == 0)
            _swap(columns, links)
            cost = crossings(columns, links), obstacles(items, columns, loops)
            if cost < least:
                best, least = [list(column) for column in columns], cost
        if least == (0, 0):
            break
    return best


def obstacles(items: Mapping[str, Item], columns: Sequence[Sequence[str]], loops: Sequence[tuple[str, str]]) -> int:
    """How many cards stand between the ends of loops and the nearer side, above or below, of the columns."""
    above, below = {}, {}
    for column in columns:
        cards = [name for name in column if items[name].kind is ItemKind.CARD]
        for i, name in enumerate(cards):
            above[name], below[name] = i, len(cards) - 1 - i
    return sum(min(above[a] + above[b], below[a] + below[b]) for a, b in loops)


def _sweep(columns: list[list[str]], links: Links, *, forward: bool) -> None:
    """Sort each column by the mean place of the neighbours in the column that was sorted before it."""
    indices = range(1, len(columns)) if forward else range(len(columns) - 2, -1, -1)
    neighbours = links.before if forward else links.after
    for i in indices:
        fixed = columns[i - 1 if forward else i + 1]
        place = {name: j for j, name in enumerate(fixed)}
        current = {name: j for j, name in enumerate(columns[i])}

        def mean(name: str, place: dict[str, int] = place, current: dict[str, int] = current) -> float:
            near = [place[other] for other in neighbours[name]]
            return sum(near) / len(near) if near else float(current[name])

        columns[i].sort(key=mean)


def _swap(columns: list[list[str]], links: Links) -> None:
    """Swap neighbours while that removes crossings."""
    for i, column in enumerate(columns):
        left = {name: j for j, name in enumerate(columns[i - 1])} if i else {}
        right = {name: j for j, name in enumerate(columns[i + 1])} if i + 1 < len(columns) else {}
        improved = True
        while improved:
            improved = False
            for j in range(len(column) - 1):
                a, b = column[j], column[j + 1]
                now = _pair(links.before[a], links.before[b], left) + _pair(links.after[a], links.after[b], right)
                then = _pair(links.before[b], links.before[a], left) + _pair(links.after[b], links.after[a], right)
                if then < now:
                    column[j], column[j + 1] = b, a
                    improved = True


def _pair(upper: Sequence[str], lower: Sequence[str], place: Mapping[str, int]) -> int:
    """Crossings between the links of two neighbours of a column, on one side."""
    return sum(place[a] > place[b] for a in upper for b in lower)


# ---------------------------------------------------------------- heights


@dataclass(frozen=True)
class _Spring:
    """A link as one of its ends feels it: it would be level at the height of `other` plus `shift`."""

    other: str
    shift: float
    stiffness: float


def _heights(items: Mapping[str, Item], columns: Sequence[Sequence[str]], links: Links) -> dict[str, float]:
    y: dict[str, float] = {}
    for column in columns:
        at = 0.0
        for i, name in enumerate(column):
            at += _separation(items, column[i - 1], name) if i else 0.0
            y[name] = at
        for name in column:
            y[name] -= at / 2
    springs = _springs(items, columns, links)
    for turn in range(_SMOOTH + _STRAIGHTEN):
        least = None if turn < _SMOOTH else max(8.0 * 0.9 ** (turn - _SMOOTH), 0.02)
        for column in columns if turn % 2 == 0 else columns[::-1]:
            _settle(items, column, springs, y, least)
    for turn in range(_SNAPS):
        for column in columns if turn % 2 == 0 else columns[::-1]:
            _snap(items, column, springs, y)
    return y


def _springs(items: Mapping[str, Item], columns: Sequence[Sequence[str]], links: Links) -> dict[str, list[_Spring]]:
    """For each item, the links that pull at it; ports are in the order of the neighbouring column."""
    place = {name: i for column in columns for i, name in enumerate(column)}
    offset: dict[tuple[str, str], float] = {}
    for name, item in items.items():
        for side in (links.before[name], links.after[name]):
            near = sorted(side, key=place.__getitem__)
            offset.update(
                ((name, other), shift) for other, shift in zip(near, spread(len(near), item.ports), strict=True)
            )
    return {
        name: [
            _Spring(other, offset[other, name] - offset[name, other], _stiffness(items[name], items[other]))
            for other in (*links.before[name], *links.after[name])
        ]
        for name in items
    }


def _separation(items: Mapping[str, Item], above: str, below: str) -> float:
    a, b = items[above], items[below]
    return a.down + b.up + (_ROOM[a.kind] + _ROOM[b.kind]) / 2


def _stiffness(a: Item, b: Item) -> float:
    """Long branches are kept straight first, then the direct way from call to call."""
    bends = (a.kind is ItemKind.BEND) + (b.kind is ItemKind.BEND)
    return (2.0, 1.0, 8.0)[bends]


def _settle(
    items: Mapping[str, Item],
    column: Sequence[str],
    springs: Mapping[str, Sequence[_Spring]],
    y: dict[str, float],
    least: float | None,
) -> None:
    """Move one column to where its links are shortest, given the others.

    Squares are minimised when `least` is None. Else each is weighted by 1 / distance, at least `least`, which turns
    their sum into one of absolute values.
    """
    wanted, weights, offsets = [], [], []
    offset = 0.0
    for i, name in enumerate(column):
        if i:
            offset += _separation(items, column[i - 1], name)
        total = pull = 0.0
        for spring in springs[name]:
            target = y[spring.other] + spring.shift
            weight = spring.stiffness if least is None else spring.stiffness / max(abs(y[name] - target), least)
            total += weight
            pull += weight * target
        wanted.append((pull / total if total else y[name]) - offset)
        weights.append(total or 1e-3)
        offsets.append(offset)
    for name, level, offset in zip(column, pool(wanted, weights), offsets, strict=True):
        y[name] = level + offset


def _snap(
    items: Mapping[str, Item], column: Sequence[str], springs: Mapping[str, Sequence[_Spring]], y: dict[str, float]
) -> None:
    """Make one link of each item level, where the neighbours in the column leave room: the best of its links."""
    for i, name in enumerate(column):
        low = y[column[i - 1]] + _separation(items, column[i - 1], name) if i else -math.inf
        high = y[column[i + 1]] - _separation(items, name, column[i + 1]) if i + 1 < len(column) else math.inf
        targets = [(y[spring.other] + spring.shift, spring.stiffness) for spring in springs[name]]
        if targets:
            y[name] = min(
                (min(max(target, low), high) for target, _ in targets),
                key=lambda at: sum(stiffness * abs(at - target) for target, stiffness in targets),
            )


def pool(wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence closest to `wanted` in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # level, weight, length
    for level, weight in zip(wanted, weights, strict=True):
        length = 1
        while blocks and blocks[-1][0] > level:
            previous, previous_weight, previous_length = blocks.pop()
            level = (previous * previous_weight + level * weight) / (previous_weight + weight)
            weight += previous_weight
            length += previous_length
        blocks.append((level, weight, length))
    return [level for level, _, length in blocks for _ in range(length)]

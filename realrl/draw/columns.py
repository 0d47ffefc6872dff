"""The order of items in each column, and their heights: a layered drawing after Sugiyama, Tagawa and Toda (1981).

Calls stand in even columns and pills in odd ones. A branch that passes columns has a *bend* in each of them, so every
link joins neighbouring columns. Sweeps of barycentres from several starts give candidate orders; the one with the
fewest crossings is taken. The heights solve a linear programme, in which links pull to be level and items keep their
distance (Gansner, Koutsofios, North and Vo 1993); its dual is a flow of least cost.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

import networkx as nx

from realrl.draw.geometry import spread

_STARTS, _SWEEPS = 32, 4
_GRID = 0.1  # heights are whole multiples of half of it
_ORIGIN = ""  # no item has this name


class ItemKind(Enum):
    """Kind of item in a column."""

    CARD = "card"
    PILL = "pill"
    BEND = "bend"


_ROOM = {ItemKind.CARD: 38.0, ItemKind.PILL: 13.0, ItemKind.BEND: 15.0}


@dataclass(frozen=True)
class Item:
    """A card, pill or bend, which needs a height.

    Attributes:
        column: number from 0.
        width: width of the item alone, not of its column.
        up, down: extent above and below the line where links meet it.
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
    """Neighbours of each item in the column before and in the column after."""

    before: Mapping[str, Sequence[str]]
    after: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, items: Mapping[str, Item], pairs: Sequence[tuple[str, str]]) -> Links:
        """Return both directions of a list of pairs."""
        before: dict[str, list[str]] = {name: [] for name in items}
        after: dict[str, list[str]] = {name: [] for name in items}
        for a, b in pairs:
            after[a].append(b)
            before[b].append(a)
        return cls(before, after)


def arrange(
    items: Mapping[str, Item], pairs: Sequence[tuple[str, str]], loops: Sequence[tuple[str, str]] = ()
) -> dict[str, float]:
    """Return the height of every item.

    Args:
        items: name -> item; the order breaks ties.
        pairs: links between items of neighbouring columns, left to right.
        loops: pairs of cards that will be joined around the columns, and should stand at the same end of theirs.

    Returns:
        name -> y. In a column, items do not overlap and keep some room between each other.
    """
    links = Links.of(items, pairs)
    n_columns = max(item.column for item in items.values()) + 1
    start = [[name for name, item in items.items() if item.column == c] for c in range(n_columns)]
    columns = min(_orders(start, links), key=lambda order: (crossings(order, links), obstacles(items, order, loops)))
    return _heights(items, columns, links)


# ---------------------------------------------------------------- order


def _orders(start: Sequence[Sequence[str]], links: Links) -> Iterator[list[list[str]]]:
    """Yield the orders after each sweep, to and fro, from the given columns and from random orders of them."""
    shuffler = random.Random(0)  # the same picture every time
    for turn in range(_STARTS):
        columns = [shuffler.sample(column, len(column)) if turn else list(column) for column in start]
        for sweep in range(_SWEEPS):
            columns = _swept(columns, links, forward=sweep % 2 == 0)
            yield columns


def _swept(columns: Sequence[Sequence[str]], links: Links, *, forward: bool) -> list[list[str]]:
    """Return each column sorted by the mean place of the neighbours in the column that was sorted before it."""
    neighbours = links.before if forward else links.after
    swept: list[list[str]] = []
    place: dict[str, int] = {}
    for column in columns if forward else reversed(columns):
        near = {name: [place[other] for other in neighbours[name]] for name in column}
        mean = {name: fmean(near[name]) if near[name] else i for i, name in enumerate(column)}
        swept.append(sorted(column, key=mean.__getitem__))
        place = {name: i for i, name in enumerate(swept[-1])}
    return swept if forward else swept[::-1]


def crossings(columns: Sequence[Sequence[str]], links: Links) -> int:
    """Return the number of pairs of links that cross."""
    return sum(_crossings_after(a, b, links) for a, b in itertools.pairwise(columns))


def _crossings_after(left: Sequence[str], right: Sequence[str], links: Links) -> int:
    place = {name: i for i, name in enumerate(right)}
    ends = [end for name in left for end in sorted(place[other] for other in links.after[name])]
    return sum(a > b for a, b in itertools.combinations(ends, 2))


def obstacles(items: Mapping[str, Item], columns: Sequence[Sequence[str]], loops: Sequence[tuple[str, str]]) -> int:
    """Return the number of cards between the ends of loops and the nearer side, above or below, of the columns."""
    above, below = {}, {}
    for column in columns:
        cards = [name for name in column if items[name].kind is ItemKind.CARD]
        for i, name in enumerate(cards):
            above[name], below[name] = i, len(cards) - 1 - i
    return sum(min(above[a] + above[b], below[a] + below[b]) for a, b in loops)


# ---------------------------------------------------------------- heights


def _heights(items: Mapping[str, Item], columns: Sequence[Sequence[str]], links: Links) -> dict[str, float]:
    """Return the heights at which links are the most level, taken together; the middle where there is a choice."""
    network = nx.MultiDiGraph()  # u -> v of weight w: y[v] - y[u] is at most w, or else each unit costs the capacity
    network.add_nodes_from(items)
    for column in columns:
        for above, below in itertools.pairwise(column):
            network.add_edge(below, above, weight=-math.ceil(separation(items[above], items[below]) / _GRID))
    for (a, b), rise in level_rises(items, columns, links).items():
        pull = stiffness(items[a], items[b])
        network.add_edge(a, b, weight=round(rise / _GRID), capacity=pull)
        network.add_edge(b, a, weight=-round(rise / _GRID), capacity=pull)
    _, flow = nx.network_simplex(network)
    bounds = []  # the heights that keep to all of them are the best, and no others
    for a, b, key, edge in network.edges(keys=True, data=True):
        if flow[a][b][key] < edge.get("capacity", math.inf):
            bounds.append((a, b, edge["weight"]))
        if flow[a][b][key] > 0:
            bounds.append((b, a, -edge["weight"]))
    low, high = _farthest(items, bounds), _farthest(items, [(b, a, weight) for a, b, weight in bounds])
    return {name: (low[name] - high[name]) / 2 * _GRID for name in items}


def _farthest(names: Iterable[str], bounds: Iterable[tuple[str, str, int]]) -> Mapping[str, int]:
    """Return the greatest numbers up to 0 that keep to bounds ``(a, b, most)`` of ``number[b] - number[a]``."""
    network = nx.MultiDiGraph()
    network.add_weighted_edges_from([*((_ORIGIN, name, 0) for name in names), *bounds])
    distances: Mapping[str, int] = nx.single_source_bellman_ford_path_length(network, _ORIGIN)
    return distances


def level_rises(
    items: Mapping[str, Item], columns: Iterable[Sequence[str]], links: Links
) -> dict[tuple[str, str], float]:
    """Return, for each level link, the drop from its left item's height to its right item's.

    Links spread over the side of an item, in the order of the neighbouring column.
    """
    place = {name: i for column in columns for i, name in enumerate(column)}
    rises: dict[tuple[str, str], float] = {}
    for name, item in items.items():
        before, after = (sorted(side[name], key=place.__getitem__) for side in (links.before, links.after))
        for other, shift in zip(before, spread(len(before), item.ports), strict=True):
            rises[other, name] = rises.get((other, name), 0.0) - shift
        for other, shift in zip(after, spread(len(after), item.ports), strict=True):
            rises[name, other] = rises.get((name, other), 0.0) + shift
    return rises


def separation(above: Item, below: Item) -> float:
    """Return the least distance of two neighbours in a column."""
    return above.down + below.up + (_ROOM[above.kind] + _ROOM[below.kind]) / 2


def stiffness(left: Item, right: Item) -> int:
    """Return a link's weight: links between bends count most, then links without bends; leaving a card adds one."""
    bends = (left.kind is ItemKind.BEND) + (right.kind is ItemKind.BEND)
    return (20, 10, 80)[bends] + (left.kind is ItemKind.CARD)

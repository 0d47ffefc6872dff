"""Layout of a scene: places of cards and pills, and the path of each branch.

Columns run from left to right in the order of the data: calls in even ones, pills in odd ones. Loops for new parameters
run back above and below them. The columns decide the origin; `Drawing.bounds` holds everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from realrl.draw.columns import Item, ItemKind, arrange
from realrl.draw.geometry import Point, Rect, bounding, flow, head
from realrl.draw.loops import HEAD_SIZE, LoopPath, loop_ports, plan_loops, route_loops
from realrl.draw.ports import OCTAGON_CUT, PortRequest, Ports, Side, place_ports, port_room
from realrl.draw.scene import PLATE_HEIGHT, Card, Pill, Scene

_GAP, _MOST_EXTRA_GAP, _GAP_PER_RISE, _GAP_PER_LOOP = 42.0, 36.0, 0.16, 8.0


@dataclass(frozen=True)
class PlacedCard:
    """A card; `box` is its shape, `plate` the box of its allocation, right below the shape."""

    card: Card
    box: Rect
    plate: Rect | None

    @property
    def foot(self) -> float:
        """Lower end (y) of shape and plate."""
        return self.box.bottom if self.plate is None else self.plate.bottom


@dataclass(frozen=True)
class PlacedPill:
    """A pill with its place."""

    pill: Pill
    box: Rect


@dataclass(frozen=True)
class Branch:
    """The path of one data edge: from a producer, through a pill, to one consumer."""

    pill: Pill
    consumer: str
    path: str
    head: str
    bounds: Rect


@dataclass(frozen=True)
class Drawing:
    """A scene with places."""

    scene: Scene
    cards: tuple[PlacedCard, ...]
    pills: tuple[PlacedPill, ...]
    branches: tuple[Branch, ...]
    loops: tuple[LoopPath, ...]

    @property
    def bounds(self) -> Rect:
        """The box around everything."""
        return bounding([_solid(self.cards, self.pills, self.branches), *(loop.bounds for loop in self.loops)])


@dataclass(frozen=True)
class _Chain:
    """One data edge as items: `names` are its pill and its bends, left to right."""

    pill: int
    consumer: str
    names: tuple[str, ...]

    @property
    def line(self) -> str:
        """Name of the edge's line at a card; branches of one pill leave their producer as one line."""
        return f"pill {self.pill}"


def lay_out(scene: Scene) -> Drawing:
    """Return the drawing of a scene, with places for all its parts."""
    chains = list(_chains(scene))
    items = _items(scene, chains)
    pairs = _pairs(scene, chains)
    y = arrange(items, pairs, [(_card_item(loop.before), _card_item(loop.after)) for loop in scene.loops])
    x = _columns_x(items, pairs, y, scene)
    cards = {name: _place_card(card, items[_card_item(name)], x, y) for name, card in scene.cards.items()}
    pills = [_place_pill(pill, items[f"pill {i}"], x, y[f"pill {i}"]) for i, pill in enumerate(scene.pills)]
    boxes = {name: placed.box for name, placed in cards.items()}
    loops = plan_loops(scene.loops, boxes)
    requests = [*_data_ports(scene, chains, y), *loop_ports(loops, boxes)]
    mfcs = {name: card.mfc for name, card in scene.cards.items() if card.mfc is not None}
    ports = place_ports(requests, boxes, mfcs)
    branches = [_branch(scene, chain, ports, (items, x, y)) for chain in chains]
    solid = _solid(cards.values(), pills, branches)
    feet = {name: placed.foot for name, placed in cards.items()}
    routed = route_loops(loops, ports, boxes, feet, (solid.y, solid.bottom))
    return Drawing(scene, tuple(cards.values()), tuple(pills), tuple(branches), routed)


def _solid(cards: Iterable[PlacedCard], pills: Iterable[PlacedPill], branches: Iterable[Branch]) -> Rect:
    """Return the box around everything but the loops."""
    whole = [Rect(card.box.x, card.box.y, card.box.width, card.foot - card.box.y) for card in cards]
    return bounding([*whole, *(pill.box for pill in pills), *(branch.bounds for branch in branches)])


# ---------------------------------------------------------------- items and links


def _card_item(name: str) -> str:
    return f"card {name}"


def _chains(scene: Scene) -> Iterator[_Chain]:
    """Yield the chain of each data edge; branches of one pill share bends in the columns that both pass."""
    for i, pill in enumerate(scene.pills):
        start = 2 * scene.layers[pill.producer] + 1
        for consumer in pill.consumers:
            bends = (f"bend {i} {column}" for column in range(start + 1, 2 * scene.layers[consumer]))
            yield _Chain(i, consumer, (f"pill {i}", *bends))


def _items(scene: Scene, chains: Iterable[_Chain]) -> dict[str, Item]:
    items = {}
    for name, card in scene.cards.items():
        half, plate = card.height / 2, PLATE_HEIGHT - 1 if card.plate else 0.0
        items[_card_item(name)] = Item(
            ItemKind.CARD, 2 * scene.layers[name], card.width, half, half + plate, port_room(card.height)
        )
    for i, pill in enumerate(scene.pills):
        half = pill.height / 2
        items[f"pill {i}"] = Item(ItemKind.PILL, 2 * scene.layers[pill.producer] + 1, pill.width, half, half)
    for chain in chains:
        for name in chain.names[1:]:
            items.setdefault(name, Item(ItemKind.BEND, int(name.rsplit(" ", 1)[1])))
    return items


def _pairs(scene: Scene, chains: Iterable[_Chain]) -> list[tuple[str, str]]:
    pairs: dict[tuple[str, str], None] = {}
    for chain in chains:
        producer, consumer = _card_item(scene.pills[chain.pill].producer), _card_item(chain.consumer)
        pairs.update(dict.fromkeys(pairwise((producer, *chain.names, consumer))))
    return list(pairs)


# ---------------------------------------------------------------- places


def _columns_x(
    items: Mapping[str, Item], pairs: Iterable[tuple[str, str]], y: Mapping[str, float], scene: Scene
) -> list[tuple[float, float]]:
    """Return left and right end of every column; steep links, and loops beside a column, widen the gap before it."""
    n_columns = max(item.column for item in items.values()) + 1
    gaps = [_GAP] * n_columns
    for a, b in pairs:
        rise = min(_GAP_PER_RISE * abs(y[a] - y[b]), _MOST_EXTRA_GAP)
        gaps[items[b].column] = max(gaps[items[b].column], _GAP + rise)
    for loop in scene.loops:
        gaps[2 * scene.layers[loop.after]] += _GAP_PER_LOOP
        if 2 * scene.layers[loop.before] + 1 < n_columns:
            gaps[2 * scene.layers[loop.before] + 1] += _GAP_PER_LOOP
    ends, at = [], 0.0
    for column in range(n_columns):
        at += gaps[column] if column else 0.0
        width = max(item.width for item in items.values() if item.column == column)
        ends.append((at, at + width))
        at += width
    return ends


def _place_card(card: Card, item: Item, x: Sequence[tuple[float, float]], y: Mapping[str, float]) -> PlacedCard:
    """Place a card; all cards of a column are as wide as its widest."""
    left, right = x[item.column]
    box = Rect(left, y[_card_item(card.name)] - item.up, right - left, card.height)
    if not card.plate:
        return PlacedCard(card, box, None)
    inset = OCTAGON_CUT + 5
    return PlacedCard(card, box, Rect(box.x + inset, box.bottom - 1, box.width - 2 * inset, PLATE_HEIGHT))


def _place_pill(pill: Pill, item: Item, x: Sequence[tuple[float, float]], y: float) -> PlacedPill:
    left, right = x[item.column]
    return PlacedPill(pill, Rect((left + right - pill.width) / 2, y - item.up, pill.width, pill.height))


def _data_ports(scene: Scene, chains: Iterable[_Chain], y: Mapping[str, float]) -> Iterator[PortRequest]:
    """Yield the ends of all data lines, ordered along a side by the height of each line's other end."""
    for i, pill in enumerate(scene.pills):
        yield PortRequest(pill.producer, Side.RIGHT, f"pill {i}", y[f"pill {i}"])
    for chain in chains:
        yield PortRequest(chain.consumer, Side.LEFT, chain.line, y[chain.names[-1]])


def _branch(
    scene: Scene,
    chain: _Chain,
    ports: Ports,
    grid: tuple[Mapping[str, Item], Sequence[tuple[float, float]], Mapping[str, float]],
) -> Branch:
    items, x, y = grid
    pill = scene.pills[chain.pill]
    start = ports[pill.producer, Side.RIGHT, chain.line]
    tip = ports[chain.consumer, Side.LEFT, chain.line]
    stop = (tip[0] - HEAD_SIZE * 0.7, tip[1])
    stations: list[tuple[Point, Point]] = [(start, start)]
    for name in chain.names:
        left, right = x[items[name].column]
        stations.append(((left, y[name]), (right, y[name])))
    stations.append((stop, stop))
    heights = [left[1] for left, _ in stations]
    bounds = Rect(start[0], min(heights), tip[0] - start[0], max(heights) - min(heights))
    return Branch(pill, chain.consumer, flow(stations), head(tip, (1.0, 0.0), HEAD_SIZE), bounds)

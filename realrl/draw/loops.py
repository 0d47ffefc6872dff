"""Version edges: dashed lines that run back above or below the columns, from a train_step to calls that wait for it.

A loop leaves and enters through the top (or bottom) of a card when no other card of the column is in the way. Otherwise
it uses the free channel beside the column. Lanes are nested: a loop that spans another is further out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from realrl.draw.geometry import Point, Rect, head, rounded
from realrl.draw.ports import PortRequest, Ports, Side
from realrl.draw.text import text_width
from realrl.graph.build import StepWait

LABEL_SIZE = 10.5
HEAD_SIZE = 8.5
_FIRST_LANE, _LANE, _CORNER = 30.0, 26.0, 13.0
_CHANNEL, _CHANNEL_STEP = 14.0, 8.0


@dataclass(frozen=True)
class LoopEnds:
    """Direction of a loop, above or below the columns, and the sides through which it leaves and enters."""

    edge: StepWait
    above: bool
    leave: Side
    enter: Side

    @property
    def line(self) -> str:
        """Name of the loop among the lines of a card."""
        return f"loop {self.edge.before} {self.edge.after}"


@dataclass(frozen=True)
class LoopPath:
    """A loop with its path, the arrow head at the reader, and the box of its label."""

    edge: StepWait
    path: str
    head: str
    label: Rect
    bounds: Rect

    @property
    def text(self) -> str:
        return loop_text(self.edge)


def loop_text(edge: StepWait) -> str:
    """Return the label of a version edge."""
    return f"lag {edge.lag}"


def plan_loops(edges: Iterable[StepWait], boxes: Mapping[str, Rect]) -> tuple[LoopEnds, ...]:
    """Choose, for every loop, the way round that has fewer cards in its way and is shorter."""
    low, high = min(box.y for box in boxes.values()), max(box.bottom for box in boxes.values())
    planned = []
    for edge in edges:
        ends = [boxes[edge.before], boxes[edge.after]]
        n_above = sum(_is_above(other, box) for box in ends for other in boxes.values())
        n_below = sum(_is_above(box, other) for box in ends for other in boxes.values())
        way_up = sum(box.y - low for box in ends)
        way_down = sum(high - box.bottom for box in ends)
        above = (n_above, way_up) <= (n_below, way_down)
        blocked = [
            any(_is_above(other, box) if above else _is_above(box, other) for other in boxes.values()) for box in ends
        ]
        straight = Side.TOP if above else Side.BOTTOM
        leave, enter = Side.RIGHT if blocked[0] else straight, Side.LEFT if blocked[1] else straight
        planned.append(LoopEnds(edge, above, leave, enter))
    return tuple(planned)


def loop_ports(loops: Iterable[LoopEnds], boxes: Mapping[str, Rect]) -> Iterable[PortRequest]:
    """Yield both ends of all loops, sorted so that loops that meet at one side do not cross."""
    for loop in loops:
        trainer, reader = boxes[loop.edge.before].middle[0], boxes[loop.edge.after].middle[0]
        outermost = float("-inf") if loop.above else float("inf")
        for card, side, way in (
            (loop.edge.before, loop.leave, reader - trainer),
            (loop.edge.after, loop.enter, trainer - reader),
        ):
            order = outermost if side.is_upright else 1e6 / way if way else 0.0
            yield PortRequest(card, side, loop.line, order)


def route_loops(
    loops: Sequence[LoopEnds],
    ports: Ports,
    boxes: Mapping[str, Rect],
    feet: Mapping[str, float],
    span: tuple[float, float],
) -> tuple[LoopPath, ...]:
    """Give each loop a lane, and draw it.

    Args:
        loops: from `plan_loops`.
        ports: ports of all cards.
        boxes: card -> box of its shape.
        feet: card -> y of the lower end of shape and plate.
        span: top and bottom of everything but the loops.
    """
    used: dict[float, int] = {}
    ways = {
        loop.line: _way(loop, ports, boxes, feet, used) for loop in sorted(loops, key=lambda loop: _reach(loop, boxes))
    }
    lanes: dict[bool, list[tuple[float, float, int]]] = {True: [], False: []}
    routed = {}
    for loop in sorted(loops, key=lambda loop: abs(ways[loop.line][0][-1][0] - ways[loop.line][1][0][0])):
        before, after = ways[loop.line]
        first, last = sorted((before[-1][0], after[0][0]))
        away = _FIRST_LANE + _LANE * _free_lane(lanes[loop.above], first, last)
        y = span[0] - away if loop.above else span[1] + away
        routed[loop.line] = _loop_path(loop, [*before, (before[-1][0], y), (after[0][0], y), *after])
    return tuple(routed[loop.line] for loop in loops)


def _way(
    loop: LoopEnds, ports: Ports, boxes: Mapping[str, Rect], feet: Mapping[str, float], used: dict[float, int]
) -> tuple[list[Point], list[Point]]:
    """Return the points of a loop before and after its lane."""
    trainer, reader = loop.edge.before, loop.edge.after
    start, end = ports[trainer, loop.leave, loop.line], ports[reader, loop.enter, loop.line]
    if loop.leave is Side.RIGHT:
        before = [start, (boxes[trainer].right + _channel(boxes[trainer].right, used), start[1])]
    else:
        before = [(start[0], feet[trainer] if loop.leave is Side.BOTTOM else start[1])]
    if loop.enter is Side.LEFT:
        after = [(boxes[reader].x - _channel(boxes[reader].x, used) - HEAD_SIZE, end[1]), end]
    else:
        after = [(end[0], feet[reader] if loop.enter is Side.BOTTOM else end[1])]
    return before, after


def _loop_path(loop: LoopEnds, points: Sequence[Point]) -> LoopPath:
    direction = {Side.TOP: (0.0, 1.0), Side.BOTTOM: (0.0, -1.0), Side.LEFT: (1.0, 0.0)}[loop.enter]
    tip = points[-1]
    stop = tip[0] - direction[0] * HEAD_SIZE * 0.7, tip[1] - direction[1] * HEAD_SIZE * 0.7
    at = (min(p[0] for p in points) + max(p[0] for p in points)) / 2
    y = (min if loop.above else max)(p[1] for p in points)
    width = text_width(loop_text(loop.edge), LABEL_SIZE) + 16
    label = Rect(at - width / 2, y - 9, width, 18)
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    bounds = Rect(min(xs), min(*ys, label.y), max(xs) - min(xs), max(*ys, label.bottom) - min(*ys, label.y))
    return LoopPath(loop.edge, rounded([*points[:-1], stop], _CORNER), head(tip, direction, HEAD_SIZE), label, bounds)


def _is_above(upper: Rect, lower: Rect) -> bool:
    """Return True if one card stands over another in the same column."""
    return upper.y < lower.y and upper.x < lower.right and lower.x < upper.right


def _reach(loop: LoopEnds, boxes: Mapping[str, Rect]) -> float:
    return abs(boxes[loop.edge.before].x - boxes[loop.edge.after].x)


def _channel(side: float, used: dict[float, int]) -> float:
    """Take the next free channel beside a column's side at x = `side`; return its distance from the side."""
    n_before = used.get(side, 0)
    used[side] = n_before + 1
    return _CHANNEL + _CHANNEL_STEP * n_before


def _free_lane(taken: list[tuple[float, float, int]], first: float, last: float) -> int:
    """Take and return the innermost lane that is outside of every earlier loop which this one overlaps."""
    lane = max((n + 1 for a, b, n in taken if a < last and first < b), default=0)
    taken.append((first, last, lane))
    return lane

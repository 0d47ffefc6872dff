"""Boxes, and SVG path data: smooth branches, rounded corners, arrow heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]


@dataclass(frozen=True)
class Rect:
    """A box by its left upper corner; y grows downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2


def bounding(boxes: Sequence[Rect]) -> Rect:
    """Return the smallest box around all."""
    x, y = min(box.x for box in boxes), min(box.y for box in boxes)
    return Rect(x, y, max(box.right for box in boxes) - x, max(box.bottom for box in boxes) - y)


def spread(n: int, room: float, step: float = 11.0) -> list[float]:
    """Return `n` numbers around 0, `step` apart or closer; the first and the last are at most `room` apart."""
    step = min(step, room / max(n - 1, 1))
    return [(i - (n - 1) / 2) * step for i in range(n)]


def number(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def flow(stations: Sequence[tuple[Point, Point]]) -> str:
    """Return a curve that passes each station (its left and its right end, at one height) horizontally.

    Between two stations it is one cubic whose tangents at both ends are horizontal.
    """
    x, y = stations[0][1]
    parts = [f"M{number(x)} {number(y)}"]
    for (left, left_y), (right, right_y) in stations[1:]:
        if abs(left_y - y) < 0.05:
            parts.append(f"H{number(left)}")
        else:
            reach = (left - x) * 0.5
            controls = f"{number(x + reach)} {number(y)} {number(left - reach)} {number(left_y)}"
            parts.append(f"C{controls} {number(left)} {number(left_y)}")
        if right > left:
            parts.append(f"H{number(right)}")
        x, y = right, right_y
    return "".join(parts)


def rounded(points: Sequence[Point], radius: float) -> str:
    """Return a polyline whose corners are rounded by at most `radius`."""
    parts = [f"M{number(points[0][0])} {number(points[0][1])}"]
    for (before, corner), (_, after) in pairwise(pairwise(points)):
        room = min(radius, math.dist(before, corner) / 2, math.dist(corner, after) / 2)
        enter, leave = _towards(corner, before, room), _towards(corner, after, room)
        parts.append(f"L{number(enter[0])} {number(enter[1])}")
        parts.append(f"Q{number(corner[0])} {number(corner[1])} {number(leave[0])} {number(leave[1])}")
    parts.append(f"L{number(points[-1][0])} {number(points[-1][1])}")
    return "".join(parts)


def head(tip: Point, direction: Point, size: float) -> str:
    """Return a slim arrow head; `direction` is a unit vector along an axis."""
    (x, y), (dx, dy) = tip, direction
    side, notch = size * 0.44, size * 0.72
    corners = [
        tip,
        (x - dx * size - dy * side, y - dy * size - dx * side),
        (x - dx * notch, y - dy * notch),
        (x - dx * size + dy * side, y - dy * size + dx * side),
    ]
    return "M" + "L".join(f"{number(a)} {number(b)}" for a, b in corners) + "Z"


def _towards(start: Point, end: Point, distance: float) -> Point:
    share = distance / (math.dist(start, end) or 1.0)
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share

"""Ports: points where lines meet the outline of a card."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from realrl.draw.geometry import Point, Rect, spread
from realrl.graph.mfc import InterfaceType, MFCDef

OCTAGON_CUT = 11.0
_FLAT_STEP = 26.0
_END = 12.0  # distance of a loop's port from the end of an upright side
_FLEXIBLE = 4.0  # how far a port moves to make its line level


class Side(Enum):
    """A side of a card."""

    LEFT = "left"
    RIGHT = "right"
    TOP = "top"
    BOTTOM = "bottom"

    @property
    def is_upright(self) -> bool:
        """True if ports on it differ in height."""
        return self in (Side.LEFT, Side.RIGHT)


@dataclass(frozen=True)
class PortRequest:
    """A line that is to end at a side of a card; lines are sorted by `order` along the side.

    On an upright side the order is the height of the line's other end; an infinite one asks for the upper or lower end
    of the side, away from the other lines.
    `line` is unique among the lines that end at the same side of the card.
    """

    card: str
    side: Side
    line: str
    order: float


Ports = Mapping[tuple[str, Side, str], Point]


def place_ports(requests: Iterable[PortRequest], boxes: Mapping[str, Rect], mfcs: Mapping[str, MFCDef]) -> Ports:
    """Spread the lines of each side around its middle, on the outline of the card's shape.

    Returns:
        (card, side, line) -> point.
    """
    by_side: dict[tuple[str, Side], list[PortRequest]] = {}
    ports: dict[tuple[str, Side, str], Point] = {}
    for request in requests:
        if request.side.is_upright and math.isinf(request.order):
            box = boxes[request.card]
            shift = math.copysign(box.height / 2 - _END, request.order)
            ports[request.card, request.side, request.line] = _on_outline(
                box, mfcs.get(request.card), request.side, shift
            )
        else:
            by_side.setdefault((request.card, request.side), []).append(request)
    for (card, side), group in by_side.items():
        box = boxes[card]
        shifts = (
            spread(len(group), port_room(box.height))
            if side.is_upright
            else spread(len(group), box.width - 70, _FLAT_STEP)
        )
        for request, shift in zip(sorted(group, key=lambda r: r.order), shifts, strict=True):
            level = request.order - box.middle[1]
            if side.is_upright and abs(level - shift) <= _FLEXIBLE:
                shift = level
            ports[card, side, request.line] = _on_outline(box, mfcs.get(card), side, shift)
    return ports


def port_room(height: float) -> float:
    """Return the length of an upright side over which data lines may spread; a loop's port fits beyond them."""
    return height - 2 * _END - 14


def _on_outline(box: Rect, mfc: MFCDef | None, side: Side, shift: float) -> Point:
    """Return the point of a side, `shift` away from its middle."""
    middle_x, middle_y = box.middle
    if side is Side.TOP:
        return middle_x + shift, box.y
    if side is Side.BOTTOM:
        return middle_x + shift, box.bottom
    inset = _inset(box, mfc, abs(shift))
    return (box.x + inset if side is Side.LEFT else box.right - inset), middle_y + shift


def _inset(box: Rect, mfc: MFCDef | None, shift: float) -> float:
    """Return the distance between box and outline, `shift` above or below the middle of a side."""
    half = box.height / 2
    if mfc is None or mfc.interface_type is InterfaceType.INFERENCE:
        return 0.0
    if mfc.interface_type is InterfaceType.GENERATE:
        return half - math.sqrt(max(half**2 - shift**2, 0.0))
    return max(shift - (half - OCTAGON_CUT), 0.0)

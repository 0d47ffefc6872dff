"""A drawing as SVG: title above, legend below, one group of elements per call, edge and loop.

Elements carry classes (see `theme.stylesheet`) and `data-` attributes, so that a page can restyle and find them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape

from realrl.draw.geometry import Rect, head, number
from realrl.draw.layout import Branch, Drawing, PlacedCard, PlacedPill
from realrl.draw.loops import LABEL_SIZE, LoopPath
from realrl.draw.ports import OCTAGON_CUT
from realrl.draw.scene import (
    KEY_LINE,
    KEY_SIZE,
    NAME_LINE,
    NAME_SIZE,
    NOTE_LINE,
    NOTE_SIZE,
    PLATE_SIZE,
    ROLE_LINE,
    ROLE_SIZE,
    TYPE_WORDS,
    Card,
    Scene,
)
from realrl.draw.text import text_width
from realrl.draw.theme import Theme, stylesheet
from realrl.graph.mfc import InterfaceType

_MARGIN, _TITLE_HEIGHT, _LEGEND_TOP, _LEGEND_ROW = 36.0, 66.0, 40.0, 26.0
_TITLE_SIZE, _SUBTITLE_SIZE, _LEGEND_SIZE = 20.0, 12.5, 11.5


def render_svg(drawing: Drawing, theme: Theme) -> str:
    """Return the complete picture as text; it refers to nothing outside of itself."""
    scene = drawing.scene
    style = f"<style>\n{stylesheet(theme, len(scene.roles))}\n</style>"
    return document(drawing, f"<title>{escape(scene.title)}</title>\n{style}")


def document(drawing: Drawing, head_elements: str, *, interactive: bool = False) -> str:
    """Return the SVG element, begun by `head_elements`; if interactive, its class is "picture" and cards take focus."""
    scene, bounds = drawing.scene, drawing.bounds
    ids = node_ids(scene)
    least = max(
        text_width(scene.title, _TITLE_SIZE, bold=True), text_width(scene.subtitle, _SUBTITLE_SIZE), _LEGEND_LEAST
    )
    content_width = max(bounds.width, least)
    rows = _legend_rows(scene, content_width)
    width = content_width + 2 * _MARGIN
    legend_y = _MARGIN + _TITLE_HEIGHT + bounds.height + _LEGEND_TOP
    height = legend_y + _LEGEND_ROW * len(rows) + _MARGIN - 6
    shift_x = _MARGIN - bounds.x + (content_width - bounds.width) / 2
    shift_y = _MARGIN + _TITLE_HEIGHT - bounds.y
    size = f'viewBox="0 0 {number(width)} {number(height)}" width="{number(width)}" height="{number(height)}"'
    kind = 'class="picture"' if interactive else 'role="img"'
    label = escape(f"{scene.title}: {scene.subtitle}", quote=True)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {kind} {size} aria-label="{label}">',
            *([head_elements] if head_elements else []),
            f'<rect class="paper" width="{number(width)}" height="{number(height)}"/>',
            *_title(scene),
            f'<g transform="translate({number(shift_x)} {number(shift_y)})">',
            *(_branch(scene, branch, ids) for branch in drawing.branches),
            *(_loop(scene, loop, ids) for loop in drawing.loops),
            *(_pill(scene, placed, ids) for placed in drawing.pills),
            *(_card(placed, ids, interactive) for placed in drawing.cards),
            *(_loop_label(scene, loop, ids) for loop in drawing.loops),
            "</g>",
            *_legend(rows, legend_y, width),
            "</svg>",
            "",
        ]
    )


def node_ids(scene: Scene) -> dict[str, str]:
    """Return name of a call (or of the dataset) -> id for elements; names can hold any character."""
    return {name: f"n{i}" for i, name in enumerate(scene.cards)}


def role_class(card: Card) -> str:
    """Return the CSS class that colours a card and the edges that leave it."""
    return "rd" if card.mfc is None else f"r{card.role_index}"


# ---------------------------------------------------------------- parts


def _title(scene: Scene) -> Iterator[str]:
    yield text_element(scene.title, _MARGIN, _MARGIN + 16, _TITLE_SIZE, bold=True, anchor="start")
    yield text_element(scene.subtitle, _MARGIN, _MARGIN + 38, _SUBTITLE_SIZE, css="muted", anchor="start")


def _branch(scene: Scene, branch: Branch, ids: Mapping[str, str]) -> str:
    pill = branch.pill
    line = f"data {scene.pills.index(pill)}"
    return (
        f'<g class="wire {role_class(scene.cards[pill.producer])}"'
        f"{_data(line=line, source=ids[pill.producer], target=ids[branch.consumer])}>"
        f'<path class="edge" d="{branch.path}"/><path class="head" d="{branch.head}"/></g>'
    )


def _loop(scene: Scene, loop: LoopPath, ids: Mapping[str, str]) -> str:
    return (
        f'<g class="wire {role_class(scene.cards[loop.edge.before])}"{_loop_data(loop, ids)}>'
        f'<path class="version" d="{loop.path}"/><path class="head" d="{loop.head}"/></g>'
    )


def _loop_label(scene: Scene, loop: LoopPath, ids: Mapping[str, str]) -> str:
    x, y = loop.label.middle
    return (
        f'<g class="tag {role_class(scene.cards[loop.edge.before])}"{_loop_data(loop, ids)}>'
        f"{_rect(loop.label, 'pill', loop.label.height / 2)}"
        f"{text_element(loop.text, x, y + 3.8, LABEL_SIZE, css='tone')}</g>"
    )


def _loop_data(loop: LoopPath, ids: Mapping[str, str]) -> str:
    source, target = ids[loop.edge.before], ids[loop.edge.after]
    return _data(line=f"version {source} {target}", source=source, target=target)


def _pill(scene: Scene, placed: PlacedPill, ids: Mapping[str, str]) -> str:
    pill, box = placed.pill, placed.box
    x, _ = box.middle
    lines = "".join(
        text_element(key, x, box.y + 4 + KEY_LINE * i + 11.2, KEY_SIZE, css="mono key")
        for i, key in enumerate(pill.keys)
    )
    target = " ".join(ids[name] for name in pill.consumers)
    return (
        f'<g class="tag {role_class(scene.cards[pill.producer])}"'
        f"{_data(line=f'data {scene.pills.index(pill)}', source=ids[pill.producer], target=target)}>"
        f"{_rect(box, 'pill', min(box.height / 2, 9))}{lines}</g>"
    )


def _card(placed: PlacedCard, ids: Mapping[str, str], interactive: bool) -> str:
    card, box = placed.card, placed.box
    x, middle = box.middle
    parts = []
    if placed.plate is not None:
        hidden = box.height / 2  # behind the shape, whose lower corners are not square
        plate = placed.plate
        whole = Rect(plate.x, plate.y - hidden, plate.width, plate.height + hidden)
        parts.append(_rect(whole, "plate", 6))
        parts.append(text_element(card.plate, x, plate.y + 14, PLATE_SIZE, css="mono muted"))
    if card.mfc is None:
        parts += [_cylinder(box), text_element(card.label, x, middle + 9, 13.0, bold=True)]
    else:
        parts.append(_shape(box, card.mfc.interface_type))
        y = middle - card.text_height / 2 + NAME_LINE - 5
        parts.append(text_element(card.label, x, y, NAME_SIZE, bold=True))
        parts.append(text_element(card.subtitle, x, y + ROLE_LINE, ROLE_SIZE, css="tone"))
        for i, note in enumerate(card.notes, 1):
            parts.append(text_element(note, x, y + ROLE_LINE + NOTE_LINE * i + 1, NOTE_SIZE, css="muted"))
    attributes = _data(call=ids[card.name])
    if interactive:
        about = escape(f"{card.label} {card.subtitle}".strip(), quote=True)
        attributes += f' tabindex="0" role="button" aria-label="{about}"'
    return f'<g class="card {role_class(card)}"{attributes}>{"".join(parts)}</g>'


def _shape(box: Rect, kind: InterfaceType) -> str:
    """Return round ends for generate, a rectangle for inference, an octagon with a second line for train_step."""
    if kind is InterfaceType.GENERATE:
        return _rect(box, "shape", box.height / 2)
    if kind is InterfaceType.INFERENCE:
        return _rect(box, "shape", 7)
    inner = Rect(box.x + 4, box.y + 4, box.width - 8, box.height - 8)
    return (
        f'<path class="shape" d="{_octagon(box, OCTAGON_CUT)}"/>'
        f'<path class="inner" d="{_octagon(inner, OCTAGON_CUT - 2)}"/>'
    )


def _octagon(box: Rect, cut: float) -> str:
    x, y, right, bottom = box.x, box.y, box.right, box.bottom
    corners = [
        (x + cut, y),
        (right - cut, y),
        (right, y + cut),
        (right, bottom - cut),
        (right - cut, bottom),
        (x + cut, bottom),
        (x, bottom - cut),
        (x, y + cut),
    ]
    return "M" + "L".join(f"{number(a)} {number(b)}" for a, b in corners) + "Z"


def _cylinder(box: Rect) -> str:
    x, y, right, bottom, rx, ry = box.x, box.y, box.right, box.bottom, box.width / 2, 8.0
    body = (
        f"M{number(x)} {number(y + ry)}A{number(rx)} {ry} 0 0 1 {number(right)} {number(y + ry)}"
        f"V{number(bottom - ry)}A{number(rx)} {ry} 0 0 1 {number(x)} {number(bottom - ry)}Z"
    )
    lid = f"M{number(x)} {number(y + ry)}A{number(rx)} {ry} 0 0 0 {number(right)} {number(y + ry)}"
    return f'<path class="shape" d="{body}"/><path class="inner" d="{lid}"/>'


# ---------------------------------------------------------------- legend


_LegendEntry = tuple[float, str]  # width, elements drawn from x = 0 around y = 0
_LEGEND_LEAST = 250.0


def _legend_rows(scene: Scene, width: float) -> list[list[_LegendEntry]]:
    """Return roles, then shapes and lines that occur in the picture, broken into rows of at most `width`."""
    roles = [
        _role_entry(i, f"{role}" if role in scene.trained_roles else f"{role} (frozen)")
        for i, role in enumerate(scene.roles)
    ]
    kinds = [card.mfc.interface_type for card in scene.cards.values() if card.mfc is not None]
    signs = [_shape_entry(kind) for kind in InterfaceType if kind in kinds]
    if scene.pills:
        signs.append(_line_entry("edge", "data, with its keys"))
    if scene.loops:
        signs.append(_line_entry("version", "new parameters, lag in steps"))
    return [*_wrap(roles, width), *_wrap(signs, width)]


def _wrap(entries: Iterable[_LegendEntry], width: float) -> list[list[_LegendEntry]]:
    rows: list[list[_LegendEntry]] = []
    room = 0.0
    for entry in entries:
        if not rows or entry[0] > room:
            rows.append([])
            room = width
        rows[-1].append(entry)
        room -= entry[0]
    return rows


def _entry(symbol: str, symbol_width: float, words: str) -> _LegendEntry:
    text = text_element(words, symbol_width + 8, 4.1, _LEGEND_SIZE, css="muted", anchor="start")
    return symbol_width + 8 + text_width(words, _LEGEND_SIZE) + 22, symbol + text


def _role_entry(index: int, words: str) -> _LegendEntry:
    return _entry(f'<g class="r{index}"><rect class="shape" y="-6" width="12" height="12" rx="3"/></g>', 12, words)


def _shape_entry(kind: InterfaceType) -> _LegendEntry:
    box = Rect(0, -7, 26, 14)
    if kind is InterfaceType.TRAIN_STEP:
        symbol = f'<path class="shape" d="{_octagon(box, 4.5)}"/>'
    else:
        symbol = _rect(box, "shape", 7 if kind is InterfaceType.GENERATE else 2.5)
    return _entry(f'<g class="plain">{symbol}</g>', 26, TYPE_WORDS[kind])


def _line_entry(css: str, words: str) -> _LegendEntry:
    path = f'<path class="{css}" d="M0 0H28"/><path class="head" d="{head((34, 0), (1, 0), 8)}"/>'
    return _entry(f'<g class="plain">{path}</g>', 34, words)


def _legend(rows: Iterable[Iterable[_LegendEntry]], y: float, width: float) -> Iterator[str]:
    yield f'<path class="rule" d="M{number(_MARGIN)} {number(y - 10)}H{number(width - _MARGIN)}"/>'
    for i, row in enumerate(rows):
        x = _MARGIN
        for entry_width, elements in row:
            at = f"translate({number(x)} {number(y + 12 + i * _LEGEND_ROW)})"
            yield f'<g transform="{at}">{elements}</g>'
            x += entry_width


# ---------------------------------------------------------------- elements


def text_element(
    text: str, x: float, y: float, size: float, *, css: str = "", bold: bool = False, anchor: str = "middle"
) -> str:
    """Return one line of text; x is the place of its anchor."""
    classes = f' class="{css}"' if css else ""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}"'
    return f"<text{classes}{weight} {place}>{escape(text)}</text>"


def _rect(box: Rect, css: str, radius: float) -> str:
    size = f'width="{number(box.width)}" height="{number(box.height)}" rx="{number(radius)}"'
    return f'<rect class="{css}" x="{number(box.x)}" y="{number(box.y)}" {size}/>'


def _data(**attributes: str) -> str:
    return "".join(f' data-{name}="{escape(value, quote=True)}"' for name, value in attributes.items())

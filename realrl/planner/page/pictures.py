"""The page's pictures as SVG: timeline, memory of a device, periods of plans.

Bars are drawn in ticks, inside of groups that scale them, so that a page can zoom by another scale. Whatever has a
`data-t` or `data-a` attribute stays outside of these groups, at that tick.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from realrl.draw.geometry import number
from realrl.draw.svg import text_element
from realrl.draw.text import text_width
from realrl.graph.mfc import MFCDef
from realrl.plan.memory.plan import show_bytes
from realrl.planner.page.memory import FIELDS, Piece
from realrl.planner.page.style import KIND_CLASSES
from realrl.planner.page.timeline import TICKS, Band, Group, Timeline, Work
from realrl.planner.words import seconds_text
from realrl.sched.story import ranks_text
from realrl.sched.track.dispatch import PartKind

WIDTH, LEFT, RIGHT = 1200.0, 190.0, 1184.0
TOP, ROW = 34.0, 42.0
CHART, CHART_HEAD = 84.0, 12.0  # heights of a chart of memory, and of the room above it
_AXIS, _LEGEND_ROW, _SWATCH = 26.0, 24.0, 16.0
_TEXT, _SMALL = 12.0, 11.0
_LITTLE = 0.25  # of a device's room
# of each kind of bar: upper edge inside of its row, and height
SHAPES = {"call": (6.0, 24.0), "tail": (20.0, 10.0), "hook": (11.0, 14.0), "rows": (14.0, 8.0), "alone": (15.0, 6.0),
          "wait": (16.5, 3.0), "chain": (33.0, 3.5)}  # fmt: skip


@dataclass(frozen=True)
class Looks:
    """The calls of a run as pictures show them.

    Attributes:
        calls: by name.
        roles: in the order of their colours.
    """

    calls: Mapping[str, MFCDef]
    roles: tuple[str, ...]

    def css(self, work: Work) -> str:
        """Return the classes that colour an activity."""
        mfc = self.calls.get(work.name)
        if mfc is None or self.shape(work) in ("rows", "alone"):
            return self.shape(work)
        kind = KIND_CLASSES[mfc.interface_type] if work.kind == PartKind.CALL.value else "hook"
        return f"r{self.roles.index(mfc.role)} {kind}"

    def shape(self, work: Work) -> str:
        """Return the kind of bar, a key of `SHAPES`."""
        if work.name not in self.calls:
            return "alone"
        shapes = {PartKind.CALL.value: "call", PartKind.ROWS.value: "rows"}
        return shapes.get(work.kind, "hook")

    def words(self, work: Work) -> str:
        """Return an activity in words."""
        mfc = self.calls.get(work.name)
        if mfc is None:
            return work.name
        if work.kind == PartKind.CALL.value:
            return f"{work.name}: {mfc.interface_type.value} of {mfc.role}"
        return f"rows for {work.name}" if work.kind == PartKind.ROWS.value else f"parameters {work.kind} {work.name}"


def svg(body: Sequence[str], height: float, label: str, *, css: str, style: str = "") -> str:
    """Return an SVG element of the page's width; with a style it stands alone."""
    size = f'viewBox="0 0 {number(WIDTH)} {number(height)}"'
    sized = f' width="{number(WIDTH)}" height="{number(height)}"' if style else ""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plot {css}" role="img" {size}{sized}'
            f' aria-label="{escape(label, quote=True)}">',
            *([f"<style>\n{style}\n</style>", f'<rect class="paper" {_size(WIDTH, height)}/>'] if style else []),
            *body,
            "</svg>",
        ]
    )


# ---------------------------------------------------------------- timeline


def timeline_svg(timeline: Timeline, looks: Looks, *, style: str = "") -> str:
    """Return the picture of a timeline with its groups folded.

    Args:
        style: CSS, for a picture that stands alone.
    """
    foot = TOP + ROW * len(timeline.groups)
    legend = [*_legend(timeline, looks, foot + _AXIS + 22)]
    height = foot + _AXIS + 22 + _LEGEND_ROW * len(legend) + 4
    body = [
        f'<clipPath id="plot"><rect x="{number(LEFT)}" y="-9000" {_size(RIGHT - LEFT, 99000)}/></clipPath>',
        *_steps(timeline, foot),
        *(_group(timeline, number_, looks) for number_ in range(len(timeline.groups))),
        '<g class="jumps" clip-path="url(#plot)">',
        *_jumps(timeline),
        "</g>",
        f'<g class="axis" transform="translate(0 {number(foot)})">',
        *axis(timeline.seconds),
        "</g>",
        '<g class="legend">',
        *(line for row in legend for line in row),
        "</g>",
    ]
    label = f"What {sum(len(group.ranks) for group in timeline.groups)} devices do in {seconds_text(timeline.seconds)}"
    return svg(body, height, label, css="timeline", style=style)


def x_of(tick: float) -> float:
    """Return the place of a tick."""
    return LEFT + (RIGHT - LEFT) * tick / TICKS


def axis(seconds: float) -> Iterator[str]:
    """Yield the marks of an axis below the bars, from 0 to so many seconds."""
    step = nice(seconds / 8)
    for i in range(int(seconds / step * (1 + 1e-9)) + 1):
        tick = i * step / seconds * TICKS
        x = number(x_of(tick))
        yield f'<line class="grid" data-t="{tick:.0f}" x1="{x}" x2="{x}" y1="2" y2="7"/>'
        yield _mark(f"{i * step:.10g}{' s' if i == 0 else ''}", tick, 19, _SMALL)


def nice(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least so much."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _steps(timeline: Timeline, foot: float) -> Iterator[str]:
    for step, begin, end in timeline.steps:
        for tick in (begin, end):
            x, ys = number(x_of(tick)), f'y1="{number(TOP - 8)}" y2="{number(foot)}"'
            yield f'<line class="grid step" data-t="{tick}" x1="{x}" x2="{x}" {ys}/>'
        words = f"step {step}"
        if x_of(end) - x_of(begin) > text_width(words, _TEXT) + 8:
            yield _mark(words, (begin + end) / 2, TOP - 14, _TEXT)


def _group(timeline: Timeline, place: int, looks: Looks) -> str:
    group = timeline.groups[place]
    name, about = group_words(group)
    parts = [
        f'<g class="group" data-g="{place}" transform="translate(0 {number(TOP + ROW * place)})">',
        '<g class="fold">',
        text_element(name, LEFT - 12, 17, _TEXT, bold=True, anchor="end"),
        text_element(about, LEFT - 12, 31, _SMALL, css="muted", anchor="end"),
        "</g>",
        f'<rect class="ground" x="{number(LEFT)}" y="3" {_size(RIGHT - LEFT, 30)}/>',
        '<g clip-path="url(#plot)">',
        scaled(),
    ]
    labels = []
    for band in group.bands:
        work = timeline.works[band.work]
        parts += _band(timeline, group, band, looks)
        if looks.shape(work) == "call":
            words = work.name
            # on the part in which all are at work; a page moves it when it zooms
            room = x_of(band.first_end) - x_of(band.start)
            hidden = "" if room > text_width(words, _SMALL) + 8 else ' visibility="hidden"'
            middle = (x_of(band.start) + x_of(band.first_end)) / 2
            css = f"in on-{looks.css(work)}"
            labels.append(
                f'<text class="{css}" data-a="{band.start}" data-b="{band.first_end}" x="{number(middle)}" y="22"'
                f' font-size="{number(_SMALL)}" text-anchor="middle"{hidden}>{escape(words)}</text>'
            )
    for stretch in timeline.chain:
        if stretch.group == place:
            parts.append(_bar("chain", stretch.begin, stretch.end, "chain", title=f"bounds the period: {stretch.name}"))
    return "\n".join([*parts, "</g>", *labels, "</g>", "</g>"])


def group_words(group: Group) -> tuple[str, str]:
    """Return the devices of a group, and what there is to say about them."""
    n = len(group.ranks)
    name = f"device{'s' if n > 1 else ''} {ranks_text(group.ranks)}"
    if not group.calls:
        return name, "nothing runs here"
    n_calls = len(group.calls)
    return name, f"{n_calls} call{'s' if n_calls > 1 else ''}" if n == 1 else f"{n} devices, {n_calls} calls"


def scaled() -> str:
    """Return the begin of a group in which an x is a tick."""
    return f'<g class="bars" transform="translate({number(LEFT)} 0) scale({(RIGHT - LEFT) / TICKS:.8f} 1)">'


def _band(timeline: Timeline, group: Group, band: Band, looks: Looks) -> Iterator[str]:
    work = timeline.works[band.work]
    shape, css = looks.shape(work), looks.css(work)

    def at(tick: int) -> str:
        return seconds_text(tick / TICKS * timeline.seconds)

    told = f"{looks.words(work)}\n{at(band.start)} to {at(band.end)}, {at(band.end - band.start)}"
    if band.first_end < band.end:
        told += f"\nthe first of {band.n_ranks} devices goes on at {at(band.first_end)}"
    if band.start > band.begin:
        yield _bar("wait", band.begin, band.start, "wait", title=f"waiting: {looks.words(work)}")
        told += f"\nwaiting for others before it: {at(band.start - band.begin)} at most"
    first_end = max(band.first_end, band.start)
    if band.end > first_end:
        yield _bar("tail" if shape == "call" else shape, first_end, band.end, f"{css} tail", title=told, work=band.work)
    if first_end > band.start:
        yield _bar(shape, band.start, first_end, css, title=told, work=band.work)


def _bar(shape: str, begin: int, end: int, css: str, *, title: str = "", work: int | None = None) -> str:
    y, height = SHAPES[shape]
    told = f"<title>{escape(title)}</title>" if title else ""
    of = "" if work is None else f' data-w="{work}"'
    return f'<rect class="{css}"{of} x="{begin}" y="{number(y)}" {_size(end - begin, height)}>{told}</rect>'


def _jumps(timeline: Timeline) -> Iterator[str]:
    """Yield lines where the chain goes on in another group."""
    on = [stretch for stretch in timeline.chain if stretch.group >= 0]
    for before, after in pairwise(on):
        if before.group != after.group:
            x, (y, height) = number(x_of(after.begin)), SHAPES["chain"]
            ys = [TOP + ROW * group + y + height / 2 for group in (before.group, after.group)]
            yield (
                f'<line class="jump" data-t="{after.begin}" data-from="{before.group}" data-to="{after.group}"'
                f' x1="{x}" x2="{x}" y1="{number(ys[0])}" y2="{number(ys[1])}"/>'
            )


def _legend(timeline: Timeline, looks: Looks, y: float) -> list[list[str]]:
    """Return rows of a legend: the calls, then the signs that occur."""
    seen = {(looks.shape(work), work) for work in timeline.works}
    entries = [
        (looks.css(work), "call", f"{name} ({mfc.interface_type.value.replace('_', ' ')})")
        for name, mfc in looks.calls.items()
        for work in (Work(name, PartKind.CALL.value),)
        if work in timeline.works
    ]
    shapes = {shape for shape, _ in seen}
    bands = [band for group in timeline.groups for band in group.bands]
    signs = [("wait", "wait", "waits for others")] if any(band.start > band.begin for band in bands) else []
    if any(band.end > band.first_end for band in bands):
        signs.append(("r0 train tail", "tail", "some devices still at it"))
    if "hook" in shapes:
        signs.append(("r0 hook", "hook", "parameters on the move"))
    if "rows" in shapes:
        signs.append(("rows", "rows", "rows on the move"))
    signs.append(("chain", "chain", "bounds the period"))
    rows: list[list[str]] = []
    for some in (entries, signs):
        x = WIDTH
        for css, shape, words in some:
            width = _SWATCH + 7 + text_width(words, _SMALL) + 20
            if x + width > RIGHT:
                rows.append([])
                x = LEFT
            _, height = SHAPES[shape]
            middle = y + _LEGEND_ROW * (len(rows) - 1)
            height = min(height, 14.0)
            swatch = f'x="{number(x)}" y="{number(middle - height / 2)}" {_size(_SWATCH, height)}'
            rows[-1].append(f'<rect class="{css}" {swatch}/>')
            rows[-1].append(text_element(words, x + _SWATCH + 7, middle + 4, _SMALL, css="muted", anchor="start"))
            x += width
    return rows


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class MemoryChart:
    """The memory of one device over the window.

    Attributes:
        name, about: what stands beside it.
        pieces: from `realrl.planner.page.memory.series_of`.
    """

    name: str
    about: str
    pieces: Sequence[Piece]


def memory_svg(charts: Sequence[MemoryChart], seconds: float, capacity: int, *, style: str = "") -> str:
    """Return charts of memory, one below the other, on one scale, with the legend below.

    Args:
        capacity: bytes of a device that a plan may use.
    """
    most = height_of(charts, capacity)
    pitch = CHART + CHART_HEAD
    foot = pitch * len(charts) + 8
    shown = [i for i in range(len(FIELDS)) if any(piece.n_bytes[i] for c in charts for piece in c.pieces)]
    legend = [*_memory_legend(shown, (capacity, most), foot + _AXIS + 20)]
    body = [f'<clipPath id="plot2"><rect x="{number(LEFT)}" y="-9000" {_size(RIGHT - LEFT, 99000)}/></clipPath>']
    for place, chart in enumerate(charts):
        y = number(pitch * place + CHART_HEAD)
        body += [f'<g class="chart" data-c="{place}" transform="translate(0 {y})">', *_chart(chart, capacity, most)]
        body.append("</g>")
    body += [f'<g class="axis" transform="translate(0 {number(foot)})">', *axis(seconds), "</g>"]
    body += ['<g class="legend">', *legend, "</g>"]
    label = f"Memory of {len(charts)} devices over {seconds_text(seconds)}"
    return svg(body, foot + _AXIS + 20 + _LEGEND_ROW, label, css="memory", style=style)


def height_of(charts: Sequence[MemoryChart], capacity: int) -> float:
    """Return the bytes of a chart's height: a device's room is in it, unless little of it is used."""
    used = max(sum(piece.n_bytes) for chart in charts for piece in chart.pieces)
    return 1.06 * (used if used < _LITTLE * capacity else max(used, capacity))


def _chart(chart: MemoryChart, capacity: int, most: float) -> Iterator[str]:
    yield text_element(chart.name, LEFT - 12, 18, _TEXT, css="name", bold=True, anchor="end")
    for line, words in enumerate(chart.about.split("\n")):
        yield text_element(words, LEFT - 12, 33 + 14 * line, _SMALL, css="muted about", anchor="end")
    yield f'<rect class="ground" x="{number(LEFT)}" y="0" {_size(RIGHT - LEFT, CHART)}/>'
    yield f'<g clip-path="url(#plot2)">{scaled()}'
    for i, path in memory_paths(chart.pieces, most):
        yield f'<path class="m{i}" d="{path}"><title>{escape(FIELDS[i])}</title></path>'
    yield "</g></g>"
    if capacity <= most:
        limit = number(CHART * (1 - capacity / most))
        yield f'<line class="limit" x1="{number(LEFT)}" x2="{number(RIGHT)}" y1="{limit}" y2="{limit}"/>'


def memory_paths(pieces: Sequence[Piece], most: float) -> Iterator[tuple[int, str]]:
    """Yield fields of memory and the path of each, one on top of the other; x is a tick."""
    floors = [0] * len(pieces)
    for i in range(len(FIELDS)):
        path = []
        for place, piece in enumerate(pieces):
            n_bytes = piece.n_bytes[i]
            if n_bytes:
                top, bottom = (CHART * (1 - n / most) for n in (floors[place] + n_bytes, floors[place]))
                path.append(f"M{piece.begin} {bottom:.2f}V{top:.2f}H{piece.end}V{bottom:.2f}Z")
                floors[place] += n_bytes
        if path:
            yield i, "".join(path)


def _memory_legend(shown: Sequence[int], scale: tuple[int, float], y: float) -> Iterator[str]:
    x = LEFT
    for i in shown:
        yield f'<rect class="m{i}" x="{number(x)}" y="{number(y - 7)}" {_size(_SWATCH, 14)}/>'
        yield text_element(FIELDS[i], x + _SWATCH + 7, y + 4, _SMALL, css="muted", anchor="start")
        x += _SWATCH + 7 + text_width(FIELDS[i], _SMALL) + 20
    capacity, most = scale
    words = f"room of a device, {show_bytes(capacity)}"
    if capacity <= most:
        yield f'<line class="limit" x1="{number(x)}" x2="{number(x + 22)}" y1="{number(y)}" y2="{number(y)}"/>'
        x += 29
    else:
        words = f"a chart is {show_bytes(int(most))} high"
    yield text_element(words, x, y + 4, _SMALL, css="muted", anchor="start")


# ---------------------------------------------------------------- plans


@dataclass(frozen=True)
class Rival:
    """A plan beside others.

    Attributes:
        period_s: None if it cannot run.
        note: what differs, or why it cannot run.
        is_best: the plan that the page is about.
    """

    name: str
    period_s: float | None
    note: str = ""
    is_best: bool = False


def rivals_svg(rivals: Sequence[Rival], bound_s: float | None, *, style: str = "") -> str:
    """Return the periods of plans as bars; `bound_s` is a period that no plan can beat."""
    known = [rival for rival in rivals if rival.period_s is not None]
    most = max((rival.period_s or 0.0 for rival in known), default=0.0) or 1.0
    pitch, room = 24.0, RIGHT - LEFT - 300
    body = []
    for place, rival in enumerate(known):
        y, width = 6 + pitch * place, room * (rival.period_s or 0.0) / most
        css = "best" if rival.is_best else "rival"
        words = seconds_text(rival.period_s or 0.0) + (f"  {rival.note}" if rival.note else "")
        body += [
            text_element(
                shortened(rival.name, LEFT - 12, _TEXT), LEFT - 12, y + 12, _TEXT, bold=rival.is_best, anchor="end"
            ),
            f'<rect class="{css}" x="{number(LEFT)}" y="{number(y)}" {_size(width, 16)}>'
            f"<title>{escape(rival.name)}: {escape(words)}</title></rect>",
            text_element(
                shortened(words, WIDTH - LEFT - width - 16, _SMALL),
                LEFT + width + 8,
                y + 12,
                _SMALL,
                css="muted",
                anchor="start",
            ),
        ]
    foot = 6 + pitch * len(known)
    if bound_s is not None:
        x = number(LEFT + room * min(bound_s / most, 1.0))
        body.append(f'<line class="limit" x1="{x}" x2="{x}" y1="0" y2="{number(foot)}"/>')
        words = f"no plan is faster than {seconds_text(bound_s)} under the fast model"
        body.append(text_element(words, LEFT, foot + 14, _SMALL, css="muted", anchor="start"))
    return svg(body, foot + 22, f"Seconds of a step under {len(known)} plans", css="rivals", style=style)


def shortened(words: str, room: float, size: float) -> str:
    """Return a text that fits a width, cut with an ellipsis if it has to be."""
    if text_width(words, size) <= room:
        return words
    kept = words
    while kept and text_width(kept + "…", size) > room:
        kept = kept[:-1]
    return kept.rstrip() + "…"


# ---------------------------------------------------------------- elements


def _mark(words: str, tick: float, y: float, size: float) -> str:
    """Return a text at a tick, which a page moves."""
    return text_element(words, x_of(tick), y, size, css="muted").replace("<text", f'<text data-t="{tick:.0f}"', 1)


def _size(width: float, height: float) -> str:
    return f'width="{number(width)}" height="{number(height)}"'

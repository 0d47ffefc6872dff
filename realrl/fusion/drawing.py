"""Pictures of fused schedules: a row for each device with its tasks, and below it what the device holds.

Every model has a hue, which its copies share. A forward has it lightly, a backward fully; what is left of a row's
ground is a bubble.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from realrl.draw.text import SANS
from realrl.draw.theme import DARK, LIGHT, Theme, mix, role_hue
from realrl.plan.fusion.schedule import FusedSchedule

_WIDTH, _LEFT, _RIGHT, _TOP = 1500, 86, 24, 58
_TASKS, _MEMORY, _GAP = 24, 16, 7  # heights of a device's tasks and of its memory, and what is between devices
_AXIS = 34
_LEAST_LABEL = 13.0  # width of a task that has room for its number
_TICKS = 8


def schedule_svg(schedule: FusedSchedule, title: str) -> str:
    """Return a picture that stands alone, light or dark as its reader's system is."""
    style = f"{rules(LIGHT)}\n@media (prefers-color-scheme:dark){{{rules(DARK)}}}"
    return figure(schedule, title, style=style)


def rules(theme: Theme, scope: str = "") -> str:
    """Return the style of pictures in a mode, every rule under a selector."""
    found = [
        ("text", f"font-family:{SANS};font-size:12px;fill:{theme.ink}"),
        (".title", "font-size:15px;font-weight:600"),
        (".muted", f"fill:{theme.muted}"),
        (".number", "font-size:10px;text-anchor:middle"),
        (".paper", f"fill:{theme.paper}"),
        (".ground", f"fill:{mix(theme.paper, theme.ink, 0.07)}"),
        (".grid", f"stroke:{theme.line};stroke-width:1;stroke-dasharray:2 3"),
        (".held", f"fill:{mix(theme.paper, theme.ink, 0.34)}"),
        (".cap", f"stroke:{theme.ink};stroke-width:1;stroke-dasharray:4 3"),
    ]
    for i in range(12):
        strong = mix(role_hue(i), "#ffffff", theme.lift)
        light = mix(strong, theme.paper, 0.58)
        edge = f"stroke:{theme.paper};stroke-width:.7"
        found += [(f".m{i}.f", f"fill:{light};{edge}"), (f".m{i}.b", f"fill:{strong};{edge}")]
        found.append((f".on-m{i}.b", f"fill:{theme.paper}"))
    return "\n".join(f"{scope} .fusion {selector}{{{body}}}".strip() for selector, body in found)


def models_of(schedule: FusedSchedule) -> dict[str, int]:
    """Return the models by name, each with the number of its hue; copies of a model have one together."""
    hues: dict[str, int] = {}
    for pipeline in schedule.instance.pipelines:
        hues.setdefault(_model(pipeline.name), len(hues) % 12)
    return hues


def _model(name: str) -> str:
    first, _, number = name.rpartition(".")
    return first if first and number.isdigit() else name


def figure(schedule: FusedSchedule, title: str, *, until: float | None = None, style: str = "") -> str:
    """Return a picture as an SVG element.

    Args:
        until: time at the right end; the latency by default.
        style: CSS of its own, where no page around it has `rules`.
    """
    end = until or schedule.latency
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    row = _TASKS + _MEMORY + _GAP
    height = _TOP + row * schedule.instance.n_devices + _AXIS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fusion" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">',
        f"<style>{style}</style>" if style else "",
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>',
        *_legend(schedule),
        *_axis(end, scale, height),
    ]
    most = max([*schedule.peaks, *(schedule.instance.memory_caps or ())]) or 1.0
    for device in range(schedule.instance.n_devices):
        y = _TOP + row * device
        parts += _device(schedule, device, y, scale, end)
        parts += _memory(schedule, device, y + _TASKS, scale, most)
    return "\n".join([*parts, "</svg>"])


def _legend(schedule: FusedSchedule) -> Iterator[str]:
    x = float(_LEFT)
    for name, hue in models_of(schedule).items():
        yield f'<rect class="m{hue} f" x="{x:g}" y="31" width="14" height="12"/>'
        yield f'<rect class="m{hue} b" x="{x + 14:g}" y="31" width="28" height="12"/>'
        text = f"{name}: forward, backward"
        yield f'<text x="{x + 48:g}" y="41">{escape(text)}</text>'
        x += 48 + 6.6 * len(text) + 24
    yield f'<rect class="held" x="{x:g}" y="34" width="20" height="9"/>'
    yield f'<text x="{x + 26:g}" y="41">activations held (highest peak {schedule.peak:g})</text>'


def _axis(end: float, scale: float, height: int) -> Iterator[str]:
    for i in range(_TICKS + 1):
        x = _LEFT + end * scale * i / _TICKS
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height - _AXIS + 4}"/>'
        yield f'<text class="muted" x="{x:.1f}" y="{height - 12}" text-anchor="middle">{end * i / _TICKS:.4g}</text>'


def _device(schedule: FusedSchedule, device: int, y: int, scale: float, end: float) -> Iterator[str]:
    hues, pipelines = models_of(schedule), schedule.instance.pipelines
    yield f'<text x="{_LEFT - 12}" y="{y + 16}" text-anchor="end">device {device}</text>'
    yield f'<rect class="ground" x="{_LEFT}" y="{y}" width="{end * scale:.2f}" height="{_TASKS}"/>'
    for task in schedule.orders[device]:
        name = pipelines[task.pipeline].name
        x, width = _LEFT + schedule.starts[task] * scale, schedule.duration(task) * scale
        kind, hue = "b" if task.is_backward else "f", hues[_model(name)]
        words = f"{name}: {'backward' if task.is_backward else 'forward'} of micro-batch {task.micro_batch} at stage "
        words += f"{task.stage}, {schedule.starts[task]:g} to {schedule.end(task):g}"
        yield (
            f'<rect class="m{hue} {kind}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_TASKS}">'
            f"<title>{escape(words)}</title></rect>"
        )
        if width >= _LEAST_LABEL:
            yield (
                f'<text class="number on-m{hue} {kind}" x="{x + width / 2:.2f}" y="{y + 16}" pointer-events="none">'
                f"{task.micro_batch}</text>"
            )


def _memory(schedule: FusedSchedule, device: int, y: int, scale: float, most: float) -> Iterator[str]:
    """Draw what a device holds as an area: a forward adds at its start, a backward takes away at its end."""
    points, held, before = [f"M{_LEFT} {y + _MEMORY}"], schedule.memory(device), 0.0
    for task, after in zip(schedule.orders[device], held, strict=True):
        at = schedule.end(task) if task.is_backward else schedule.starts[task]
        x = _LEFT + at * scale
        points += [
            f"L{x:.2f} {y + _MEMORY * (1 - before / most):.2f}",
            f"L{x:.2f} {y + _MEMORY * (1 - after / most):.2f}",
        ]
        before = after
    yield f'<path class="held" d="{" ".join(points)} Z"/>'
    if schedule.instance.memory_caps is not None:
        line = y + _MEMORY * (1 - min(1.0, schedule.instance.memory_caps[device] / most))
        yield f'<line class="cap" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{line:.2f}" y2="{line:.2f}"/>'

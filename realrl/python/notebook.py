"""A run in one line, and as HTML with small curves for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from realrl.draw.theme import ROLE_HUES
from realrl.report.curves import curves_of, grid_of
from realrl.report.run_files import Row, RunFolder
from realrl.runtime.output.progress import headline_metrics

_MOST_CURVES = 3
_WIDTH, _HEIGHT, _MARGIN = 220, 60, 4
_BUCKETS = 120  # points of a curve


def as_text(run: RunFolder) -> str:
    """Return a line: experiment, folder, state, and how the main metric went."""
    names = _headlines(run)
    told = f"; {_change(run.rows, names[0])}" if names else ""
    return f"<run of {run.experiment or 'an unknown experiment'} in {run.path}: {run.state}{told}>"


def as_html(run: RunFolder) -> str:
    """Return a fragment that looks right on light and dark pages; texts of the run are escaped."""
    curves = "".join(_curve(run, name, hue) for name, hue in zip(_headlines(run), ROLE_HUES, strict=False))
    notes = "".join(f"<div>{escape(note)}</div>" for note in run.notes)
    return (
        '<div style="font:13px/1.5 system-ui,sans-serif">'
        f"<div><b>{escape(run.experiment or 'run')}</b>: {escape(run.state)} "
        f'<code style="opacity:.7">{escape(str(run.path))}</code></div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:6px 24px;margin:6px 0">{curves}</div>{notes}</div>'
    )


def _headlines(run: RunFolder) -> list[str]:
    """Return the metrics that show if training works, most telling first."""
    first = next((row for row in run.rows if len(row) > 1), {})
    return headline_metrics({name: value for name, value in first.items() if name not in ("step", "epoch")})[
        :_MOST_CURVES
    ]


def _curve(run: RunFolder, name: str, hue: str) -> str:
    values = _thinned(run.rows, name)
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    across = (_WIDTH - 2 * _MARGIN) / max(1, len(values) - 1)
    points = " ".join(
        f"{_MARGIN + i * across:.1f},{_HEIGHT - _MARGIN - (v - low) / span * (_HEIGHT - 2 * _MARGIN):.1f}"
        for i, v in enumerate(values)
    )
    frame = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="currentColor" stroke-opacity=".25"/>'
    line = f'<polyline points="{points}" fill="none" stroke="{hue}" stroke-width="1.8" stroke-linejoin="round"/>'
    if len(values) == 1:
        line = f'<circle cx="{_WIDTH / 2}" cy="{_HEIGHT / 2}" r="3" fill="{hue}"/>'
    return (
        f"<div><div>{escape(_change(run.rows, name))}</div>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(name)} by step">'
        f"{frame}{line}</svg></div>"
    )


def _thinned(rows: Sequence[Row], name: str) -> list[float]:
    own = [{"step": row["step"], name: row[name]} for row in rows if name in row]
    means = curves_of(own, grid_of([own], 3 * _BUCKETS), has_bands=False)[name]["mean"]
    if not isinstance(means, list):
        return [float(means)] * min(len(own), 2)
    return [value for value in means if value is not None]


def _change(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows if name in row]
    return f"{name} {values[0]:.4g}" + (f" to {values[-1]:.4g}" if len(values) > 1 else "")

"""The page of a fused schedule: figures, pictures, what it was compared with."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from realrl.draw.html import page_of_facts
from realrl.draw.theme import both_modes
from realrl.fusion.comparison import COLUMNS, Comparison
from realrl.fusion.drawing import figure, rules


def render_page(comparison: Comparison, title: str, notes: Sequence[str] = ()) -> str:
    """Return the page as text; it loads nothing."""
    found, second = comparison.found, comparison.serial_schedule
    schedule = found.schedule
    until = max(schedule.latency, second.latency)
    facts = (
        ("latency", f"{schedule.latency:g}"),
        ("lower bound", f"{found.bound:g}"),
        ("1F1B in series", f"{comparison.serial.latency:g}"),
        ("faster", f"{comparison.serial.latency / schedule.latency:.2f} times"),
        ("highest peak", f"{schedule.peak:g}"),
        ("of 1F1B", f"{schedule.peak / comparison.serial.peak:.3f}" if comparison.serial.peak else "-"),
    )
    rows = comparison.rows()
    parts = {
        "STYLE": both_modes(rules),
        "TABLE": _table(COLUMNS, rows, strong=comparison.fused_name),
        "FUSED": figure(schedule, f"fused: {schedule.latency:g}", until=until),
        "OTHER": "1F1B, one model after the other",
        "SECOND": figure(second, f"1F1B in series, without a barrier: {second.latency:g}", until=until),
        "FRONT": _table(
            ("latency", "highest peak"), [(f"{s.latency:g}", f"{s.peak:g}") for s in found.front], strong=""
        ),
    }
    return page_of_facts(__name__, title, ". ".join(notes), facts, parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, strong: str) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        kinds = ["", *[' class="figure"'] * (len(row) - 1)]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    lines = [f"<tr>{cells(columns, 'th')}</tr>"]
    lines += [f"<tr{' class=found' if row[0] == strong else ''}>{cells(row, 'td')}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"

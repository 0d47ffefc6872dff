"""Tables for terminals (rich) and for everything else (plain aligned text, no colour, no line art)."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", folding: Collection[str] = ()
) -> None:
    """Print a table; in a terminal the `folding` columns are broken to fit the width, elsewhere a row is one line."""
    if sys.stdout.isatty():
        _print_rich(columns, rows, title, folding)
    else:
        _print_plain(columns, rows, title)


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, folding: Collection[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold underline", pad_edge=False
    )
    for index, column in enumerate(columns):
        table.add_column(
            column, style="bold" if index == 0 else "", no_wrap=column not in folding, overflow="fold", header_style=""
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # rich keeps bold under NO_COLOR; users who set it get plain text.
    Console(color_system=None if os.environ.get("NO_COLOR") else "auto").print(table)


def _print_plain(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    if title:
        print(title)
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()

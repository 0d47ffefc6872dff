"""Figures as people read them, and tables for whoever prints them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        folding: columns whose cells may be broken.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    folding: tuple[str, ...] = ()


Block = str | Table
"""A paragraph, or a table."""


def seconds_text(seconds: float) -> str:
    """Return seconds with three digits: ``12.3 s``, ``4.56 ms``."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def change_text(seconds: float, before_s: float) -> str:
    """Return seconds and their change: ``12.3 s (+4.5%)``."""
    if not before_s:
        return seconds_text(seconds)
    change = seconds / before_s - 1.0
    return f"{seconds_text(seconds)} ({change:+.1%})" if abs(change) >= 0.0005 else f"{seconds_text(seconds)} (same)"


def sentence(words: str) -> str:
    """Return words with a full stop, unless they end a sentence already."""
    return words if words.endswith((".", "?", "!")) else words + "."


def share_text(share: float) -> str:
    """Return a share: ``12.3%``."""
    return f"{share:.1%}"

"""Metrics over steps, thinned for a page: the mean of neighbouring steps, and the least and the largest of them.

All runs share one grid of buckets, so that runs with different seeds can be averaged bucket by bucket.

Invariants:
    - a bucket's mean lies between its least and its largest value;
    - every finite value of a metric is in one bucket;
    - no more numbers than asked for are returned, but for `LEAST_BUCKETS` of each curve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum, inf, isfinite
from typing import Any

LEAST_BUCKETS, MOST_BUCKETS = 24, 400
MOST_BANDS = 6  # runs whose extremes are kept; of more, nobody could tell the bands apart
Rows = Sequence[Mapping[str, Any]]
Numbers = list[float | None]


@dataclass(frozen=True)
class Grid:
    """Buckets of steps: bucket i has the `width` steps from ``first + i * width`` on."""

    first: int
    width: int
    n: int


def grid_of(runs: Sequence[Rows], most_numbers: int) -> Grid:
    """Return buckets for runs, so wide that all curves together have about `most_numbers` numbers."""
    steps = [row["step"] for rows in runs if rows for row in (rows[0], rows[-1])]
    if not steps:
        return Grid(0, 1, 0)
    first, last = min(steps), max(steps)
    n_curves = sum(len(names_of([rows])) for rows in runs)
    n_steps = last - first + 1
    if n_steps <= min(MOST_BUCKETS, most_numbers / max(1, n_curves)):
        return Grid(first, 1, n_steps)
    each = 3 if len(runs) <= MOST_BANDS else 1
    most = min(max(most_numbers // (each * max(1, n_curves)), LEAST_BUCKETS), MOST_BUCKETS)
    width = -(-n_steps // most)
    return Grid(first, width, -(-n_steps // width))


def names_of(runs: Sequence[Rows]) -> list[str]:
    """Return the names of all metrics in the order of their first appearance."""
    names: dict[str, None] = {}
    for rows in runs:
        for row in rows:
            names.update(dict.fromkeys(row))
    return [name for name in names if name not in ("step", "epoch")]


def curves_of(rows: Rows, grid: Grid, *, has_bands: bool = True) -> dict[str, dict[str, Any]]:
    """Return name -> its curve, with the position of its first bucket.

    A curve has ``at``, ``n`` (buckets), ``mean`` and, where a bucket has several steps, ``low`` and ``high``. A bucket
    without a value has null; one number stands for all of a curve that never changes.
    """
    bounds = list(_bounds(rows, grid))
    if not bounds:
        return {}
    at = (rows[0]["step"] - grid.first) // grid.width
    found = {}
    for name in names_of([rows]):
        column = [row.get(name) for row in rows]
        means: Numbers = []
        lows: Numbers = []
        highs: Numbers = []
        for begin, end in bounds:
            values = [value for value in column[begin:end] if value is not None]
            means.append(_mean(values) if values else None)
            lows.append(min(values, default=None))
            highs.append(max(values, default=None))
        curve: dict[str, Any] = {"at": at, "n": len(means), "mean": _short(means)}
        if has_bands and grid.width > 1 and lows != highs:
            curve |= {"low": _short(lows), "high": _short(highs)}
        found[name] = curve
    return found


def totals_of(rows: Rows, grid: Grid, name: str) -> Numbers:
    """Return what a metric adds up to until the end of each bucket, from the run's first bucket on."""
    sums = list(accumulate((row.get(name) or 0.0 for row in rows), initial=0.0))
    return [rounded(sums[end]) for _, end in _bounds(rows, grid)] if sums[-1] else []


def rounded(value: float | None) -> float | None:
    """Return a number with five digits, and whole ones as such."""
    if value is None or not isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


# ---------------------------------------------------------------- parts


def _bounds(rows: Rows, grid: Grid) -> Iterator[tuple[int, int]]:
    """Yield, for each bucket from that of the first row to that of the last one, the slice of its rows."""
    if not rows:
        return
    steps = [row["step"] for row in rows]
    first, last = ((step - grid.first) // grid.width for step in (steps[0], steps[-1]))
    begin = 0
    for bucket in range(first, last + 1):
        end = bisect_left(steps, grid.first + (bucket + 1) * grid.width)
        yield begin, end
        begin = end


def _mean(values: Sequence[float]) -> float:
    """Return the mean, which rounding and overflow keep between the extremes."""
    try:
        mean = fsum(values) / len(values)
    except OverflowError:
        mean = fsum(value / len(values) for value in values)
    return min(max(mean, min(values)), max(values)) if abs(mean) < inf else max(values)


def _short(values: Numbers) -> Numbers | float | None:
    shown = [rounded(value) for value in values]
    return shown[0] if len(set(shown)) == 1 and len(shown) > 1 else shown

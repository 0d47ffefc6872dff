"""Work of every device in the last steps of a simulated run, with devices that are alike folded.

Times are whole ticks: `TICKS` of them make up the window.

Invariants of `timeline_of`:
    - every rank is in one group, and in one of its rows;
    - the bars of a row follow each other, and lie inside of the window;
    - a group's devices run the same calls, and are neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from realrl.sim.cluster import SimulatedRun
from realrl.sim.report import chain_of
from realrl.sim.workers import NO_CAUSE

TICKS = 100_000
_MOST_STEPS = 3


class Work(NamedTuple):
    """A kind of activity: its name and kind, as `realrl.sim.workers.Activity` has them."""

    name: str
    kind: str


class Bar(NamedTuple):
    """A rank's part in an activity.

    Attributes:
        work: its place in `Timeline.works`.
        begin: the rank comes to it.
        start: all are there.
        end: the rank goes on.
    """

    work: int
    begin: int
    start: int
    end: int


class Band(NamedTuple):
    """The bars of a group's ranks in one kind of work, any two of which are under way at the same time.

    Attributes:
        begin, start: the earliest ones.
        first_end, end: the first rank goes on, and the last one.
        n_ranks: ranks that take part.
    """

    work: int
    begin: int
    start: int
    first_end: int
    end: int
    n_ranks: int


@dataclass
class _Together:
    """Bars of a band to be: all are under way from `last_start` to `first_end`."""

    bars: list[Bar]
    last_start: int
    first_end: int


@dataclass(frozen=True)
class Row:
    """Ranks that do the same at the same time; their bars begin with the first of them."""

    ranks: tuple[int, ...]
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Group:
    """Neighbouring ranks that run the same calls."""

    ranks: tuple[int, ...]
    calls: tuple[str, ...]
    rows: tuple[Row, ...]
    bands: tuple[Band, ...]


class Stretch(NamedTuple):
    """A stretch of the chain that bounds the period; `group` is -1 for messages."""

    name: str
    group: int
    begin: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The window.

    Attributes:
        seconds: its length.
        steps: number of a step, its begin and its end.
        chain: what bounds the period, in the order of time.
    """

    seconds: float
    steps: tuple[tuple[int, int, int], ...]
    works: tuple[Work, ...]
    groups: tuple[Group, ...]
    chain: tuple[Stretch, ...]


def timeline_of(run: SimulatedRun, meshes: Mapping[str, Sequence[int]]) -> Timeline:
    """Return the last steps of a run that completed one, at most three, without the first one if there are others.

    Args:
        meshes: call -> its ranks.
    """
    shown = (run.steps[1:] or run.steps)[-_MOST_STEPS:]
    before = [step.at_s for step in run.steps if step.report.step < shown[0].report.step]
    from_s, to_s = before[-1] if before else run.start_s, shown[-1].at_s
    seconds = max(to_s - from_s, 1e-9)

    def tick(at_s: float) -> int:
        return round(min(max((at_s - from_s) / seconds, 0.0), 1.0) * TICKS)

    works: dict[Work, int] = {}
    bars: dict[int, list[tuple[Bar, int]]] = {rank: [] for rank in range(run.n_ranks)}  # and its number on the rank
    counts: dict[tuple[int, Work], int] = defaultdict(int)
    for activity in run.activities:
        work = Work(activity.name, activity.kind)
        for rank, end_s in activity.ends.items():
            counts[rank, work] += 1
            begin, end = tick(activity.begins[rank]), tick(end_s)
            if end > begin:
                number = works.setdefault(work, len(works))
                bars[rank].append((Bar(number, begin, tick(activity.start_s), end), counts[rank, work]))
    groups = tuple(_group(ranks, calls, bars) for ranks, calls in _alike(run.n_ranks, meshes))
    group_of = {rank: number for number, group in enumerate(groups) for rank in group.ranks}
    chain = []
    for link in chain_of(run):
        begin, end = tick(link.begin_s), tick(link.end_s)
        if end > begin:
            group = -1
            if link.activity != NO_CAUSE:
                ends = run.activities[link.activity].ends
                group = group_of[max(ends, key=lambda rank: (ends[rank] <= link.end_s, ends[rank], -rank))]
            chain.append(Stretch(link.name, group, begin, end))
    edges = [0, *(tick(step.at_s) for step in shown)]
    steps = tuple((step.report.step, edges[i], edges[i + 1]) for i, step in enumerate(shown))
    return Timeline(seconds, steps, tuple(works), groups, tuple(chain))


def _alike(n_ranks: int, meshes: Mapping[str, Sequence[int]]) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return neighbouring ranks with the same calls, and these calls."""
    calls: list[list[str]] = [[] for _ in range(n_ranks)]
    for name, ranks in meshes.items():
        for rank in ranks:
            calls[rank].append(name)
    found: list[tuple[list[int], list[str]]] = []
    for rank, names in enumerate(calls):
        if found and found[-1][1] == names:
            found[-1][0].append(rank)
        else:
            found.append(([rank], names))
    return [(tuple(ranks), tuple(names)) for ranks, names in found]


def _group(ranks: tuple[int, ...], calls: tuple[str, ...], bars: Mapping[int, Sequence[tuple[Bar, int]]]) -> Group:
    rows: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
    bands: dict[tuple[int, int], list[_Together]] = {}
    for rank in ranks:
        rows.setdefault(tuple([(bar.work, bar.start, bar.end) for bar, _ in bars[rank]]), []).append(rank)
        for bar, number in bars[rank]:
            _join(bar, bands.setdefault((bar.work, number), []))
    merged = [
        Band(
            some.bars[0].work,
            min(bar.begin for bar in some.bars),
            min(bar.start for bar in some.bars),
            some.first_end,
            max(bar.end for bar in some.bars),
            len(some.bars),
        )
        for alike in bands.values()
        for some in alike
    ]
    return Group(
        ranks,
        calls,
        tuple(_row(members, bars) for members in rows.values()),
        tuple(sorted(merged, key=lambda band: (band.start, band.end, band.work))),
    )


def _join(bar: Bar, alike: list[_Together]) -> None:
    """Add a bar to the first bars that all are under way while it is, or put it on its own."""
    for some in alike:
        last_start, first_end = max(some.last_start, bar.start), min(some.first_end, bar.end)
        if last_start < first_end:
            some.bars.append(bar)
            some.last_start, some.first_end = last_start, first_end
            return
    alike.append(_Together([bar], bar.start, bar.end))


def _row(ranks: Sequence[int], bars: Mapping[int, Sequence[tuple[Bar, int]]]) -> Row:
    columns = zip(*(bars[rank] for rank in ranks), strict=True)
    return Row(tuple(ranks), tuple(bar[0][0]._replace(begin=min(one.begin for one, _ in bar)) for bar in columns))

"""The twelve published cases of fused pipeline schedules (RLHFuse, NSDI 2025), searched on this machine.

    python scripts/bench_fusion.py                       all rows; first the latency, then the memory
    python scripts/bench_fusion.py --rows 1,5 --seconds 60

All rows share the time. They take turns until their latency is the lower bound and their peak at most 1.0625 times that
of 1F1B in series; what is left is for those whose peak is above it, and the smaller ones come first. A row with twice
the micro-batches of another one waits for what that finds, and begins with it. With --processor, seconds are those that
this process computes, as the clock would count them on a machine that does nothing else.
--evaluations counts list schedules and changes that annealing tries, in millions. In the last columns: latencies on one
communicator that keeps messages in order, as the executor posts them for fused schedules and as it posts those of
single models, and the slow-down by tasks that take up to 20% more or less.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Sequence

from realrl.fusion.search import Fused, Limits, ScheduleSearch
from realrl.plan.fusion.baselines import greedy, serial
from realrl.plan.fusion.instance import Instance, Model, on_block
from realrl.plan.fusion.messages import computations_of, in_order_latency, steps_of
from realrl.plan.fusion.problem import problem_of
from realrl.plan.fusion.robustness import slow_down
from realrl.plan.fusion.schedule import FusedSchedule
from realrl.plan.fusion.search.stretch import shortened
from realrl.plan.pipeline import place_messages

# stages of both models, micro-batches, forward and backward of each, activations; what the paper found
ROWS = (
    ((8, 4, 8, 4, 5, 10, 4, 8, 1.95, 2), "225 1.00"),
    ((8, 4, 16, 8, 5, 10, 4, 8, 1.95, 2), "372 1.01"),
    ((8, 4, 32, 16, 5, 10, 4, 8, 1.95, 2), "708 1.26"),
    ((8, 8, 8, 8, 5, 10, 2, 4, 1.95, 1), "225 1.00"),
    ((8, 8, 16, 16, 5, 10, 2, 4, 1.95, 1), "366 1.19"),
    ((8, 8, 32, 32, 5, 10, 2, 4, 1.95, 1), "702 1.31"),
    ((16, 8, 16, 8, 2, 4, 2, 4, 1.64, 2), "186 1.00"),
    ((16, 8, 32, 16, 2, 4, 2, 4, 1.64, 2), "330 1.14"),
    ((16, 8, 64, 32, 2, 4, 2, 4, 1.64, 2), "618 1.51"),
    ((16, 16, 16, 16, 2, 4, 1, 2, 1.64, 1), "186 1.00"),
    ((16, 16, 32, 32, 2, 4, 1, 2, 1.64, 1), "318 1.23"),
    ((16, 16, 64, 64, 2, 4, 1, 2, 1.64, 1), "613 1.48"),
)
COLUMNS = ("row", "serial", "greedy", "bound", "fused", "proof", "peak", "least peak", "paper", "latency s", "all s",
           "processor s", "million", "in order", "posted late", "jitter")  # fmt: skip

_WIDTHS = [
    max(len(name), width)
    for name, width in zip(COLUMNS, (3, 6, 8, 5, 5, 7, 6, 6, 8, 5, 5, 5, 7, 5, 5, 11), strict=True)
]


LEVELS = (1.0625, 1.0)  # peaks, in those of 1F1B in series
TURNS = 20  # into which the time is divided for the first


def instance_of(number: int) -> Instance:
    """Return a row's instance, from 1."""
    n_a, n_b, m_a, m_b, f_a, b_a, f_b, b_b, memory_a, memory_b = ROWS[number - 1][0]
    first = Model("A", n_a, m_a, f_a, b_a, memory_a)
    return on_block([first, Model("B", n_b, m_b, f_b, b_b, memory_b, is_reversed=True)])


def processor_seconds() -> float:
    """Return the seconds of this process and of those that it has ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Row:
    """A row's search, what it has found, and the processor's seconds that it took.

    Attributes:
        shorter: the row with half of its micro-batches, if any: its schedules are those to begin with.
    """

    def __init__(self, number: int, options: argparse.Namespace, shorter: Row | None) -> None:
        self.number, self._options, self.processor_s, self.shorter = number, options, 0.0, shorter
        self._begun_with: FusedSchedule | None = None
        self.series = serial(instance_of(number))
        self._search = ScheduleSearch(instance_of(number), seed=options.seed)
        self.found = self._search.run(Limits(n_rounds=0))
        self.n_tasks = sum(map(len, self.found.schedule.orders))

    def has_reached(self, level: float) -> bool:
        """Return True if the latency is the bound and the peak at most so many of 1F1B in series."""
        schedule = self.found.schedule
        return schedule.latency <= self.found.bound and schedule.peak <= level * self.series.peak * (1 + 1e-9)

    def is_due(self, level: float) -> bool:
        """Return True if a search for a level is due: there is none yet, and no other row's to wait for."""
        return not self.has_reached(level) and (self.shorter is None or self.shorter.has_reached(level))

    def follow(self) -> None:
        """Take what the shorter row has found, and search no further."""
        if self._begin():
            self.found = self._search.run(Limits(n_rounds=0))

    def _begin(self) -> bool:
        """Begin with what the shorter row has found; return True if it is new."""
        if self.shorter is None or self.shorter.found.schedule == self._begun_with:
            return False
        self._begun_with = self.shorter.found.schedule
        self._search.begin_with(self._begun_with)
        return True

    def run(self, level: float, seconds: float) -> float:
        """Search for a level, and return the seconds taken."""
        before, seconds_before, millions = processor_seconds(), self.found.seconds, self._options.evaluations
        self._begin()
        limits = Limits(
            seconds,
            n_evaluations=None if millions is None else millions * 1e6,
            peak=level * self.series.peak,
            n_processes=self._options.processes,
            clock=time.process_time if self._options.processor else time.monotonic,
        )
        self.found = self._search.run(limits)
        self.processor_s += processor_seconds() - before
        return self.found.seconds - seconds_before


def share_time(rows: Sequence[Row], seconds: float) -> None:
    """Let rows take turns until all have reached the first level or half of the time is up, and then the last one.

    Rows with the fewest tasks come first then. Each gets as much of what is left as the others, and as much again if
    another one waits for it.
    """
    first, last = LEVELS
    turn, half = seconds / TURNS, seconds / 2
    while seconds > half and any(not row.has_reached(first) for row in rows):
        for row in rows:
            if row.is_due(first):
                seconds -= row.run(first, max(0.0, min(turn, seconds - half)))
    while seconds > 0 and any(not row.has_reached(last) for row in rows):
        for row in sorted(rows, key=lambda row: row.n_tasks):
            n_unfinished = sum(not row.has_reached(last) for row in rows)
            if row.is_due(last):
                n_parts = 1 + sum(other.shorter is row for other in rows)
                seconds -= row.run(last, seconds if seconds < turn else seconds * n_parts / n_unfinished)
    for row in rows:
        row.follow()


def in_order(found: Fused) -> tuple[float, float]:
    """Return latencies on one communicator in order: messages posted early and one by one, or late and in batches."""
    schedule = found.schedule
    lists = computations_of(schedule)
    pairs = [list(zip(steps, order, strict=True)) for steps, order in zip(lists, schedule.orders, strict=True)]
    durations = [{step: schedule.duration(task) for step, task in own} for own in pairs]
    cost = {step: seconds for own in durations for step, seconds in own.items()}
    late = place_messages(lists, cost.__getitem__)
    return (
        in_order_latency(steps_of(schedule), durations, batched=False),
        in_order_latency(late, durations, batched=True),
    )


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    number, found, series = row.number, row.found, row.series
    schedule, simple = found.schedule, greedy(instance_of(number))
    early, late = in_order(found)
    jitter = slow_down(schedule)
    return (
        str(number),
        f"{series.latency:g}",
        "-" if simple is None else f"{simple.latency:g} {simple.peak / series.peak:.2f}",
        f"{found.bound:g}",
        f"{schedule.latency:g}",
        "optimal" if schedule.latency == found.bound else f"{schedule.latency / found.bound:.3f}",
        f"{schedule.peak / series.peak:.4f}",
        f"{found.least_peak / series.peak:.4f}",
        ROWS[number - 1][1],
        f"{found.seconds_to_latency:.1f}",
        f"{found.seconds:.1f}",
        f"{row.processor_s:.1f}",
        f"{found.n_evaluations / 1e6:.1f}",
        f"{early:g}",
        f"{late:g}",
        f"{jitter.mean:.3f} {jitter.worst:.3f}",
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", default=",".join(str(i + 1) for i in range(len(ROWS))), help="numbers from 1")
    parser.add_argument("--seconds", type=float, default=290.0, help="of all rows; default: 290")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--processor", action="store_true", help="seconds of this process's processor, not of the clock"
    )
    parser.add_argument("--evaluations", type=float, help="millions of evaluations of each row, in the place of a time")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    numbers = sorted({*map(int, options.rows.split(","))})
    rows: list[Row] = []
    for number in numbers:
        short = shortened(problem_of(instance_of(number)))
        shorter = [row for row in rows if problem_of(instance_of(row.number)) == short]
        rows.append(Row(number, options, shorter[0] if shorter else None))
    if options.evaluations is None:
        share_time(rows, options.seconds)
    else:
        for row in rows:
            row.run(LEVELS[-1], math.inf)
    print(_line(COLUMNS))
    for row in rows:
        print(_line(cells(row)), flush=True)
    found = [row.found for row in rows]
    print(
        f"all latencies {sum(one.seconds_to_latency for one in found):.0f} s, "
        f"everything {sum(one.seconds for one in found):.0f} s, "
        f"processors {sum(row.processor_s for row in rows):.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

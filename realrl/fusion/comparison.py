"""A fused schedule beside what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from realrl.fusion.search import Fused
from realrl.plan.fusion.baselines import Baseline, greedy, interleaved, serial
from realrl.plan.fusion.listing import serial_words
from realrl.plan.fusion.problem import problem_of
from realrl.plan.fusion.schedule import FusedSchedule

COLUMNS = ("schedule", "latency", "of the bound", "faster than serial", "highest peak", "of serial", "bubbles")


@dataclass(frozen=True)
class Comparison:
    """The schedule that was found, beside ways to train without a search.

    Attributes:
        others: interleaved 1F1B and greedy fusion, as far as there are such.
        serial_schedule: 1F1B in series as a schedule of all tasks, where no device waits for the others between models.
    """

    found: Fused
    serial: Baseline
    others: tuple[Baseline, ...]
    serial_schedule: FusedSchedule
    fused_name: str = "fused"

    def rows(self) -> list[tuple[str, ...]]:
        """Return rows of a table of `COLUMNS`."""
        schedule = self.found.schedule
        fused = Baseline(self.fused_name, schedule.latency, schedule.peak)
        rows = [self._row(baseline) for baseline in (self.serial, *self.others, fused)]
        share = Baseline("", self.found.bound, 0.0).bubble_share(schedule.instance)
        last = ("lower bound", f"{self.found.bound:.6g}", "1.000", f"{self.serial.latency / self.found.bound:.3f}")
        least = self.found.least_peak
        return [*rows, (*last, f"{least:.6g}", self._of_serial(least), f"{share:.1%}")]

    def _row(self, baseline: Baseline) -> tuple[str, ...]:
        return (
            baseline.name,
            f"{baseline.latency:.6g}",
            f"{baseline.latency / self.found.bound:.3f}",
            f"{self.serial.latency / baseline.latency:.3f}",
            f"{baseline.peak:.6g}",
            self._of_serial(baseline.peak),
            f"{baseline.bubble_share(self.found.schedule.instance):.1%}",
        )

    def _of_serial(self, peak: float) -> str:
        return f"{peak / self.serial.peak:.3f}" if self.serial.peak else "-"


def compare(found: Fused) -> Comparison:
    """Return what was found beside the baselines of its instance."""
    instance = found.schedule.instance
    problem = problem_of(instance)
    others = tuple(one for one in (interleaved(instance), greedy(instance)) if one is not None)
    in_series = FusedSchedule.of_words(instance, problem.letters_of(serial_words(problem)))
    return Comparison(found, serial(instance), others, in_series)

"""Output of ``realrl simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from realrl.cli.console import print_table

if TYPE_CHECKING:
    from realrl.sim.cluster import SimulatedRun
    from realrl.sim.report import Comparison, Figures

_SHOWN_BOUNDS = 8


def print_figures(figures: Figures, run: SimulatedRun) -> None:
    """Print the period, the calls, the devices and what bounds the period."""
    from realrl.sched.story import ranks_text

    period_s = figures.period_s
    _, steady = run.steady
    tokens = sum(step.report.metrics["n_tokens"] for step in steady) / len(steady)
    which = f"steps {steady[0].report.step} to {steady[-1].report.step}" if len(steady) > 1 else "one step"
    print(f"period {_seconds(period_s)} ({which}), {tokens / period_s if period_s else 0.0:,.0f} tokens/s\n")
    rows = [
        (name, _seconds(call.seconds), _share(call.device_share), _share(call.bound_s / period_s if period_s else 0.0))
        for name, call in figures.calls.items()
    ]
    print_table(("call", "time", "of all devices", "of what bounds the period"), rows, title="Calls")
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, device in enumerate(figures.devices):
        shares = (device.computing, device.moving, device.meeting, device.idle)
        alike.setdefault(tuple(map(_share, shares)), []).append(rank)
    table = [(ranks_text(ranks), *shares) for shares, ranks in alike.items()]
    print_table(("device", "calls", "moving data", "waiting for others", "idle"), table, title="Devices")
    bounds = list(figures.bounds.items())[:_SHOWN_BOUNDS]
    rows3 = [(name, _seconds(seconds), _share(seconds / period_s)) for name, seconds in bounds]
    print_table(("what bounds the period", "time", "share"), rows3)


def print_recovery(attempts: Sequence[SimulatedRun]) -> None:
    """Print what the deaths of workers cost."""
    for before, after in pairwise(attempts):
        assert before.failure is not None
        committed = before.committed[-1] if before.committed else None
        kept_s, began_s = before.start_s, after.start_s
        if committed is not None:
            kept_s = next((s.at_s for s in before.steps if s.report.step == committed.point.step), committed.at_s)
        again_s = next((s.at_s for s in after.steps), after.end_s)
        point = f"the checkpoint of step {committed.point.step}" if committed else "the beginning"
        print(f"at {_seconds(before.end_s)} {before.failure.message}")
        print(
            f"the run goes on from {point}: {_seconds(before.end_s - kept_s)} of work are lost, "
            f"and its next step ends {_seconds(again_s - began_s)} after the restart\n"
        )
    if attempts[-1].failure is not None:
        print(f"at {_seconds(attempts[-1].end_s)} the run ends: {attempts[-1].failure.message}\n")


def print_comparison(comparison: Comparison) -> None:
    """Print the errors of a simulation against a recorded run."""
    pairs = {"a step": comparison.period, **comparison.calls}
    rows = [
        (
            name,
            _seconds(pair.recorded_s),
            _seconds(pair.simulated_s),
            f"{pair.error:+.1%}",
            _share(comparison.starts[name]) if name in comparison.starts else "",
        )
        for name, pair in pairs.items()
    ]
    columns = ("median time of", "recorded", "simulated", "error", "error of its start, of a step")
    print_table(columns, rows, title="Against the run")
    print(f"the begin of a call is wrong by {_share(comparison.worst_start)} of a step at most")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _share(share: float) -> str:
    return f"{share:.1%}"

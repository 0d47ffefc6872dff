"""Figures of a simulated run: its period, what takes it, and how far it is from a recorded run.

The steady state are the steps after the first; a run of one step has none, and that step counts.

What bounds the period is a chain: the last step ended because of an activity, which began because of the end of another
one, and so on back to the end of the first step. Every second of the steady state belongs to one link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from realrl.errors import ConfigError
from realrl.sched.events import RankSpan
from realrl.sched.track.dispatch import PartKind
from realrl.sim.cluster import SimulatedRun
from realrl.sim.workers import NO_CAUSE, Activity

MESSAGES, SCATTER = "messages and master", "scatter of calls"
_LEAST_S = 1e-12  # of a window, where nothing takes any time


@dataclass(frozen=True)
class CallFigures:
    """One call in the steady state.

    Attributes:
        seconds: of a step, on its slowest rank.
        device_share: share of the time of all devices.
        bound_s: seconds of a step in which it bounds the period.
    """

    seconds: float
    device_share: float
    bound_s: float


@dataclass(frozen=True)
class DeviceFigures:
    """Shares of one device's time in the steady state; they add up to 1.

    Attributes:
        computing: calls.
        moving: rows, parameters, and what a rank does alone.
        meeting: waiting for others in a call or in hooks.
        idle: waiting for work.
    """

    computing: float
    moving: float
    meeting: float
    idle: float


@dataclass(frozen=True)
class Figures:
    """All figures of a run.

    Attributes:
        period_s: mean seconds of a step in the steady state, with what scatter of calls adds; nothing else has that.
        calls: by name, in the order of the report.
        devices: by rank.
        bounds: what bounds the period -> seconds of a step, the largest first; `SCATTER` is one of them.
    """

    period_s: float
    calls: Mapping[str, CallFigures]
    devices: tuple[DeviceFigures, ...]
    bounds: Mapping[str, float]


@dataclass(frozen=True)
class Link:
    """A stretch of the chain.

    Attributes:
        name: the call, its rows or its hooks; `MESSAGES` between two activities.
        activity: its index in the run; `NO_CAUSE` for messages.
    """

    name: str
    activity: int
    begin_s: float
    end_s: float


def figures_of(run: SimulatedRun) -> Figures:
    """Return the figures of a run that completed a step."""
    from_s, steady = run.steady
    window_s, n_steps = max(steady[-1].at_s - from_s, _LEAST_S), len(steady)
    bounds = {name: seconds / n_steps for name, seconds in _bounds(run).items()}
    if run.scatter_s:
        bounds[SCATTER] = run.scatter_s
    used: dict[tuple[int, bool], float] = defaultdict(float)  # rank, True if it computes
    met: dict[int, float] = defaultdict(float)
    of_call: dict[str, float] = defaultdict(float)
    for activity in run.activities:
        computes = activity.kind == PartKind.CALL.value
        for rank, end_s in activity.ends.items():
            until_s = min(end_s, steady[-1].at_s)
            seconds = max(0.0, until_s - max(activity.start_s, from_s))
            used[rank, computes] += seconds
            met[rank] += max(0.0, min(activity.start_s, until_s) - max(activity.begins[rank], from_s))
            if computes:
                of_call[activity.name] += seconds
    names = [name.removeprefix("time_s/") for name in steady[-1].report.metrics if name.startswith("time_s/")]
    calls = {
        name: CallFigures(
            seconds=fmean(step.report.metrics[f"time_s/{name}"] for step in steady),
            device_share=of_call[name] / (window_s * run.n_ranks),
            bound_s=bounds.get(name, 0.0),
        )
        for name in names
        if name in of_call
    }
    devices = []
    for rank in range(run.n_ranks):
        computing, moving, meeting = (s / window_s for s in (used[rank, True], used[rank, False], met[rank]))
        devices.append(DeviceFigures(computing, moving, meeting, max(0.0, 1.0 - computing - moving - meeting)))
    ordered = sorted(bounds.items(), key=lambda item: -item[1])
    return Figures(window_s / n_steps + run.scatter_s, calls, tuple(devices), dict(ordered))


def chain_of(run: SimulatedRun) -> tuple[Link, ...]:
    """Return what bounds the period, in the order of time: from the end of the first step to that of the last."""
    from_s, _ = run.steady
    found: list[Link] = []

    def add(name: str, index: int, begin_s: float, end_s: float) -> None:
        if end_s > max(begin_s, from_s):
            found.append(Link(name, index, max(begin_s, from_s), end_s))

    until_s, index = run.steps[-1].at_s, run.steps[-1].activity
    while index != NO_CAUSE and until_s > from_s:
        activity = run.activities[index]
        end_s = max((end for end in activity.ends.values() if end <= until_s), default=activity.start_s)
        add(MESSAGES, NO_CAUSE, end_s, until_s)
        add(_label(activity), index, activity.start_s, end_s)
        add(f"rows and parameters for {activity.name}", index, activity.came_s, activity.start_s)
        until_s, index = activity.came_s, activity.cause
    add(MESSAGES, NO_CAUSE, from_s, until_s)
    return tuple(reversed(found))


def _bounds(run: SimulatedRun) -> dict[str, float]:
    """Return the links of the chain by name -> their seconds together."""
    found: dict[str, float] = defaultdict(float)
    for link in chain_of(run):
        found[link.name] += link.end_s - link.begin_s
    return found


def _label(activity: Activity) -> str:
    words = {PartKind.ROWS.value: "rows for ", PartKind.CALL.value: ""}
    if activity.kind in (PartKind.AHEAD.value, PartKind.BEFORE.value, PartKind.AFTER.value):
        return f"hooks {activity.kind} {activity.name}"
    return words.get(activity.kind, "") + activity.name


# ---------------------------------------------------------------- against a recorded run


@dataclass(frozen=True)
class Pair:
    """A figure of a recorded run and of a simulated one, in seconds."""

    recorded_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Return the relative error of the simulation."""
        return self.simulated_s / self.recorded_s - 1.0 if self.recorded_s else 0.0


@dataclass(frozen=True)
class Comparison:
    """Errors of a simulation against a recorded run, in the steps of the steady state that both have.

    Attributes:
        period: median seconds of a step.
        calls: call -> median of its seconds.
        starts: call -> median error of the begin of its bars, in periods, counted from the first bar of their step.
        worst_start: the largest of these errors over all bars.
    """

    period: Pair
    calls: Mapping[str, Pair]
    starts: Mapping[str, float]
    worst_start: float


def compare(
    run: SimulatedRun, metrics: Mapping[int, Mapping[str, float]], spans: Iterable[RankSpan], source: str
) -> Comparison:
    """Compare a simulated run with a recorded one.

    Args:
        metrics: step -> line of the recorded ``metrics.jsonl``.
        spans: recorded spans.
        source: name of the recording for messages.

    Raises:
        ConfigError: they have no step in common.
    """
    both = [step for step in run.steps if step.report.step in metrics]
    if not both:
        raise ConfigError(f"{source} has no step that the simulated run has", remedy="Simulate its steps.")
    steady = both[1:] or both
    recorded = [metrics[step.report.step] for step in steady]
    simulated = [step.report.metrics for step in steady]
    names = sorted({name for row in simulated for name in row if name.startswith("time_s/")} & recorded[0].keys())
    pairs = {
        name.removeprefix("time_s/"): Pair(median(r[name] for r in recorded), median(s[name] for s in simulated))
        for name in names
    }
    step = pairs.pop("step")
    period = Pair(step.recorded_s, step.simulated_s + run.scatter_s)
    steps = {end.report.step for end in steady}
    ours = _starts([item for step in run.steps for item in step.report.spans] + list(run.spans), steps)
    theirs = _starts(spans, steps)
    errors: dict[str, list[float]] = defaultdict(list)
    for key in ours.keys() & theirs.keys():
        errors[key[0]].append(abs(ours[key] - theirs[key]) / (period.recorded_s or 1.0))
    calls = {name: pair for name, pair in pairs.items() if name in errors}
    worst = max((error for of_call in errors.values() for error in of_call), default=0.0)
    return Comparison(period, calls, {name: median(errors[name]) for name in calls}, worst)


def _starts(spans: Iterable[RankSpan], steps: Sequence[int] | set[int]) -> dict[tuple[str, int, int, int], float]:
    """Return (call, step, n-th dispatch, rank) -> begin of its bar, counted from the first bar of the step."""
    bars = [
        (item.span.name, int(item.span.args["step"]), int(item.span.args["dispatch"]), item.rank, item.span.start_s)
        for item in spans
        if item.span.kind == "call" and item.span.args["step"] in steps
    ]
    begin_of: dict[int, float] = {}
    dispatches: dict[tuple[str, int], set[int]] = defaultdict(set)
    for name, step, dispatch, _, start_s in bars:
        begin_of[step] = min(start_s, begin_of.get(step, start_s))
        dispatches[name, step].add(dispatch)
    number = {(key, d): n for key, found in dispatches.items() for n, d in enumerate(sorted(found))}
    return {
        (name, step, number[(name, step), dispatch], rank): start_s - begin_of[step]
        for name, step, dispatch, rank, start_s in bars
    }

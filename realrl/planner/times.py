"""Seconds of calls in the steady state of a simulated run, and the room that each has before a step gets longer.

The room is that of the fast model of the search, given the seconds that the real scheduler's run has.

Invariants of `slack_of`:
    - a call on a cycle of waits, or on the device, that bounds the period has no room;
    - with its room used up, the period is as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from realrl.experiment.run_plan import RunPlan
from realrl.plan.hooks import Realloc
from realrl.sched.track.dispatch import PartKind
from realrl.search.fast import Parts, busiest, finish_times
from realrl.search.flow import Flow, flow_of
from realrl.search.space import Span
from realrl.sim.cluster import SimulatedRun
from realrl.sim.workers import Activity

_HALVINGS = 16
_MEASURED = 2, 8  # steps at whose ends the period is measured
_SAME = 1.0 + 1e-6


class CallTimes(NamedTuple):
    """Seconds of a step.

    Attributes:
        before, after: hooks that move parameters, on their slowest rank.
        rows: rows that come in a part of their own, or before the call, and parameters that come back from the host.
        run: the call, from the moment when all ranks of a replica are ready.
        waiting: mean over the ranks, for others that come later.
    """

    before: float = 0.0
    rows: float = 0.0
    run: float = 0.0
    after: float = 0.0
    waiting: float = 0.0


_FIELDS = {
    PartKind.BEFORE.value: "before",
    PartKind.ROWS.value: "rows",
    PartKind.CALL.value: "run",
    PartKind.AFTER.value: "after",
}


def call_times(run: SimulatedRun) -> dict[str, CallTimes]:
    """Return call -> its seconds of a step, in the mean of the steps after the first one."""
    n_steps = len(run.steps)
    counts: dict[tuple[str, str, int], int] = defaultdict(int)
    dispatches: dict[tuple[str, str], dict[int, list[Activity]]] = defaultdict(lambda: defaultdict(list))
    for activity in run.activities:
        if activity.kind in _FIELDS:
            for rank in activity.ends:
                counts[activity.name, activity.kind, rank] += 1
            number = counts[activity.name, activity.kind, next(iter(activity.ends))]
            dispatches[activity.name, activity.kind][number].append(activity)
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (name, kind), numbered in dispatches.items():
        a_step = len(numbered) / n_steps
        later = [some for number, some in numbered.items() if number > a_step] or [*numbered.values()]
        own, share = found[name], a_step / len(later)
        for some in later:
            own[_FIELDS[kind]] += share * max(max(one.ends.values()) - one.start_s for one in some)
            if kind == PartKind.CALL.value:
                own["rows"] += share * max(one.start_s - one.came_s for one in some)
                waits = [one.came_s - begin_s for one in some for begin_s in one.begins.values()]
                own["waiting"] += share * max(0.0, sum(waits) / len(waits))
    return {name: CallTimes(**values) for name, values in found.items()}


@dataclass(frozen=True)
class Rhythm:
    """The calls of a plan as the fast model takes them, with seconds of a run by the real scheduler."""

    flow: Flow
    parts: tuple[Parts, ...]

    def period(self, parts: Sequence[Parts] | None = None) -> float:
        """Return the seconds of a step."""
        parts = self.parts if parts is None else parts
        first, last = _MEASURED
        ends = finish_times(self.flow, parts, last)
        return max((ends[last] - ends[first]) / (last - first), busiest(parts))

    def with_run(self, call: str, seconds: float) -> list[Parts]:
        """Return the parts with other seconds of one call."""
        place = self.flow.names.index(call)
        return [replace(one, run=seconds) if i == place else one for i, one in enumerate(self.parts)]

    def run_of(self, call: str) -> float:
        return self.parts[self.flow.names.index(call)].run


def rhythm_of(plan: RunPlan, times: Mapping[str, CallTimes]) -> Rhythm:
    """Return the calls of a plan with the seconds that they took."""
    weightless = [name for name in plan.roles if plan.home_of(name) is None]
    flow = flow_of(plan.graph, weightless=weightless)
    parts = []
    for name in flow.names:
        own, hooks = times.get(name, CallTimes()), plan.hooks[name]
        before, after = (
            tuple(
                _span(place.mesh.ranks)
                for hook in some
                if isinstance(hook, Realloc)
                for place in (hook.source_allocation, hook.target_allocation)
            )
            for some in (hooks.before, hooks.after)
        )
        mesh = _span(plan.allocations[name].mesh.ranks)
        parts.append(Parts(own.before, own.rows + own.run, own.after, mesh, before, after))
    return Rhythm(flow, tuple(parts))


def slack_of(rhythm: Rhythm, call: str) -> float:
    """Return the seconds that a call could take longer before a step did."""
    run, base = rhythm.run_of(call), rhythm.period()
    low, high = 0.0, max(0.0, base - run)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if rhythm.period(rhythm.with_run(call, run + middle)) <= base * _SAME:
            low = middle
        else:
            high = middle
    return low if low > base * 1e-3 else 0.0


def _span(ranks: Sequence[int]) -> Span:
    return min(ranks), max(ranks) + 1

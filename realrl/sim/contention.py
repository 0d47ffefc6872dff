"""Devices of a node that share cores, caches or memory: a call is faster while the others wait.

Costs hold for a node whose devices all compute. Who computes at the same time is known after a simulation, so one is
made with these costs, and others with what the one before has found.

Invariants of `waiting_shares`:
    - every share is between 0 and 1;
    - it is 1 for a call that nothing overlaps, and 0 for one on all devices of its nodes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from realrl.sched.calls import ScheduledCall
from realrl.sched.track.dispatch import PartKind
from realrl.sim.cluster import SimulatedRun
from realrl.sim.costs.flops import Array
from realrl.sim.durations import ChangedCalls, Durations
from realrl.sim.scatter import scatter_seconds

_N_ROUNDS = 2  # a third changes the period of five plans by less than 1%


def simulate_sharing(
    simulate: Callable[[Durations], Sequence[SimulatedRun]],
    durations: Durations,
    *,
    alone: float,
    scatter: float = 0.0,
    node_of: Callable[[int], int],
    n_steps: int | None = None,
) -> Sequence[SimulatedRun]:
    """Simulate with calls that are faster while the other devices of their nodes wait; return the attempts.

    The last one knows what scatter of calls adds to its steps.

    Args:
        simulate: simulates with given durations.
        durations: those of a node whose devices all compute.
        alone, scatter: see `realrl.sim.hardware.Device`; without both, a single simulation will do.
        node_of: node of a global rank.
        n_steps: calls are as fast as between the ends of the first step and of this one, so that it does not matter
            how a run begins and ends; None for the whole run.
    """
    attempts, relieved = simulate(durations), durations
    for _ in range(_N_ROUNDS if alone != 1.0 else 0):
        shares = waiting_shares(attempts[-1], node_of, n_steps)
        relieved = _relieved(durations, shares, alone)
        attempts = simulate(relieved)
    if scatter and attempts[-1].steps:
        *earlier, last = attempts
        added_s = scatter_seconds(simulate, relieved, scatter, last, n_steps)
        return [*earlier, replace(last, scatter_s=added_s)]
    return attempts


def waiting_shares(run: SimulatedRun, node_of: Callable[[int], int], n_steps: int | None = None) -> dict[str, float]:
    """Return call -> share of its time in which the other devices of its nodes compute nothing, on average.

    Args:
        n_steps: as for `simulate_sharing`.
    """
    first_s, last_s = -math.inf, math.inf
    if n_steps is not None:
        first_s, last_s = run.steps[0].at_s, run.steps[n_steps - 1].at_s
    bars: dict[int, list[tuple[float, float]]] = defaultdict(list)
    ranks_of: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for activity in run.activities:
        if activity.kind == PartKind.CALL.value:
            for rank, end_s in activity.ends.items():
                bar = max(activity.start_s, first_s), min(end_s, last_s)
                if bar[0] < bar[1]:
                    bars[rank].append(bar)
                    ranks_of[activity.name].append((rank, *bar))
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in range(run.n_ranks):
        nodes[node_of(rank)].append(rank)
    busy = {rank: _busy(found) for rank, found in bars.items()}
    shares = {}
    for name, found in ranks_of.items():
        possible = waited = 0.0
        for rank, start_s, end_s in found:
            for other in nodes[node_of(rank)]:
                if other != rank:
                    used = float(np.diff(np.interp([start_s, end_s], *busy[other]))[0]) if other in busy else 0.0
                    possible += end_s - start_s
                    waited += end_s - start_s - used
        shares[name] = min(1.0, max(0.0, waited / possible)) if possible else 0.0
    return shares


def _busy(bars: Sequence[tuple[float, float]]) -> tuple[Array, Array]:
    """Return times, and the seconds of bars up to each, for bars that do not overlap."""
    times = np.array(sorted(bars)).reshape(-1)
    lengths = np.diff(times, prepend=times[:1])
    lengths[::2] = 0.0
    return times, np.cumsum(lengths)


def _relieved(durations: Durations, shares: Mapping[str, float], alone: float) -> Durations:
    """Return durations whose calls are shorter by what they gain while others wait."""

    def change(call: ScheduledCall, seconds: Mapping[int, float]) -> Mapping[int, float]:
        share = shares.get(call.name, 0.0)
        factor = 1.0 - share + share / alone
        return {rank: factor * s for rank, s in seconds.items()}

    return cast(Durations, ChangedCalls(durations, change))

"""Calls that take longer on one device, or at one time, than on another, and what that adds to a step.

Durations of a machine are those of a usual device at a usual time. Devices that meet wait for the slowest of them, so
that a step takes longer, in a plan of many meetings more than in one of few. How much, runs tell whose calls scatter.

Invariants:
    - the n-th dispatch of a call is as slow on a device in every plan, so that plans differ by what they are;
    - without scatter, nothing is added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from statistics import fmean
from typing import cast

from realrl.sched.calls import ScheduledCall
from realrl.sim.cluster import SimulatedRun
from realrl.sim.durations import ChangedCalls, Durations, as_slowest

_N_STEPS = 64  # of a device, that runs have together; the more devices there are, the less chance decides


def scatter_of(seconds: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms of what devices take for equal work at the same time.

    It is that of normal values of which two differ as much on average, as that decides how long devices wait for each
    other. One device tells none.
    """
    differences = [abs(math.log(one / other)) for one, other in combinations(seconds, 2)]
    return math.sqrt(math.pi) / 2 * fmean(differences) if differences else 0.0


def scattered(durations: Durations, scatter: float, draw: int) -> Durations:
    """Return durations in which a device takes ``exp(scatter * z)`` times as long for a call.

    Args:
        durations: medians.
        scatter: standard deviation of the logarithm.
        draw: number of the draw of the normal z, one for each dispatch and device. An odd one has the opposite of those
            of the one before, so that the two differ little on average.
    """
    n_dispatches = Counter[str]()
    signed = -scatter if draw % 2 else scatter

    def change(call: ScheduledCall, seconds: Mapping[int, float]) -> Mapping[int, float]:
        n_dispatches[call.name] += 1
        dispatch = f"{draw // 2} {call.name} {n_dispatches[call.name]}"

        def factor(rank: int) -> float:
            return math.exp(signed * Random(f"{dispatch} {rank}").gauss(0.0, 1.0))

        return as_slowest(seconds, durations.meets(call), factor)

    return cast(Durations, ChangedCalls(durations, change))


def scatter_seconds(
    simulate: Callable[[Durations], Sequence[SimulatedRun]],
    durations: Durations,
    scatter: float,
    plain: SimulatedRun,
    n_steps: int | None = None,
) -> float:
    """Return the seconds by which a step is longer on average than in a run without scatter.

    Args:
        simulate: simulates with given durations; the last attempt counts.
        scatter: see `scattered`.
        plain: the run without.
        n_steps: first steps that count; None for all.
    """
    plain_s, n = _period(plain, n_steps)
    draws = range(2 * math.ceil(_N_STEPS / (2 * n * plain.n_ranks)))
    periods = [_period(simulate(scattered(durations, scatter, draw))[-1], n_steps)[0] for draw in draws]
    return max(0.0, fmean(periods) - plain_s)


def _period(run: SimulatedRun, n_steps: int | None) -> tuple[float, int]:
    """Return the mean seconds of a step in the steady state, and its number of steps."""
    from_s, steps = replace(run, steps=run.steps[:n_steps]).steady
    return (steps[-1].at_s - from_s) / len(steps), len(steps)

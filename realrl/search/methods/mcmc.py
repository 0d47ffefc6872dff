"""A random walk over plans: Mei et al. 2025, "ReaL", section 5.2.

From the symmetric plan, one call at a time gets another mesh and strategy; a plan that is better is kept, a worse one
with a probability that falls with its period and with time (Metropolis). The cost is the period of the fast model, as
ReaL's is that of its simulator; a plan that lacks memory is not kept.

Invariants:
    - equal input and seed give an equal plan;
    - no more plans than `n_evaluations` are evaluated, and the best of them is returned, the first one among them.
"""

from __future__ import annotations

import math
import random

from realrl.errors import AllocationError
from realrl.search.local.spans import nests, random_start
from realrl.search.memory.devices import Learned
from realrl.search.methods.layout import Plan
from realrl.search.methods.placements import colocate, real_heuristic
from realrl.search.problem import Problem
from realrl.search.space import Placed

N_EVALUATIONS = 600
TEMPERATURES = 0.1, 0.001  # at the start and at the end, as shares of the first plan's period


def mcmc(problem: Problem, seed: int) -> Plan:
    """Return the best plan of a walk of `N_EVALUATIONS` steps."""
    return walked(problem, seed)


def walked(
    problem: Problem,
    seed: int,
    *,
    n_evaluations: int = N_EVALUATIONS,
    temperatures: tuple[float, float] = TEMPERATURES,
) -> Plan:
    """Return the best plan of a walk from the symmetric one, or, where that lacks memory, from the colocated one.

    Args:
        n_evaluations: proposals; those whose meshes overlap in part are drawn again, and do not count.
        temperatures: see `TEMPERATURES`; it falls by the same factor with each proposal.

    Raises:
        AllocationError: neither of the two plans fits.
    """
    model, rng = problem.model, random.Random(seed)
    plan, learned = _first(problem, seed), Learned()
    best = plan
    first = period = least = model.period(plan)
    hot, cold = temperatures
    for number in range(n_evaluations):
        temperature = first * hot * (cold / hot) ** (number / n_evaluations)
        limit = period - temperature * math.log(1.0 - rng.random())  # a plan is kept up to this period
        proposal = _proposal(problem, plan, rng)
        if (
            model.memory.likely(proposal, learned, model.capacity) > model.capacity
            or model.period(proposal, moves=False) > limit
        ):
            continue
        found = model.period(proposal)
        if found <= limit:
            plan, period = proposal, found
            if found < least and model.accepts(proposal):
                best, least = proposal, found
    return best


def _first(problem: Problem, seed: int) -> Plan:
    refused: AllocationError | None = None
    for place in (real_heuristic, colocate):
        try:
            return place(problem, seed)
        except AllocationError as error:
            refused = error
    assert refused is not None
    reason = f"method 'mcmc' has no plan to start from: {refused.message}"
    raise AllocationError(reason, remedy=refused.remedy)


def _proposal(problem: Problem, plan: Plan, rng: random.Random) -> Plan:
    """Return a plan with another mesh and another choice for one call."""
    cluster = problem.model.cluster
    while True:
        call = rng.randrange(len(plan))
        size = rng.choice(sorted({choice.n_devices for choice in problem.choices[call]}))
        choice = rng.choice([choice for choice in problem.choices[call] if choice.n_devices == size])
        start = problem.fixed[call] if call in problem.fixed else random_start(cluster, size, rng)
        span = start, start + size
        others = [placed.span for number, placed in enumerate(plan) if number != call]
        if all(nests(span, other, cluster.n_devices_per_node) for other in others):
            return (*plan[:call], Placed(span, choice), *plan[call + 1 :])

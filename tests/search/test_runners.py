"""The plans that a search keeps: the best of all, and the best of those with other meshes."""

import random

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.search.runners import Runners
from realrl.search.space import Choice, Placed


def test_the_best_plan_of_each_arrangement_stays_beside_many_that_are_better():
    rng, runners, least = random.Random(1), Runners(), {}
    for _ in range(2000):
        first = rng.randrange(40)
        choice = Choice(ParallelStrategy(1), n_mbs=None, zero_stage=rng.randrange(3), checkpoints=rng.random() < 0.5)
        period = 100.0 * first + rng.random()
        plan = (Placed((first, first + 1), choice),)
        runners.offer(plan, period)
        spans = (plan[0].span,)
        least[spans] = min(least.get(spans, (period, plan)), (period, plan), key=lambda one: one[0])
    best = sorted(least.values(), key=lambda one: one[0])[:16]
    assert sorted(runners.apart.values(), key=lambda one: one[0]) == best
    assert runners.best == best[0][::-1]

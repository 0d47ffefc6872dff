"""The plans that a search keeps: the best of all, and the best of those with other meshes."""

import random

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.search.runners import Runners
from realrl.search.space import Choice, Placed


def test_the_best_plan_of_each_arrangement_stays_beside_many_that_are_better():
    """Plans differ by sizes of meshes and their places seen from each other, not by where these lie."""
    rng, runners, least = random.Random(1), Runners(4), {}
    for _ in range(4000):
        size, first, is_beside = rng.randrange(1, 20), 4 * rng.randrange(9), rng.random() < 0.5
        settings = {"zero_stage": rng.randrange(3), "checkpoints": rng.random() < 0.5}
        choice = Choice(ParallelStrategy(size), n_mbs=None, **settings)
        second = first + 20 if is_beside else first
        plan = (Placed((first, first + size), choice), Placed((second, second + size), choice))
        period = 100.0 * size + 30.0 * is_beside + rng.random()
        runners.offer(plan, period)
        key = size, is_beside
        least[key] = min(least.get(key, (period, plan)), (period, plan), key=lambda one: one[0])
    best = sorted(least.values(), key=lambda one: one[0])[:16]
    assert runners.best_apart == best
    assert runners.best == best[0][::-1]

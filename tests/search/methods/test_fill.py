import itertools
import random
from dataclasses import replace

import pytest

from realrl.mesh.device_mesh import Cluster
from realrl.search.methods.fill import Filler, Rule
from realrl.search.methods.layout import Maker
from realrl.search.space import Placed
from tests.search.methods.cases import GENERATE, GRAPHS, posed


def few(problem, rng, n_choices):
    """The same problem with a few choices of each size for each call."""
    kept = []
    for found in problem.choices:
        by_size = {}
        for choice in found:
            by_size.setdefault(choice.n_devices, []).append(choice)
        kept.append(tuple(c for same in by_size.values() for c in rng.sample(same, min(n_choices, len(same)))))
    return replace(problem, choices=kept)


def total(problem, plan):
    """Seconds of all calls, moves of parameters included."""
    return sum(one.seconds for one in problem.model.parts(plan))


def enumerated(problem, rule, mfcs, size):
    """The least sum of seconds of all calls on one mesh, by trying everything."""
    best = None
    options = [
        [c for c in found if c.n_devices == size and rule.allows(mfc, c)]
        for mfc, found in zip(mfcs, problem.choices, strict=True)
    ]
    homes = problem.model.flow.homes
    for chosen in itertools.product(*options):
        is_alike = all(
            not rule.is_alike(mfc) or chosen[home].strategy == c.strategy
            for mfc, c, home in zip(mfcs, chosen, homes, strict=True)
        )
        if is_alike and not problem.model.overflow([Placed((0, size), c) for c in chosen]):
            seconds = total(problem, [Placed((0, size), c) for c in chosen])
            best = seconds if best is None else min(best, seconds)
    return best


def test_the_least_seconds_that_fit():
    n_found = n_alike = n_tight = 0
    for seed in range(60):
        rng = random.Random(seed)
        name = rng.choice(["ppo", "self_play", "sft"])
        problem = few(posed(GRAPHS[name](), Cluster(1, 4), capacity=rng.choice([900, 1500, 2600, 9000])), rng, 3)
        is_alike = rng.random() < 0.3
        rule = Rule(is_alike=(lambda mfc: mfc.interface_type is not GENERATE) if is_alike else (lambda mfc: False))
        mfcs = Maker("x", problem, rule).mfcs
        filler = Filler(problem, mfcs, rule, problem.model.capacity)
        calls = tuple(range(len(mfcs)))
        found, expected = filler.best(calls, 4), enumerated(problem, rule, mfcs, 4)
        assert (found is None) == (expected is None)
        if found is None:
            least = filler.least(calls, 4)
            assert least is None or least > problem.model.capacity
            n_tight += 1
            continue
        plan = [Placed((0, 4), found.choices[call]) for call in calls]
        assert total(problem, plan) == pytest.approx(expected)
        assert sum(found.seconds) <= expected + 1e-9  # without moves
        assert not problem.model.overflow(plan)
        n_found, n_alike = n_found + 1, n_alike + is_alike
    assert n_found >= 20
    assert n_alike >= 3
    assert n_tight >= 3

"""Places of meshes: every one that differs, and no alike ones."""

import math
import random
from dataclasses import replace
from itertools import product

import pytest

from realrl.mesh.device_mesh import Cluster, ParallelStrategy
from realrl.search import places
from realrl.search.forest import Forest
from realrl.search.memory.devices import Learned
from realrl.search.places import Places
from realrl.search.space import Choice, relation
from tests.search.problems import AlikeDevices, all_plans, problem


def relations(plan, node):
    return [relation(a.span, b.span, node) for a, b in product(plan, repeat=2)]


def arrangement(plan, cluster):
    """The forest of a plan, and its vertices."""
    states = [(Forest.of(cluster), ())]
    for placed in plan:
        states = [
            (after, (*vertices, v))
            for forest, vertices in states
            for after, v in forest.placed(placed.choice.n_devices)
        ]
    wanted, node = relations(plan, cluster.n_devices_per_node), cluster.n_devices_per_node
    for forest, vertices in states:
        spans = forest.layout()
        if [relation(spans[a], spans[b], node) for a, b in product(vertices, repeat=2)] == wanted:
            return forest, vertices
    raise AssertionError("an arrangement is missing")


@pytest.mark.parametrize("seed", range(40))
def test_an_arrangement_has_a_place_where_it_fits(seed):
    rng = random.Random(seed)
    found = problem(seed, most_plans=200, n_calls=3)
    roomy = replace(found.model, capacity=math.inf)
    plan = rng.choice(list(all_plans(replace(found, model=roomy))))
    forest, vertices = arrangement(plan, roomy.cluster)
    tight = replace(roomy, capacity=roomy.need(plan))
    looked = Places(tight, Learned(), forest, vertices, [placed.choice for placed in plan])
    made = list(looked.plans({}))
    assert made
    assert not looked.is_cut
    assert len(set(made)) == len(made)
    for other in made:
        assert relations(other, roomy.cluster.n_devices_per_node) == relations(plan, roomy.cluster.n_devices_per_node)
        assert not tight.overflow(other)


class Halves(AlikeDevices):
    """All calls are of models in two parts, one for each half of a mesh."""

    def __init__(self, prices):
        self.call, self.move = prices.call, prices.move

    def parts(self, call, choice):
        return [i * 2 // choice.n_devices if choice.n_devices > 1 else 0 for i in range(choice.n_devices)]


@pytest.mark.parametrize(
    ("cluster", "sizes", "n_places"),
    [
        (Cluster(1, 8), (8, 1), 2),  # beside either half
        (Cluster(2, 4), (8, 4, 1), 4),
        (Cluster(8, 1), (8, 2), 1 + 1 + 3),  # at the start, across both halves, anywhere in the second one
        (Cluster(8, 1), (2, 2), 1),  # of a cluster without other meshes
    ],
)
def test_alike_places_are_tried_once(cluster, sizes, n_places):
    found = problem(3, n_calls=3)
    model = replace(found.model, prices=Halves(found.model.prices), cluster=cluster, capacity=math.inf, _memory=None)
    forest, vertices = Forest.of(cluster), []
    for size in sizes:
        inside = vertices[-1] if vertices and size < forest.sizes[vertices[-1]] else 0
        forest, vertex = next(
            (f, v) for f, v in forest.placed(size) if v not in vertices and f.parents[v] in (inside, -1)
        )
        vertices.append(vertex)
    looked = Places(model, Learned(), forest, vertices, [Choice(ParallelStrategy(size)) for size in sizes])
    assert len(list(looked.plans({}))) == n_places


def test_places_that_are_too_many_are_left_out(monkeypatch):
    monkeypatch.setattr(places, "_MOST_PLANS", 2)
    model = replace(problem(3).model, cluster=Cluster(8, 1), capacity=math.inf, _memory=None)
    forest, vertex = next(Forest.of(model.cluster).placed(2))
    looked = Places(model, Learned(), forest, [0, vertex], [Choice(ParallelStrategy(8)), Choice(ParallelStrategy(2))])
    assert len(list(looked.plans({}))) == 2
    assert looked.is_cut

"""Bytes of plans, device by device, and what is learned from plans that are refused."""

import math
import random
from dataclasses import replace
from functools import partial
from operator import ne

import pytest

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.search.fast import Model
from realrl.search.local.anneal import Annealing, Kind
from realrl.search.local.compiled import scores_of
from realrl.search.memory.devices import Learned, Shown
from realrl.search.memory.links import connected, links_of
from realrl.search.space import Choice, Placed
from tests.search.problems import RandomPrices, all_plans, problem, walk_of


def whole_need(model, plan):
    """The same sum, one device and one call at a time."""
    flow, most = model.flow, 0
    for device in range(model.cluster.n_devices):
        here = {c: device - p.span[0] for c, p in enumerate(plan) if p.span[0] <= device < p.span[1]}
        kept = sum(
            model.prices.on_devices(flow.names[c], plan[c].choice).kept[place]
            for c, place in here.items()
            if flow.homes[c] == c
        )
        for call, place in here.items():
            target, home = plan[call], plan[flow.homes[call]]
            used = model.prices.on_devices(flow.names[call], target.choice).used[place]
            if home.placement != target.placement:
                is_shared = max(home.span[0], target.span[0]) < min(home.span[1], target.span[1])
                names = flow.names[flow.homes[call]], flow.names[call]
                start = home.span[0] - target.span[0] if is_shared else None
                used = model.prices.arriving(names, home.choice, target.choice, start)[place]
            most = max(most, int(kept + used))
    return most


def test_needs_are_those_of_the_fullest_device():
    """The most of one device does not meet the most of another."""
    n_less = 0
    for seed in range(15):
        found = problem(seed, most_plans=200)
        plans = list(all_plans(replace(found, model=replace(found.model, capacity=math.inf))))
        together = [plan for plan in plans if len({placed.span for placed in plan}) == 1]
        for plan in (*random.Random(seed).sample(plans, min(len(plans), 3)), *together[:1]):
            need = found.model.need(plan)
            assert need == whole_need(found.model, plan)
            if plan in together:
                prices = [found.model.price(call, placed.choice) for call, placed in enumerate(plan)]
                kept = sum(p.kept for call, p in enumerate(prices) if found.model.flow.homes[call] == call)
                n_less += need < kept + max(price.used for price in prices)
    assert n_less >= 2


class Connecting(RandomPrices):
    connects = True


def test_connections_of_the_first_device_do_not_count_elsewhere():
    found = problem(3)
    model = Model(found.model.flow, Connecting(3), found.model.cluster)
    n, (call, *_) = model.cluster.n_devices, model.flow.homes
    choice = Choice(ParallelStrategy(1, 1, n))
    own = model.prices.on_devices(model.flow.names[call], choice)
    links = connected([links_of(choice.strategy, 0, model.cluster)], n, model.cluster.n_devices_per_node)
    assert model.memory.need({call: Placed((0, n), choice)}) == (own.kept + own.used + links).max()


def calls_on(plan, device):
    return [placed.placement if device in range(*placed.span) else None for placed in plan]


def test_what_a_device_lacks_is_known_wherever_it_has_the_same_calls():
    n_others = n_alike = 0
    for seed in range(15):
        found, rng = problem(seed, most_plans=200), random.Random(seed)
        memory, n_devices = found.model.memory, found.model.cluster.n_devices
        plans = [*all_plans(found)]
        if not plans:
            continue
        plan, *others = rng.sample(plans, min(150, len(plans)))
        device = rng.randrange(*rng.choice(plan).span)
        learned, n_bytes = Learned(), 10 * max(memory.likely(one, Learned()) for one in (plan, *others))
        memory.learn(plan, Shown(n_bytes, device), learned)
        assert memory.likely(plan, learned) == n_bytes
        for other in others:
            is_alike = any(calls_on(other, one) == calls_on(plan, device) for one in range(n_devices))
            assert (memory.likely(other, learned) > n_bytes / 2) == is_alike
            assert is_alike or memory.likely(other, learned) == memory.likely(other, Learned())
            n_others, n_alike = n_others + 1, n_alike + (is_alike and other != plan)
    assert 20 < n_alike < n_others / 2


def walked(found):
    return [plan for plan, _ in walk_of(found).run(8) if plan is not None]


def walked_quickly(found):
    return [plan for plan, _ in walk_of(found, scores_of(found)).run(8) if plan is not None]


def annealed(found):
    start, kind = max(all_plans(found), key=found.model.period), Kind(0.1, 0.0, 0.2, passes=False, hot=0.1)
    return [plan for plan, _ in Annealing(found).run(start, kind, 2000, seed="1") if plan is not None]


@pytest.mark.parametrize(("look", "seeds"), [(walked, range(16)), (walked_quickly, range(16)), (annealed, range(2))])
def test_a_refusal_takes_no_room_from_other_plans(look, seeds):
    """The second best plan is found, though it takes as many bytes as the best one, which is refused."""
    n_found = n = 0
    for seed in seeds:
        found = problem(seed, most_plans=200, n_calls=2)
        best, second, *_ = [*sorted(all_plans(found), key=found.model.period), (), ()]
        is_apart = [placed.placement for placed in best] != [placed.placement for placed in second]
        if not second or found.model.need(best) > found.model.need(second) or not is_apart:
            continue
        shown = Shown(int(found.model.capacity) + 1, device=best[0].span[0])
        model = replace(found.model, accepts=partial(ne, best), shows=lambda plan, shown=shown: shown)
        plans = look(replace(found, model=model))
        assert best not in plans
        n_found += bool(plans) and min(map(model.period, plans)) == model.period(second)
        n += 1
    assert n_found >= 0.7 * n > 0

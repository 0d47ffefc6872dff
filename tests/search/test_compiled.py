"""Chains in C++: their model is the one in Python, and what they yield fits, gets better, and keeps to pins."""

import math
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from realrl.compiler import UnavailableError
from realrl.search import branch
from realrl.search.branch import search
from realrl.search.fast import Model
from realrl.search.local import chains
from realrl.search.local.anneal import Annealing, Kind
from realrl.search.local.chains import ChainMaker
from realrl.search.local.compiled import CompiledAnnealing, CompiledScores, load, scores_of, why_not_compiled
from realrl.search.local.scores import Scores
from realrl.search.memory.devices import Learned, Ordered, Shown
from realrl.search.memory.links import ordered_links
from realrl.search.runners import arrangement
from tests.search.problems import RandomPrices, all_plans, posed, problem

try:
    load()
except UnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

KIND = Kind(apart=0.2, groups=0.2, pairs=0.2, passes=True, hot=0.1)


class Connecting(RandomPrices):
    """Prices of devices that have connections, which take far more than all else."""

    connects = True


class NodesConnected(Connecting):
    """The same, and all devices of a node have connections to each other."""

    any_rows = True


def connected(seed, make=Connecting):
    found, capacity = problem(seed, most_plans=600, n_calls=3), random.Random(seed).choice([8e8, 1.2e9, 2e9])
    return replace(found, model=Model(found.model.flow, make(seed), found.model.cluster, capacity))


def some_plans(found, n=60):
    """Plans, of which some lack memory."""
    roomy = replace(found, model=replace(found.model, capacity=math.inf))
    plans = [*all_plans(roomy)]
    return random.Random(1).sample(plans, min(n, len(plans)))


MAKERS = [problem, posed, connected, partial(connected, make=NodesConnected)]
MAKERS += [partial(problem, alone=1.4), partial(posed, alone=1.4)]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("seed", range(12))
def test_periods_and_bytes_are_those_of_the_python(make, seed):
    found = make(seed)
    compiled, model, learned = CompiledScores(found), found.model, Learned()
    for plan in some_plans(found):
        period = model.period(plan)
        assert compiled.period(plan) == pytest.approx(period, rel=1e-12)
        assert compiled.period(plan, limit=0.9 * period) == pytest.approx(model.period(plan, limit=0.9 * period))
        assert compiled.likely(plan) == model.memory.likely(plan, learned)
        assert compiled.likely(plan, 1.0) == model.memory.likely(plan, learned, 1.0)


def test_bytes_are_known_better_after_refusals():
    """A refusal shows orders of ranks, the same ones in all plans, and bytes that were not counted."""
    n_ordered = n_lacking = 0
    for seed in range(12):
        found, rng = connected(seed), random.Random(seed)
        memory, cluster = found.model.memory, found.model.cluster

        def shows(plan, memory=memory, cluster=cluster, rng=rng):
            ordered = {}
            for call, home in enumerate(memory.sources):
                if home >= 0 and plan[call].placement != plan[home].placement:
                    own = random.Random(f"{call} {plan[call].placement} {plan[home].placement}")
                    order = tuple(own.sample(range(*plan[call].span), plan[call].choice.n_devices))
                    links = ordered_links(plan[call].choice.strategy, order, frozenset(), cluster)
                    ordered[call] = Ordered(links, tuple(rank - min(order) for rank in order))
            device = rng.randrange(*rng.choice(plan).span)
            return Shown(memory.likely(plan, Learned()) + rng.choice([0, 1000]), device, ordered)

        refusing = replace(found, model=replace(found.model, accepts=lambda plan: False, shows=shows))
        compiled, start = CompiledAnnealing(refusing), max(all_plans(found), key=found.model.period, default=None)
        if start is None:
            continue
        made = [period for plan, period in compiled.run(start, KIND, 2000, seed="1") if plan is not None]
        assert all(period >= found.model.period(start) for period in made)
        n_ordered, n_lacking = n_ordered + len(compiled.learned.ordered), n_lacking + len(compiled.learned.lacking)
        for plan in some_plans(found):
            assert compiled.likely(plan) == memory.likely(plan, compiled.learned)
    assert n_ordered > 10
    assert n_lacking > 10


@pytest.mark.parametrize("settings", [{}, {"pins": True}, {"alone": 1.4}])
@pytest.mark.parametrize("seed", range(8))
def test_chains_find_the_best_plan_and_make_it_again(seed, settings):
    found = problem(seed, most_plans=2000, **settings)
    plans = [*all_plans(found)]
    if not plans:
        pytest.skip("nothing fits")
    start = max(plans, key=found.model.period)
    made = [[*ChainMaker(found, 1).annealed([start])] for _ in range(2)]
    assert made[0] == made[1]
    assert (None, math.inf) in made[0]
    yielded = [(plan, period) for plan, period in made[0] if plan is not None]
    assert all(plan in plans and found.model.period(plan) == pytest.approx(period) for plan, period in yielded)
    best = min([found.model.period(start), *(period for _, period in yielded)])
    assert best == pytest.approx(min(map(found.model.period, plans)))


def test_some_chains_begin_with_plans_on_other_meshes():
    """After the first round, what was found takes the place of the best plan alone."""
    found = problem(5, most_plans=2000)
    of_periods = {found.model.period(plan): plan for plan in all_plans(found)}
    better, *worse = [of_periods[period] for period in sorted(of_periods)[:12]]
    rounds = []

    def made(asked):
        rounds.append([chain.plan for chain in asked])
        yield [(better, found.model.period(better))] if len(rounds) == 1 else []
        yield from [[]] * (len(asked) - 1)

    assert [plan for plan, _ in ChainMaker(found, 1).annealed(worse, made)] == [better]
    assert {*rounds[0]} == {worse[0], worse[1], worse[9]}
    assert {*rounds[1]} == {better}
    rounds.clear()
    few = worse[:2]
    assert [*ChainMaker(found, 1).annealed(few, made)]
    assert {*rounds[0]} == {*few}


def test_the_best_plan_of_each_arrangement_comes_last():
    """One plan comes of those that differ in places alone. Nobody was asked about these, which are not better."""
    n_others = 0
    for seed in range(12):
        found, asked = problem(seed, most_plans=2000), []
        model = replace(found.model, accepts=lambda plan, asked=asked: asked.append(plan) or True)
        plans = [*all_plans(found)]
        if not plans:
            continue
        start = max(plans, key=model.period)
        states = CompiledAnnealing(replace(found, model=model)).run(start, KIND, 20_000, seed="1")
        made = [state for state in states if state[0] is not None]
        better, others = made[: len(asked)], made[len(asked) :]
        assert [plan for plan, _ in better] == asked
        assert all(after < before for before, after in pairwise([model.period(start), *(p for _, p in better)]))
        best = better[-1][1] if better else model.period(start)
        assert all(plan in plans and best <= period < 1.03 * best for plan, period in others)
        n_per_node = model.cluster.n_devices_per_node
        keys = [arrangement([placed.span for placed in plan], n_per_node) for plan, _ in others]
        assert len({*keys}) == len(keys)
        near = {
            arrangement([placed.span for placed in plan], n_per_node)
            for plan in plans
            if model.period(plan) < 1.03 * best
        }
        assert {*keys} <= near
        assert len(keys) >= min(16, len(near)) / 2
        n_others += len(keys)
    assert n_others > 10


def test_chains_are_made_in_python_without_a_compiler(monkeypatch):
    def missing(found):
        raise UnavailableError("there is no compiler")

    monkeypatch.setattr(chains, "CompiledAnnealing", missing)
    found = problem(5, most_plans=2000)
    start = max(all_plans(found), key=found.model.period)
    made = [period for plan, period in ChainMaker(found, 1).annealed([start]) if plan is not None]
    assert min(made) == pytest.approx(min(map(found.model.period, all_plans(found))))


def test_both_begin_with_a_plan_that_lacks_memory_for_what_they_propose():
    """A plan of another method may have choices that no chain proposes."""
    found = problem(3, most_plans=2000)
    start = max(all_plans(found), key=found.model.period)
    n = Annealing(found).n_choices
    assert CompiledAnnealing(found).n_choices == n < sum(map(len, found.choices))
    assert any(plan is not None for plan, _ in CompiledAnnealing(found).run(start, KIND, 2000, seed="1"))


@pytest.mark.parametrize("make", [problem, posed, partial(problem, alone=1.4)])
@pytest.mark.parametrize("seed", range(4))
def test_a_search_finds_what_it_finds_in_python(make, seed, monkeypatch):
    found = replace(make(seed, most_plans=2000), n_walks=4)
    quick = [*search(found, n_expanded=40, anneal=lambda plans: ())]
    monkeypatch.setattr(branch, "scores_of", Scores)
    slow = [*search(found, n_expanded=40, anneal=lambda plans: ())]
    assert [one.plan for one in quick] == [one.plan for one in slow]
    assert [one.bound for one in quick] == pytest.approx([one.bound for one in slow])
    assert quick[-1].n_evaluated == slow[-1].n_evaluated > 0


def test_plans_of_too_many_calls_are_searched_in_python():
    assert why_not_compiled(20) == ""
    assert "at most 20 calls, and there are 21" in why_not_compiled(21)
    found = posed(1)
    assert type(scores_of(found)) is CompiledScores
    assert type(scores_of(replace(found, choices=(*found.choices, *[[]] * 20)))) is Scores

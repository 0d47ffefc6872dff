"""The compiled loops do what those in Python do, step by step."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from realrl.compiler import UnavailableError
from realrl.fusion.compiled import CompiledKernels, kernels, load
from realrl.plan.fusion.bounds import latency_bound
from realrl.plan.fusion.listing import Rule, backward_first, evaluate, peaks_of, serial_words
from realrl.plan.fusion.problem import problem_of
from realrl.plan.fusion.search.annealing import Settings
from realrl.plan.fusion.search.climb import Climb, Kernels
from tests.plan.fusion.instances import random_instance, row


@pytest.fixture(scope="module")
def compiled() -> CompiledKernels:
    try:
        return CompiledKernels(load())
    except UnavailableError as error:
        pytest.skip(str(error))


def random_rule(random: Random, n_pipelines: int) -> Rule:
    weights = tuple(random.gauss(0, 1) for _ in range(10 * n_pipelines))
    return Rule(weights, random.choice((0.0, 0.3)), random.randrange(1 << 62), random.choice((None, 0.0, 0.7)))


@pytest.mark.parametrize("seed", range(10))
def test_list_schedules_and_annealings_are_equal(compiled: CompiledKernels, seed: int) -> None:
    random = Random(seed)
    problem = problem_of(random_instance(random) if seed else row(1))
    for _ in range(2):
        rule = random_rule(random, problem.n_pipelines)
        ours, theirs = (loops.listed(problem, rule) for loops in (Kernels(), compiled))
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        words = ours.words()
        assert (theirs.latency, theirs.peak, theirs.words()) == (ours.latency, ours.peak, words)
        targets = tuple(peak * 2 // 3 for peak in peaks_of(problem, words))
        limit = ours.latency + random.choice((0, ours.latency // 20))
        activation = max(problem.activation)
        settings = Settings(
            limit, targets, activation / 7, (activation / 1.3, activation / 17), 150, random.randrange(1 << 62)
        )
        found = compiled.annealed(problem, words, settings)
        assert found == Kernels().annealed(problem, words, settings)
        assert evaluate(problem, found.words) == found.latency


@pytest.mark.parametrize("seed", range(10))
def test_latencies_are_equal(compiled: CompiledKernels, seed: int) -> None:
    random = Random(seed)
    problem = problem_of(random_instance(random).with_caps(None))
    words = serial_words(problem)
    assert compiled.evaluated(problem, words) == evaluate(problem, words)
    shuffled = tuple(tuple(random.sample(word, len(word))) for word in words)
    assert compiled.evaluated(problem, shuffled) == evaluate(problem, shuffled)  # most often None: they are cyclic


def test_a_rule_may_leave_pipelines_out(compiled: CompiledKernels) -> None:
    problem = problem_of(row(4))
    quotas = (2,) * 8 + (0,) * 8
    rule = Rule(backward_first(problem), quotas=quotas)
    ours, theirs = (loops.listed(problem, rule) for loops in (Kernels(), compiled))
    assert ours is not None
    assert theirs is not None
    assert ours.latency == theirs.latency


def test_climbs_are_equal(compiled: CompiledKernels) -> None:
    problem = problem_of(row(1))
    assert Climb(problem, Kernels(), seed=2).run(15) == Climb(problem, compiled, seed=2).run(15)


@pytest.mark.parametrize("seed", range(6))
def test_paced_climbs_and_shifted_schedules_are_equal(compiled: CompiledKernels, seed: int) -> None:
    problem = problem_of(random_instance(Random(seed)))
    loops = (Kernels(), compiled)
    ours, theirs = (Climb(problem, each, seed=seed, is_paced=True).run(60) for each in loops)
    assert ours == theirs
    words = serial_words(problem)
    one, two = (each.shifted(problem, words, enough=0, n_steps=40, seed=seed) for each in loops)
    assert one == two
    assert evaluate(problem, one.words) == one.latency


@pytest.mark.parametrize("seed", range(8))
def test_crossings_are_equal(compiled: CompiledKernels, seed: int) -> None:
    random = Random(seed)
    problem = problem_of(random_instance(random).with_caps(None))
    activation, limit = max(problem.activation), latency_bound(problem)
    targets = tuple(peak // 2 for peak in peaks_of(problem, serial_words(problem)))
    settings = Settings(limit, targets, activation / 7, (activation / 3,), 300, seed)
    parents = [compiled.annealed(problem, serial_words(problem), replace(settings, seed=n)).words for n in (1, 2)]
    times = sorted({random.randrange(1, limit) for _ in range(9)})
    ours, theirs = (each.crossed(problem, *parents, times, settings) for each in (Kernels(), compiled))
    assert ours == theirs
    same = [each.crossed(problem, parents[0], parents[0], times, settings) for each in (Kernels(), compiled)]
    assert same == [None, None]


def test_without_them_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()
    monkeypatch.setenv("REALRL_KERNELS", "0")
    loops, why_not = kernels()
    load.cache_clear()
    assert type(loops) is Kernels
    assert why_not == "REALRL_KERNELS=0 turns realrl's off"

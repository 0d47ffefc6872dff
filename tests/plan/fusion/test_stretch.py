"""Longer schedules that repeat a part of shorter ones."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from realrl.plan.fusion.bounds import latency_bound
from realrl.plan.fusion.instance import Instance, Model, on_block
from realrl.plan.fusion.listing import Rule, backward_first, evaluate, list_words, peaks_of, quotas_of, serial_words
from realrl.plan.fusion.problem import Problem, Words, problem_of
from realrl.plan.fusion.schedule import FusedSchedule
from realrl.plan.fusion.search.climb import Climb, Kernels
from realrl.plan.fusion.search.stretch import _repeated, shortened, stretched
from tests.plan.fusion.checker import check
from tests.plan.fusion.instances import random_instance, row


def test_long_rows_have_shorter_ones_with_the_same_proportions() -> None:
    for number, shorter in ((3, 2), (6, 5), (9, 8), (12, 11)):
        assert shortened(problem_of(row(number))) == problem_of(row(shorter))
    for number in (1, 2, 4, 5, 7, 8, 10, 11):
        assert shortened(problem_of(row(number))) is None


def alone(number: int) -> Problem:
    """Return a row with its first pipeline only."""
    instance = row(number)
    return problem_of(Instance(instance.n_devices, instance.pipelines[:1]))


def longer_of(problem: Problem, short: Problem, words: Words) -> Words | None:
    return stretched(problem, short, words, evaluate, effort=1, seed=1)


def test_1f1b_is_stretched_to_1f1b() -> None:
    problem = alone(6)
    short = shortened(problem)
    assert short is not None
    assert longer_of(problem, short, serial_words(short)) == serial_words(problem)


@pytest.mark.parametrize("seed", range(8))
def test_a_stretched_schedule_is_valid_and_has_the_same_peaks(seed: int) -> None:
    problem = problem_of(random_instance(Random(seed)).with_caps(None))
    short = problem
    problem = short.with_micro_batches(tuple(3 * m for m in short.n_micro_batches))
    words = serial_words(short)
    longer = longer_of(problem, short, words)
    if longer is None:
        return
    assert max(peaks_of(problem, longer)) <= max(peaks_of(short, words))
    assert evaluate(problem, longer) is not None
    counts = [tuple(word.count(letter) for letter in own) for word, own in zip(longer, problem.letters_on, strict=True)]
    assert counts == [tuple(problem.n_micro_batches[x // 2] for x in own) for own in problem.letters_on]


@pytest.mark.parametrize("seed", range(12))
def test_some_pipelines_may_have_as_many_micro_batches_as_before(seed: int) -> None:
    instance = random_instance(Random(seed)).with_caps(None)
    counts = [(1 + (p + seed) % 2) * pipeline.n_micro_batches for p, pipeline in enumerate(instance.pipelines)]
    longer = instance.with_micro_batches(counts)
    problem = problem_of(longer)
    short = problem.with_micro_batches(problem_of(instance).n_micro_batches)
    words = longer_of(problem, short, serial_words(short))
    if words is not None:
        check(FusedSchedule.of_words(longer, problem.letters_of(words)))


def test_a_fused_schedule_is_stretched_and_checked_by_itself() -> None:
    problem = problem_of(row(6))
    short = shortened(problem)
    assert short is not None
    quotas = tuple(q + r for q, r in zip(quotas_of(short, 0), quotas_of(short, 1), strict=True))
    listed = list_words(short, Rule(backward_first(short), quotas=quotas))
    assert listed is not None
    longer = longer_of(problem, short, listed[1])
    assert longer is not None
    latency, _ = check(FusedSchedule.of_words(row(6), problem.letters_of(longer)))
    assert latency < 1.15 * problem.time(listed[0] + 16 * 21)  # the work of 16 micro-batches of each


def test_a_period_is_made_where_no_part_is_one() -> None:
    """Many micro-batches have no more bubbles than few, under the same peak."""
    pair = [Model("A", 4, 8, 2, 4, 1.64), Model("B", 4, 8, 1, 2, 1, is_reversed=True)]
    short = problem_of(on_block(pair))
    problem = short.with_micro_batches((72,) * 8)
    found = Climb(short, Kernels(), seed=8).run(150, enough=latency_bound(short))
    assert found is not None
    repeated = min(latency for latency, _ in _repeated(problem, short, found.words, evaluate))
    longer = longer_of(problem, short, found.words)
    assert longer is not None
    instance = on_block([replace(model, n_micro_batches=72) for model in pair])
    latency, _ = check(FusedSchedule.of_words(instance, problem.letters_of(longer)))
    assert found.latency == latency_bound(short)
    assert problem.ticks(latency) == latency_bound(problem) < repeated
    assert max(peaks_of(problem, longer)) <= found.peak


def test_a_period_has_each_letter_in_proportion() -> None:
    short = problem_of(row(4)).with_micro_batches((1,) * 16)
    problem = short.with_micro_batches((2,) * 8 + (5,) * 8)  # of the second pipeline 4 more for 1 of the first
    longer = longer_of(problem, short, serial_words(short))
    assert longer is not None
    assert all(word.count(x) == problem.n_micro_batches[x // 2] for word in longer for x in set(word))

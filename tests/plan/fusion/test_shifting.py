"""Listing again with shifted starts, and rules with a pace."""

from __future__ import annotations

from random import Random

import pytest

from realrl.plan.fusion.bounds import latency_bound
from realrl.plan.fusion.listing import N_PIECES, Rule, backward_first, list_starts, peaks_of, serial_words
from realrl.plan.fusion.problem import problem_of
from realrl.plan.fusion.schedule import FusedSchedule
from realrl.plan.fusion.search.climb import Climb, Found, Kernels
from realrl.plan.fusion.search.shifting import shift
from tests.plan.fusion.checker import check
from tests.plan.fusion.instances import random_instance, row


@pytest.mark.parametrize("seed", range(8))
def test_shifted_schedules_are_valid_and_never_later(seed: int) -> None:
    instance = random_instance(Random(seed))
    problem = problem_of(instance)
    before = Found.of(problem, serial_words(problem))
    after = shift(problem, before.words, enough=0, n_steps=30, seed=seed)
    latency, _ = check(FusedSchedule.of_words(instance, problem.letters_of(after.words)))  # the caps, too
    assert latency == pytest.approx(problem.time(after.latency))
    assert after.latency <= before.latency
    assert after.n_listed == 30


def test_many_steps_add_up() -> None:
    problem = problem_of(row(4))
    problem = problem.with_caps(peaks_of(problem, serial_words(problem)))
    before = Found.of(problem, serial_words(problem))
    after = shift(problem, before.words, enough=latency_bound(problem), n_steps=150, seed=1)
    assert after.latency < 0.95 * before.latency
    assert max(peaks_of(problem, after.words)) <= before.peak


def test_shifting_ends_when_the_latency_is_low_enough() -> None:
    problem = problem_of(row(4))
    words = serial_words(problem)
    latency = Found.of(problem, words).latency
    assert shift(problem, words, enough=latency, n_steps=50, seed=1) == (words, latency, 0)


def test_a_pace_keeps_micro_batches_from_entering() -> None:
    problem = problem_of(row(4))
    paces = (-1.0,) * (N_PIECES + 1) + tuple(0.5 + 0.05 * k for k in range(N_PIECES + 1))
    listed = list_starts(problem, Rule(backward_first(problem), paces=paces))
    assert listed is not None
    starts, base = listed[2], problem.base
    assert starts[base[0]] == 0
    first = problem.pipeline.index(1)
    for m in range(problem.n_micro_batches[first]):
        x = m / problem.n_micro_batches[first] * N_PIECES
        assert starts[base[2 * first] + m] >= int((0.5 + 0.05 * x) * problem.work)


def test_a_late_pace_gives_a_schedule_up_where_there_is_a_limit() -> None:
    problem = problem_of(row(4))
    paces = (2.0,) * (2 * (N_PIECES + 1))
    assert list_starts(problem, Rule(backward_first(problem), paces=paces, limit=problem.work)) is None
    assert list_starts(problem, Rule(backward_first(problem), paces=paces)) is not None


@pytest.mark.parametrize("seed", range(4))
def test_paced_climbs_keep_the_caps(seed: int) -> None:
    instance = random_instance(Random(seed))
    problem = problem_of(instance)
    found = Climb(problem, Kernels(), seed=seed, is_paced=True).run(40)
    if found is not None:
        check(FusedSchedule.of_words(instance, problem.letters_of(found.words)))

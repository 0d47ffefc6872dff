"""Searches with time limits and processes, and what they find."""

from __future__ import annotations

import multiprocessing
from random import Random

import pytest

from realrl.fusion.search import Fused, Limits, ScheduleSearch, find_schedule
from realrl.plan.fusion.baselines import greedy, serial
from realrl.plan.fusion.instance import Instance
from tests.plan.fusion.checker import check
from tests.plan.fusion.instances import BOUNDS, random_instance, row


def assert_found(instance: Instance, found: Fused) -> None:
    """Check a schedule, its bound and its front."""
    for schedule in (found.schedule, *found.front):
        latency, peaks = check(schedule)
        assert latency == pytest.approx(schedule.latency)
        assert peaks == pytest.approx(schedule.peaks)
    assert found.bound <= found.schedule.latency * (1 + 1e-6)
    assert found.least_peak <= found.schedule.peak * (1 + 1e-6)
    assert found.schedule.latency <= serial(instance).latency * (1 + 1e-6)
    simple = greedy(instance)
    assert simple is None or found.schedule.latency <= simple.latency * (1 + 1e-6)
    assert found.front[0] == found.schedule
    for before, after in zip(found.front, found.front[1:], strict=False):
        assert before.latency < after.latency
        assert before.peak > after.peak


@pytest.mark.parametrize("seed", range(100, 104))
def test_random_instances(seed: int) -> None:
    instance = random_instance(Random(seed))
    assert_found(instance, find_schedule(instance, Limits(n_rounds=1), seed=seed, pareto=seed % 2 == 0))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_random_instances() -> None:
    n_capped = 0
    for seed in range(1000, 2000):
        instance = random_instance(Random(seed))
        n_capped += instance.memory_caps is not None
        assert_found(instance, find_schedule(instance, Limits(n_rounds=1), seed=seed, pareto=seed % 3 == 0))
    assert n_capped > 300


def test_a_number_of_rounds_finds_the_same_with_any_number_of_processes() -> None:
    one, two = (find_schedule(row(1), Limits(seconds=600, n_rounds=1, n_processes=n), seed=5) for n in (1, 2))
    assert one.schedule == two.schedule
    assert one.front == two.front


def test_a_search_that_goes_on_later_finds_what_one_without_a_break_does() -> None:
    whole = find_schedule(row(5), Limits(seconds=600, n_rounds=3), seed=5)
    search = ScheduleSearch(row(5), seed=5)
    first = search.run(Limits(seconds=600, n_rounds=1))
    second = search.run(Limits(seconds=600, n_rounds=2))
    assert second.schedule == whole.schedule
    assert (second.n_rounds, second.n_evaluations) == (3, whole.n_evaluations)
    assert second.seconds > first.seconds
    assert search.run(Limits(n_rounds=0)).n_rounds == 3


def test_what_a_killed_process_has_left_is_searched_by_another() -> None:
    def kill(_: object) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    alone = find_schedule(row(5), Limits(seconds=600, n_rounds=2), seed=5)
    left = find_schedule(row(5), Limits(seconds=600, n_rounds=2, n_processes=3), seed=5, report=kill)
    assert left.n_rounds == 2
    assert left.schedule == alone.schedule
    assert not multiprocessing.active_children()


def test_the_search_ends_when_nothing_better_is_possible() -> None:
    found = find_schedule(row(4), Limits(seconds=60))
    assert found.schedule.latency == found.bound == BOUNDS[3]
    assert found.schedule.peak == pytest.approx(found.least_peak)
    assert found.n_rounds < 20


def test_ctrl_c_gives_what_was_found() -> None:
    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    found = find_schedule(row(5), Limits(seconds=60), report=interrupt)
    assert found.was_stopped
    assert found.n_rounds == 1
    check(found.schedule)

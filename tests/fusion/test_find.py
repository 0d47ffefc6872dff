"""Searches with time limits and processes, and what they find."""

from __future__ import annotations

import multiprocessing
from random import Random

import pytest

from realrl.errors import UsageError
from realrl.fusion.search import Fused, Limits, ScheduleSearch, find_schedule
from realrl.plan.fusion.baselines import greedy, serial
from realrl.plan.fusion.instance import Instance, Model, on_block
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


def test_a_search_begins_with_a_schedule_that_is_known() -> None:
    instance = row(5).with_caps(14.0)
    before = find_schedule(instance, Limits(seconds=600, n_rounds=2), seed=5)
    search = ScheduleSearch(instance)
    search.begin_with(before.schedule)
    found = search.run(Limits(n_rounds=0))
    assert (found.schedule.latency, found.schedule.peak) == (before.schedule.latency, before.schedule.peak)
    check(found.schedule)


def test_a_search_begins_with_a_schedule_of_fewer_micro_batches() -> None:
    pair = [Model("A", 4, 8, 5, 10, 1.95), Model("B", 4, 8, 2, 4, 1, is_reversed=True)]
    short, longer = on_block(pair), on_block(pair).with_micro_batches((20, 20))
    before = find_schedule(short, Limits(seconds=600, n_rounds=2))
    assert before.schedule.latency == before.bound
    search = ScheduleSearch(longer)
    alone = search.run(Limits(n_rounds=0))
    search.begin_with(before.schedule)
    found = search.run(Limits(n_rounds=0))
    assert found.bound <= found.schedule.latency < alone.schedule.latency
    assert found.schedule.peak <= before.schedule.peak
    check(found.schedule)


def test_a_schedule_to_begin_with_has_the_same_models_and_keeps_the_caps() -> None:
    known = find_schedule(row(4), Limits(n_rounds=0)).schedule
    for instance, said in (
        (row(1), "for 2 pipelines, and there are 3"),
        (row(10), "for 8 devices, and there are 16"),
        (row(4).with_micro_batches((8, 7)), "8 micro-batches of 'B', and 'B' has only 7"),
        (row(5).with_caps(known.peak / 2 + 1), "fit"),
    ):
        with pytest.raises(UsageError, match=said):
            ScheduleSearch(instance).begin_with(known)


def test_a_round_that_time_breaks_off_goes_on_later() -> None:
    whole = find_schedule(row(1), Limits(seconds=600, n_rounds=2), seed=3)
    times = iter(range(1000))
    search = ScheduleSearch(row(1), seed=3)
    broken = search.run(Limits(seconds=4.5, n_rounds=2, clock=lambda: float(next(times))))
    assert broken.n_rounds == 0
    assert broken.schedule.latency < find_schedule(row(1), Limits(n_rounds=0)).schedule.latency  # some probes are done
    found = search.run(Limits(seconds=600, n_rounds=2))
    assert (found.n_rounds, found.n_evaluations) == (2, whole.n_evaluations)
    assert found.schedule == whole.schedule


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

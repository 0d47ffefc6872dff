"""The search finds schedules that an independent checker accepts, and never worse ones than without a search."""

from __future__ import annotations

from random import Random

import pytest

from realrl.errors import UsageError
from realrl.plan.fusion.baselines import greedy, interleaved, serial
from realrl.plan.fusion.bounds import latency_bound, memory_bound
from realrl.plan.fusion.instance import Instance, Model, on_block
from realrl.plan.fusion.listing import Rule, backward_first, evaluate, greedy_words, list_words, peaks_of, serial_words
from realrl.plan.fusion.problem import flipped, problem_of
from realrl.plan.fusion.quick import fused_orders
from realrl.plan.fusion.robustness import slow_down
from realrl.plan.fusion.schedule import FusedSchedule
from realrl.plan.fusion.search.annealing import Settings, State
from realrl.plan.fusion.search.climb import Climb, Kernels
from realrl.plan.fusion.search.rounds import N_PROBES, Search
from tests.plan.fusion.checker import check
from tests.plan.fusion.instances import BOUNDS, SERIAL, random_instance, row


def assert_good(instance: Instance, schedule: FusedSchedule) -> None:
    """Check a found schedule, and compare it with bound, series and greedy fusion."""
    latency, peaks = check(schedule)
    assert latency == pytest.approx(schedule.latency)
    assert peaks == pytest.approx(schedule.peaks)
    problem = problem_of(instance)
    assert latency >= problem.time(latency_bound(problem)) * (1 - 1e-6)
    assert max(peaks) >= problem.memory(memory_bound(problem, problem.ticks(latency))) * (1 - 1e-6)
    assert latency <= serial(instance).latency * (1 + 1e-6)
    simple = greedy(instance)
    if simple is not None:
        assert latency <= simple.latency * (1 + 1e-6)


@pytest.mark.parametrize("number", range(1, 13))
def test_bounds_and_series_of_the_published_rows(number: int) -> None:
    instance = row(number)
    problem = problem_of(instance)
    assert problem.time(latency_bound(problem)) == BOUNDS[number - 1]
    in_series = serial(instance)
    assert in_series.latency == SERIAL[number - 1]
    stage = instance.pipelines[0].stages[0]
    assert in_series.peak == pytest.approx(len(instance.pipelines[0].stages) * stage.activation)
    cut = interleaved(instance)
    assert cut is not None
    assert cut.latency < in_series.latency


@pytest.mark.parametrize("seed", range(6))
def test_random_instances(seed: int) -> None:
    instance = random_instance(Random(seed))
    assert_good(instance, fused_orders(instance))


def test_the_quick_search_is_a_function_of_the_instance() -> None:
    first = fused_orders(row(1))
    fused_orders.cache_clear()
    assert fused_orders(row(1)) == first
    assert first.latency < greedy(row(1)).latency  # type: ignore[union-attr]


def test_a_long_instance_reaches_its_bound_quickly() -> None:
    assert fused_orders(row(2)).latency <= 1.05 * BOUNDS[1]


def test_time_may_run_backwards() -> None:
    problem = problem_of(row(1))
    listed = list_words(problem.reversed, Rule(backward_first(problem)))
    assert listed is not None
    latency, words = listed
    assert evaluate(problem, flipped(words)) == latency
    assert peaks_of(problem, flipped(words)) == peaks_of(problem, words)
    assert flipped(flipped(words)) == words


def test_patience_keeps_a_device_free_for_what_comes() -> None:
    problem = problem_of(row(4))
    urgent = (0.0, 3.0, 0.0, 0.0, 0.0, 9.0, 3.0, 0.0, 0.0, 0.0) + (0.0,) * 10  # the first pipeline before the second
    hasty, patient = (list_words(problem, Rule(urgent, patience=patience)) for patience in (None, 0.0))
    assert hasty is not None
    assert patient is not None
    assert patient[0] == problem.ticks(225)  # as if the first pipeline were alone
    assert hasty[0] > patient[0]


@pytest.mark.parametrize("seed", range(6))
def test_every_change_keeps_heads_tails_and_memory(seed: int) -> None:
    random = Random(seed)
    problem = problem_of(random_instance(random).with_caps(None))
    words = serial_words(problem)
    latency = evaluate(problem, words)
    assert latency is not None
    limit = latency - random.choice((0, latency // 10))
    temperature = float(max(problem.activation))
    state = State(problem, words, Settings(limit, (0,) * problem.n_devices, 0.3, (), 0, seed))
    n_made = 0
    for number in range(150):
        if not state.move(number, temperature):
            continue
        n_made += 1
        fresh = State(problem, state.words(), state.settings)  # from the words alone
        assert (state.head, state.tail, state.energy) == (fresh.head, fresh.tail, fresh.energy)
        assert sorted(state.over) == sorted(fresh.over)
        assert state.latency == evaluate(problem, state.words())
    assert n_made or problem.base[-1] < 20
    schedule = FusedSchedule.of_words(random_instance(Random(seed)).with_caps(None), problem.letters_of(state.words()))
    check(schedule)


def test_a_cold_annealing_within_the_limit_lowers_the_peak_alone() -> None:
    problem = problem_of(row(10))
    climb = Climb(problem, Kernels(), seed=1)
    found = climb.run(3)
    assert found is not None
    targets = (found.peak * 9 // 10,) * problem.n_devices
    settings = Settings(found.latency, targets, 1e6, (40.0,), 5_000, 1)
    end = Kernels().annealed(problem, found.words, settings)
    assert end.excess < State(problem, found.words, settings).energy
    assert end.n_tried == 5_000
    assert evaluate(problem, end.words) == end.latency <= found.latency


def test_annealing_ends_when_latency_and_memory_are_what_they_shall_be() -> None:
    problem = problem_of(row(1))
    words = serial_words(problem)
    latency = evaluate(problem, words)
    assert latency is not None
    settings = Settings(latency - 1, peaks_of(problem, words), 100.0, (10.0,), 20_000, 0)
    end = Kernels().annealed(problem, words, settings)
    assert end.excess == 0
    assert end.latency < latency
    assert end.n_tried < 20_000


@pytest.mark.parametrize("seed", range(6))
def test_least_peaks_hold_for_schedules_of_every_kind(seed: int) -> None:
    instance = random_instance(Random(seed)).with_caps(None)
    problem = problem_of(instance)
    for words in (serial_words(problem), greedy_words(problem)):
        assert words is not None
        latency = evaluate(problem, words)
        assert latency is not None
        assert memory_bound(problem, latency) <= max(peaks_of(problem, words))


def test_least_peaks_of_the_published_rows() -> None:
    def share(number: int) -> float:
        problem = problem_of(row(number))
        return problem.memory(memory_bound(problem, problem.ticks(BOUNDS[number - 1]))) / serial(row(number)).peak

    shares = [share(number) for number in range(1, 13)]
    assert shares == pytest.approx([1, 1, 0.875, 1, 1, 0.875, 1, 0.75, 0.75, 1, 0.8125, 0.75])


def test_caps_below_one_micro_batch_are_refused_with_the_least_that_work() -> None:
    instance = row(1)
    assert instance.least_caps == (2.0,) * 8
    with pytest.raises(UsageError, match=r"device 0 may hold 1\.99 .* takes 2 there\n  The least caps .* are 2, 2, 2"):
        instance.with_caps(1.99)
    capped = instance.with_caps(2.0)
    schedule = fused_orders(capped)
    assert check(schedule)[1] == pytest.approx([2.0] * 8)


def test_probes_do_not_depend_on_anything_but_outcomes() -> None:
    problem = problem_of(row(1))
    first, second = (Search(problem, seed=3) for _ in range(2))
    assert first.probes() == second.probes()
    assert len(first.probes()) == N_PROBES
    assert first.probes() != Search(problem, seed=4).probes()


def test_jitter_slows_a_schedule_down_a_little() -> None:
    slow = slow_down(fused_orders(row(1)))
    assert 1 < slow.mean < slow.worst < 1.2
    assert slow_down(fused_orders(row(1)), jitter=0.0).worst == 1


def test_micro_batches_that_fill_a_cap_fit_where_numbers_are_rounded() -> None:
    models = [Model("A", 2, 4, 1, 2, 1.95), Model("B", 2, 3, 1, 2, 0.7321512644219527, is_reversed=True)]
    exact, rounded = on_block([models[0]]).with_caps(3.9), on_block(models).with_caps(3.9)
    assert problem_of(exact).caps[0] == 2 * problem_of(exact).activation[0]
    for instance in (exact, rounded):
        problem = problem_of(instance)
        assert all(cap >= 2 * problem.activation[0] for cap in problem.caps)
        assert all(cap * problem.unit <= 3.9 * (1 + 1e-9) for cap in problem.caps)

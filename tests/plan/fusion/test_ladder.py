"""Ladders of annealings: what is promoted, and what candidates cost."""

from __future__ import annotations

from random import Random

import pytest

from realrl.plan.fusion.listing import evaluate, peaks_of, serial_words
from realrl.plan.fusion.problem import Problem, Words, problem_of
from realrl.plan.fusion.search.annealing import Settings, State
from realrl.plan.fusion.search.climb import Found, Kernels
from realrl.plan.fusion.search.ladder import Ladder, cost_of_a_tick, excess_of
from realrl.plan.fusion.search.probes import Outcome, Probe, carry_out
from realrl.plan.fusion.search.rounds import N_PROBES, Search
from tests.plan.fusion.instances import random_instance, row, unlimited


def test_the_better_half_of_a_rung_is_promoted_once(problem: Problem, words: Words) -> None:
    ladder = Ladder(problem, 100, unlimited(problem))
    assert ladder.promoted(below=9) is None
    marked = [(word[number:] + word[:number], *words[1:]) for number, word in enumerate([words[0]] * 5)]
    for number, late in enumerate((5, 1, 4, 2, 3)):
        ladder.add(0, marked[number], 100 + late)
    assert ladder.promoted(below=9) == (0, marked[1])
    assert ladder.promoted(below=9) == (0, marked[3])
    assert ladder.promoted(below=9) is None
    ladder.add(0, words, 104)  # three are the better half of six
    assert ladder.promoted(below=9) == (0, marked[4])


def test_the_highest_rung_below_one_goes_first(problem: Problem, words: Words) -> None:
    ladder = Ladder(problem, 100, unlimited(problem))
    for rung in (0, 0, 2, 2):
        ladder.add(rung, words, 101)
    assert [ladder.promoted(below=n) for n in (2, 9, 9)] == [(0, words), (2, words), None]


def test_new_aims_compare_the_best_few_anew(problem: Problem, words: Words) -> None:
    peaks = peaks_of(problem, words)
    ladder = Ladder(problem, 10, unlimited(problem))
    lean = tuple(tuple(sorted(word, key=lambda letter: letter % 2 == 0)) for word in words)  # backwards first: no peak
    for latency, each in ((10, words), (12, lean)):
        ladder.add(0, each, latency)
    assert ladder.promoted(below=9) == (0, words)
    ladder.aim(10, unlimited(problem))
    assert ladder.promoted(below=9) is None  # the same aims
    ladder.aim(10, [peak // 4 for peak in peaks])
    assert ladder.promoted(below=9) == (0, lean)
    for _ in range(20):
        ladder.add(0, words, 11)
    ladder.aim(9, unlimited(problem))
    assert [ladder.promoted(below=9) for _ in range(3)] == [(0, words), (0, words), None]  # half of the few that stay


def test_what_is_touched_up_takes_the_place_of_its_start(problem: Problem, words: Words) -> None:
    ladder = Ladder(problem, 10, unlimited(problem))
    marked = [(word[number:] + word[:number], *words[1:]) for number, word in enumerate([words[0]] * 3)]
    ladder.add(3, marked[0], 14)
    ladder.add(2, marked[1], 13)
    ladder.add(3, marked[2], 12, instead_of=marked[0])
    assert ladder.best() == [(3, marked[2]), (2, marked[1])]
    ladder.add(3, marked[0], 11, instead_of=marked[0])  # it is gone
    assert ladder.best() == [(3, marked[0]), (3, marked[2]), (2, marked[1])]
    ladder.add(2, marked[0], 11)
    assert [words for _, words in ladder.best()] == [marked[0], marked[2], marked[1]]


@pytest.mark.parametrize("seed", range(6))
def test_costs_are_those_of_annealing(seed: int) -> None:
    problem = problem_of(random_instance(Random(seed)).with_caps(None))
    words = serial_words(problem)
    targets = [peak // 2 for peak in peaks_of(problem, words)]
    assert excess_of(problem, words, targets) == State(problem, words, Settings(0, tuple(targets), 1, (), 0, 0)).energy
    assert excess_of(problem, words, peaks_of(problem, words)) == 0
    assert cost_of_a_tick(problem) > 0


def test_a_round_has_as_much_work_as_two_of_its_longest_probes() -> None:
    """So that two processes are busy until its end, whichever carries out the longest."""
    problem = problem_of(row(1))  # schedules are crossed
    search = Search(problem, seed=1)
    found = Found.of(problem, serial_words(problem))
    search.best = Found(found.words, search.bound, found.peak)  # as if the lowest latency had been found
    for _ in range(10):
        moves = [probe.n_moves for probe in search.probes()]
        assert len(moves) >= N_PROBES
        assert sum(moves) >= 1.3 * max(moves)

    problem = problem_of(row(3))  # with an inner search, so that there is a ladder
    search = Search(problem, seed=1)
    found = Found.of(problem, serial_words(problem))
    kernels = Kernels()
    end = kernels.annealed(problem, found.words, Settings(0, problem.caps, 1, (), 0, 0))
    search.best = Found(found.words, search.bound, 2 * found.peak)  # as if the lowest latency had been found
    sizes = []
    for _ in range(60):
        probes = search.probes()
        if probes[0].is_short:
            search.take(probes, [Outcome(()) for _ in probes])
            continue
        assert len(probes) >= N_PROBES
        work = [probe.n_moves + probe.n_shifts for probe in probes]  # for each task; climbing is work, too
        assert sum(work) >= 1.3 * max(work)
        sizes.append((len(probes), max(probe.rung for probe in probes)))
        better = Found(found.words, search.bound, search.best.peak - 1)  # found by annealing, which goes on then
        search.take(probes, [Outcome((better,) if probe.n_moves and len(sizes) == 1 else (), end) for probe in probes])
    assert sizes[0] == (N_PROBES, 0)
    assert max(rung for _, rung in sizes) >= 3
    assert max(n for n, _ in sizes) > N_PROBES


def test_an_annealing_that_ends_worse_gives_its_start_back(problem: Problem, words: Words) -> None:
    latency = evaluate(problem, words)
    assert latency is not None
    peaks = peaks_of(problem, words)
    probe = Probe(problem.caps, (peaks[0] - 1,) * 8, latency, 1, start=words, temperature=1e6, n_moves=1)
    last = carry_out(problem, probe, Kernels()).last
    assert last is not None
    assert last.words == words

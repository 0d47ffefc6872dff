"""Islands: what is annealed and crossed next, which schedules stay, and schedules that are crossed in time."""

from __future__ import annotations

from random import Random

import pytest

from realrl.plan.fusion.listing import Rule, backward_first, ends_of, evaluate, list_words, peaks_of, serial_words
from realrl.plan.fusion.problem import Problem, Words, flipped, problem_of
from realrl.plan.fusion.schedule import FusedSchedule
from realrl.plan.fusion.search.climb import Kernels
from realrl.plan.fusion.search.islands import Island, crossed
from realrl.plan.fusion.search.probes import Probe, carry_out
from tests.plan.fusion.checker import check
from tests.plan.fusion.instances import random_instance, row, unlimited


def turned(words: Words, by: int) -> Words:
    """Return words that are far from others of this kind; what they are does not matter to an island."""
    return tuple(word[by:] + word[:by] for word in words)


def begin(island: Island, draw: Random) -> None:
    """Ask for all fresh starts."""
    for _ in range(island.n_fresh):
        assert island.parents(draw) == ()


def test_fresh_starts_come_first_and_then_the_better_half_is_annealed_on(problem: Problem, words: Words) -> None:
    island, draw = Island(problem, 100, unlimited(problem)), Random(0)
    begin(island, draw)
    for number, late in enumerate((5, 1, 4, 2, 3, 0)):
        island.add(turned(words, number), 100 + late)
    assert [island.parents(draw) for _ in range(3)] == [(turned(words, number),) for number in (5, 1, 3)]
    first, second = island.parents(draw)
    assert first != second
    assert {first, second} <= {turned(words, number) for number in range(6)}


def test_of_two_that_are_alike_the_better_stays(problem: Problem, words: Words) -> None:
    island, draw = Island(problem, 100, unlimited(problem)), Random(0)
    at = next(i for i, pair in enumerate(zip(words[0], words[0][1:], strict=False)) if pair[0] != pair[1])
    close = (words[0][:at] + words[0][at : at + 2][::-1] + words[0][at + 2 :], *words[1:])
    for own, latency in ((words, 103), (close, 102), (words, 104), (turned(words, 3), 109)):
        island.add(own, latency)
    begin(island, draw)
    assert island.parents(draw) == (close,)
    assert {*island.parents(draw)} == {close, turned(words, 3)}


def test_the_best_stay_where_there_are_too_many() -> None:
    problem = problem_of(row(3))
    words, draw = serial_words(problem), Random(0)
    island = Island(problem, 100, unlimited(problem))
    n = island.n_members
    for number in range(n + 8):
        island.add(turned(words, number), 200 - number)
    begin(island, draw)
    assert island.parents(draw) == (turned(words, n + 7),)
    for _ in range(n // 2 - 1):
        assert len(island.parents(draw)) == 1
    parents = {each for _ in range(island.patience) for each in island.parents(draw)}
    assert parents == {turned(words, number) for number in range(8, n + 8)}


def test_an_island_ends_when_no_better_one_comes_and_the_best_of_two_are_crossed(
    problem: Problem, words: Words
) -> None:
    island, draw = Island(problem, 100, unlimited(problem)), Random(0)

    def live(first: int) -> int:
        """Let an island live with four schedules that are late by 10, and one by 9 later; return its crossings."""
        begin(island, draw)
        for number in range(first, first + 4):
            island.add(turned(words, number), 110)
        assert [len(island.parents(draw)) for _ in range(2)] == [1, 1]
        own, n_crossed = island.number, 0
        while island.number == own:
            parents = island.parents(draw)
            if n_crossed == 9:
                island.add(turned(words, first + 4), 109)
            n_crossed += len(parents) == 2 and island.number == own
        return n_crossed

    assert live(0) == 10 + island.patience + 1
    assert island.number == 1
    for _ in range(island.n_fresh - 1):  # one is asked for already
        assert island.parents(draw) == ()
    for number in range(5, 9):
        island.add(turned(words, number), 105)
    while island.number == 1:
        parents = island.parents(draw)
    of_champions = {*parents}.union(*(island.parents(draw) for _ in range(island.patience)))
    assert {turned(words, number) for number in (4, 0)} < of_champions
    assert len(of_champions & {turned(words, number) for number in range(5, 9)}) == 3


def test_new_aims_compare_members_anew(problem: Problem, words: Words) -> None:
    peaks = peaks_of(problem, words)
    lean = tuple(tuple(sorted(word, key=lambda letter: letter % 2 == 0)) for word in words)  # backwards first: no peak
    for targets, best in ((unlimited(problem), words), (tuple(peak // 4 for peak in peaks), lean)):
        island, draw = Island(problem, 10, unlimited(problem)), Random(0)
        island.add(words, 10)
        island.add(lean, 12)
        island.aim(10, targets)
        begin(island, draw)
        assert island.parents(draw) == (best,)


@pytest.mark.parametrize("seed", range(8))
def test_crossed_schedules_begin_like_one_and_end_like_the_other(seed: int) -> None:
    draw = Random(seed)
    instance = random_instance(draw).with_caps(None)
    problem = problem_of(instance)
    listed = list_words(problem.reversed, Rule(backward_first(problem)))
    assert listed is not None
    pair = serial_words(problem), flipped(listed[1])
    for first, second in (pair, pair[::-1]):
        latency = evaluate(problem, first)
        ends = ends_of(problem, first)
        assert latency is not None
        assert ends is not None
        times = sorted(draw.randrange(latency + 2) for _ in range(12))
        children = [*crossed(problem, first, second, times)]
        for time, child in zip(times, children, strict=True):
            check(FusedSchedule.of_words(instance, problem.letters_of(child)))
            for device, letters in enumerate(problem.letters_on):
                n = sum(end - problem.duration[x] < time for x in letters for end in ends[x])
                assert child[device][:n] == first[device][:n]
                for x in letters:  # the rest, in the order of the second
                    done = child[device][:n].count(x)
                    assert [y for y in child[device][n:] if y == x] == [x] * (problem.n_micro_batches[x // 2] - done)
        assert [*crossed(problem, first, second, [0, latency])] == [second, first]


def test_a_probe_crosses_schedules_and_anneals_the_best(problem: Problem, words: Words) -> None:
    listed = list_words(problem.reversed, Rule(backward_first(problem)))
    assert listed is not None
    probe = Probe(problem.caps, problem.caps, 1, 3, start=words, other=flipped(listed[1]), n_moves=2)
    outcome = carry_out(problem, probe, Kernels())
    assert outcome == carry_out(problem, probe, Kernels())
    for found in outcome.found:
        latency, _ = check(FusedSchedule.of_words(row(1), problem.letters_of(found.words)))
        assert problem.ticks(latency) == found.latency
    assert outcome.last is not None
    assert outcome.last.latency < max(evaluate(problem, words) or 0, listed[0])

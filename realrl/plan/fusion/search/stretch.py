"""Longer schedules from shorter ones: a part of every device's order is repeated, or a period is inserted.

Take a cut: a prefix of each device's order such that what a task in a prefix waits for is in a prefix, too. If the next
letters of every device have each letter of pipeline p k(p) times, then the cut behind them is one as well, with as many
micro-batches in flight everywhere. So they can be repeated: the order stays acyclic, and no peak changes. The latency
grows by the work of what is repeated where the part has no bubbles on the busiest device.

    orders of the short problem:   beginning │ end
    orders of the long one:        beginning │ period │ period │ ... │ period │ end

Where no such part is there, a period is made. It has each letter as often as its pipeline has micro-batches in the
proportion of what is to be added, once if all have equally many, so that as much is in flight behind it. Letters come
in the order in which they come next in the short schedule, until exchanges of neighbours let no device wait.

Invariants: what `stretched` returns are words of the longer problem, acyclic, which keep its caps if the short ones do.
No device has a higher peak than the highest one of those.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from random import Random

from realrl.plan.fusion.bounds import latency_bound
from realrl.plan.fusion.listing import ends_of, peaks_of
from realrl.plan.fusion.problem import Problem, Words

_STAGES = 2  # micro-batches of a short problem, in stages: enough for a beginning, a middle and an end
_PLACES = 12  # in the orders where a cut is looked for
_TRIES = 24  # cuts of which the latency is computed
_TIMES, _REFINED = 40, 6  # at which a period is inserted, and those of which it is changed, at an effort of 1
_EXCHANGES = 300  # of neighbours in these periods

Evaluate = Callable[[Problem, Words], int | None]
"""Returns the latency in ticks of words, or None if they are cyclic."""


@lru_cache(maxsize=16)
def shortened(problem: Problem) -> Problem | None:
    """Return the same with fewer micro-batches in the same proportion, caps included; None if it would not be much
    shorter."""
    divisor = math.gcd(*problem.n_micro_batches)
    n_stages = [problem.pipeline.count(p) for p in problem.pipeline]
    pairs = zip(n_stages, problem.n_micro_batches, strict=True)
    parts = max(-(-_STAGES * n * divisor // m) for n, m in pairs)
    if 4 * parts > 3 * divisor:
        return None
    return problem.with_micro_batches(tuple(m // divisor * parts for m in problem.n_micro_batches))


def n_evaluated(effort: int) -> int:
    """Return of how many schedules `stretched` computes the latency at most."""
    return _TRIES + effort * (_TIMES + _REFINED * _EXCHANGES)


def stretched(
    problem: Problem, short: Problem, words: Words, evaluate: Evaluate, *, effort: int, seed: int
) -> Words | None:
    """Return words of the problem that begin and end like those of a shorter one; None if none are found.

    Args:
        effort: more finds better words, and takes longer in proportion.
        seed: decides which words are tried, of which some with the lowest latency are returned.
    """
    found = [*_repeated(problem, short, words, evaluate)]
    if min((latency for latency, _ in found), default=math.inf) > latency_bound(problem):
        found += _inserted(problem, short, words, evaluate, effort, Random(seed))
    return min(found, default=(0, None), key=lambda pair: pair[0])[1]


def _joined(words: Words, cut: Sequence[int], periods: Words, n_times: int) -> Words:
    """Return the words with so many periods at a cut."""
    parts = zip(words, cut, periods, strict=True)
    return tuple([word[:at] + period * n_times + word[at:] for word, at, period in parts])


# ---------------------------------------------------------------- a part that is there


def _repeated(problem: Problem, short: Problem, words: Words, evaluate: Evaluate) -> Iterator[tuple[int, Words]]:
    """Yield words that repeat a part of others, and their latencies."""
    more = [m - n for m, n in zip(problem.n_micro_batches, short.n_micro_batches, strict=True)]
    divisor, seen = math.gcd(*more), set[tuple[int, ...]]()
    for n_times in range(1, divisor + 1):
        if divisor % n_times or any(m // n_times > n for m, n in zip(more, short.n_micro_batches, strict=True)):
            continue
        parts = [m // n_times for m in more]
        lengths = [sum(parts[letter // 2] for letter in own) for own in short.letters_on]
        for cut in _cuts(short, words, parts, lengths):
            if (n_times, *cut) in seen or len(seen) == _TRIES:
                continue
            seen.add((n_times, *cut))
            parts_there = tuple([word[at : at + n] for word, at, n in zip(words, cut, lengths, strict=True)])
            longer = _joined(words, cut, parts_there, n_times)
            latency = evaluate(problem, longer)
            assert latency is not None, "a repeated part made the order cyclic"
            yield latency, longer


def _cuts(problem: Problem, words: Words, parts: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield cuts behind which each device has every letter of stage s `parts[s]` times."""
    counts = [_counts(problem, device, word) for device, word in enumerate(words)]
    places = []
    for own, length in zip(counts, lengths, strict=True):
        ends = range(len(next(iter(own.values()), ())) - length)
        places.append([at for at in ends if all(n[at + length] - n[at] == parts[x // 2] for x, n in own.items())])
    needs = list(_needs(problem))
    for number in range(_PLACES):
        cut = _first_cut(counts, places, needs, [number * len(word) // _PLACES for word in words])
        if cut is not None:
            yield cut


def _counts(problem: Problem, device: int, word: Sequence[int]) -> dict[int, list[int]]:
    """Return for each letter of a device how often it is in each prefix of a word."""
    return {x: list(accumulate((y == x for y in word), initial=0)) for x in problem.letters_on[device]}


def _needs(problem: Problem) -> Iterator[tuple[int, int, int, int]]:
    """Yield letter and device that a cut must have at least as often as another letter on its device."""
    for stage, devices in enumerate(problem.devices):
        for a in devices:
            for b in devices:
                if a != b:  # of a task on both
                    yield 2 * stage, a, 2 * stage, b
                    yield 2 * stage + 1, a, 2 * stage + 1, b
            if not problem.last[stage]:
                for b in problem.devices[stage + 1]:
                    yield 2 * stage, a, 2 * stage + 2, b
                    yield 2 * stage + 3, b, 2 * stage + 1, a


def _first_cut(
    counts: Sequence[dict[int, list[int]]],
    places: Sequence[Sequence[int]],
    needs: Sequence[tuple[int, int, int, int]],
    after: Sequence[int],
) -> tuple[int, ...] | None:
    """Return the first cut that has only these places and none before `after`.

    A device whose prefix lacks what another one needs goes on to its next place, so each stops at the earliest
    place that it has in any such cut.
    """
    at = [
        next((i for i, place in enumerate(own) if place >= least), -1) for own, least in zip(places, after, strict=True)
    ]
    if -1 in at:
        return None
    is_changed = True
    while is_changed:
        is_changed = False
        for letter, a, other, b in needs:
            while counts[a][letter][places[a][at[a]]] < counts[b][other][places[b][at[b]]]:
                at[a] += 1
                is_changed = True
                if at[a] == len(places[a]):
                    return None
    return tuple(own[i] for own, i in zip(places, at, strict=True))


# ---------------------------------------------------------------- a period that is made


def _inserted(
    problem: Problem, short: Problem, words: Words, evaluate: Evaluate, effort: int, draw: Random
) -> Iterator[tuple[int, Words]]:
    """Yield words with a period between what has begun at a time and what has not, and their latencies."""
    enough = latency_bound(problem)
    more = [m - n for m, n in zip(problem.n_micro_batches, short.n_micro_batches, strict=True)]
    n_times, peak = math.gcd(*more), max(peaks_of(short, words))
    counts = [{letter: more[letter // 2] // n_times for letter in own} for own in problem.letters_on]

    used = [device for device, own in enumerate(counts) if any(own.values())]
    starts = _starts(short, words)
    latest, found = max(own[-1] for own in starts), list[tuple[int, tuple[int, ...], Words, list[int]]]()
    for _ in range(effort * _TIMES):
        time = draw.randrange(latest + 1)
        cut = tuple([bisect_left(own, time) for own in starts])
        rooms = [
            min(cap, peak) - _held(problem, word[:at]) for word, at, cap in zip(words, cut, problem.caps, strict=True)
        ]
        nexts = [_next(word[at:], own) for word, at, own in zip(words, cut, counts, strict=True)]
        periods = tuple([_fitted(problem, letters, room) for letters, room in zip(nexts, rooms, strict=True)])
        latency = evaluate(problem, _joined(words, cut, periods, n_times))
        if latency is not None and all(_fits(problem, *each) for each in zip(periods, rooms, strict=True)):
            found.append((latency, cut, periods, rooms))
    for latency, cut, periods, rooms in sorted(found)[: effort * _REFINED]:
        for _ in range(_EXCHANGES):
            if latency <= enough:
                break
            device = draw.choice(used)
            period = _exchanged(periods[device], draw)
            if not _fits(problem, period, rooms[device]):
                continue
            changed = (*periods[:device], period, *periods[device + 1 :])
            after = evaluate(problem, _joined(words, cut, changed, n_times))
            if after is not None and after <= latency:
                latency, periods = after, changed
        yield latency, _joined(words, cut, periods, n_times)
        if latency <= enough:
            return


def _starts(problem: Problem, words: Words) -> list[list[int]]:
    """Return when the tasks of each device start, in its order."""
    ends = ends_of(problem, words)
    assert ends is not None, "the words are cyclic"
    return [sorted(end - problem.duration[x] for x in letters for end in ends[x]) for letters in problem.letters_on]


def _held(problem: Problem, word: Sequence[int]) -> int:
    """Return the units of memory that are held after a part of an order."""
    return sum([problem.grows_by[letter] for letter in word])


def _next(word: Sequence[int], counts: dict[int, int]) -> tuple[int, ...]:
    """Return so many of each letter in the order in which they come next; those that do not come are the last ones."""
    left, found = dict(counts), []
    for letter in word:
        if left[letter]:
            left[letter] -= 1
            found.append(letter)
    return (*found, *(letter for letter, n in left.items() for _ in range(n)))


def _fitted(problem: Problem, letters: tuple[int, ...], room: int) -> tuple[int, ...]:
    """Return the letters with backwards before forwards that there is no room for, as long as there are any."""
    waiting, fitted = list(letters), list[int]()
    while waiting:
        fits = [letter for letter in waiting if problem.grows_by[letter] <= room]
        letter = (fits or waiting)[0]
        waiting.remove(letter)
        fitted.append(letter)
        room -= problem.grows_by[letter]
    return tuple(fitted)


def _fits(problem: Problem, letters: Sequence[int], room: int) -> bool:
    for letter in letters:
        room -= problem.grows_by[letter]
        if room < 0:
            return False
    return True


def _exchanged(letters: tuple[int, ...], draw: Random) -> tuple[int, ...]:
    """Return the letters with two neighbours exchanged; the first one is the neighbour of the last."""
    at, changed = draw.randrange(len(letters)), list(letters)
    changed[at - 1], changed[at] = changed[at], changed[at - 1]
    return tuple(changed)

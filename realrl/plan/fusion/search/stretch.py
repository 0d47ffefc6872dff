"""Longer schedules from shorter ones: a part of every device's order is repeated.

Take a cut: a prefix of each device's order such that what a task in a prefix waits for is in a prefix, too. If the next
letters of every device have each letter of pipeline p k(p) times, then the cut behind them is one as well, with as many
micro-batches in flight everywhere. So they can be repeated: the order stays acyclic, and no peak changes. The latency
grows by the work of what is repeated where the part has no bubbles on the busiest device.

Invariants: what `stretched` returns are words of the longer problem, acyclic, with the peaks of the short words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from realrl.plan.fusion.listing import evaluate
from realrl.plan.fusion.problem import Problem, Words

_STAGES = 2  # micro-batches of a short problem, in stages: enough for a beginning, a middle and an end
_PLACES = 12  # in the orders where a cut is looked for
_TRIES = 24  # cuts of which the latency is computed


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


def stretched(problem: Problem, short: Problem, words: Words) -> Words | None:
    """Return words of the problem that repeat a part of those of a shorter one; None if no part can be repeated.

    Words with the lowest latency are returned, where several parts can be repeated.
    """
    more = [m - n for m, n in zip(problem.n_micro_batches, short.n_micro_batches, strict=True)]
    divisor, found, seen = math.gcd(*more), list[tuple[int, Words]](), set[tuple[int, ...]]()
    for n_times in range(1, divisor + 1):
        if divisor % n_times or any(m // n_times > n for m, n in zip(more, short.n_micro_batches, strict=True)):
            continue
        parts = [m // n_times for m in more]
        lengths = [sum(parts[letter // 2] for letter in own) for own in short.letters_on]
        for cut in _cuts(short, words, parts, lengths):
            if (n_times, *cut) in seen or len(seen) == _TRIES:
                continue
            seen.add((n_times, *cut))
            longer = tuple(
                word[: at + n] + word[at : at + n] * n_times + word[at + n :]
                for word, at, n in zip(words, cut, lengths, strict=True)
            )
            latency = evaluate(problem, longer)
            assert latency is not None, "a repeated part made the order cyclic"
            found.append((latency, longer))
    return min(found, default=(0, None), key=lambda pair: pair[0])[1]


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

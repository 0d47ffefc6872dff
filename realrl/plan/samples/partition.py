"""Splitting samples over ranks and micro-batches by their token counts.

Every function returns lists of indices in ascending input order, and depends on its arguments only: equal
input gives equal output on every platform.

Invariants of `partition_balanced`:
    - the parts are disjoint and cover all indices; there are exactly `n_parts` of them;
    - no part is empty when there are at least `n_parts` items;
    - the heaviest part weighs at most the ideal (total / n_parts) plus the heaviest item;
    - with `equal_count`, the sizes of any two parts differ by at most one.
Invariants of `partition_by_budget`:
    - the parts are disjoint, cover all indices, and none is empty;
    - a part weighs at most the budget, unless it is one single item that exceeds it;
    - no two parts could be merged within the budget.
Invariants of `micro_batches_balanced` and `micro_batches_in_order`:
    - the parts cover all samples once, and none is empty unless there is no sample;
    - without a budget there are `n_mbs` of them, or as many as samples;
    - those in order hold neighbours.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate


def default_n_mbs(pp: int, *, is_train: bool) -> int:
    """Micro-batches of a minibatch and rank, as far as there are samples, where nothing says how many.

    They keep a pipeline busy: training has two for every stage, inference one.
    """
    return 2 * pp if is_train and pp > 1 else pp


def partition_balanced(weights: Sequence[int], n_parts: int, *, equal_count: bool = False) -> list[list[int]]:
    """Split items into `n_parts` parts of nearly equal weight.

    Longest processing time first (Graham 1969): the heaviest item left goes to the lightest part. With `equal_count`
    the items are dealt in rounds of `n_parts`, the heaviest of a round to the lightest part, which keeps the spread of
    the loads within the heaviest item.

    Args:
        weights: non-negative weight (tokens) of each item.
        n_parts: number of parts, at least 1.
        equal_count: give every part the same number of items, up to one.

    Raises:
        ValueError: `n_parts` is not positive, or a weight is negative.
    """
    if n_parts < 1:
        raise ValueError(f"n_parts must be at least 1, not {n_parts}")
    if weights and min(weights) < 0:
        raise ValueError(f"weights must not be negative: {min(weights)}")
    return [list(part) for part in _balanced(tuple(weights), n_parts, equal_count)]


@lru_cache(maxsize=4)  # the calls of a step divide the same samples, mostly over as many ranks
def _balanced(weights: tuple[int, ...], n_parts: int, equal_count: bool) -> tuple[tuple[int, ...], ...]:
    heaviest_first = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)  # stable: equal ones by index
    # The lightest part is on top. An entry is (load, number of items, part) as one number, which compares faster. The
    # number of items breaks ties, so that items without weight also spread over all parts.
    unit = (len(weights) + 1) * n_parts
    heap = list(range(n_parts))
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    for i in () if equal_count else heaviest_first:
        entry = heap[0]
        parts[entry % n_parts].append(i)
        heapq.heapreplace(heap, entry + weights[i] * unit + n_parts)
    for start in range(0, len(heaviest_first) if equal_count else 0, n_parts):
        dealt = []
        for i in heaviest_first[start : start + n_parts]:
            entry = heapq.heappop(heap)
            parts[entry % n_parts].append(i)
            dealt.append(entry + weights[i] * unit + n_parts)
        for entry in dealt:
            heapq.heappush(heap, entry)
    return tuple([tuple(sorted(part)) for part in parts])


def partition_by_budget(weights: Sequence[int], budget: int) -> list[list[int]]:
    """Split items into few parts that weigh at most `budget` each (first-fit decreasing).

    Args:
        weights: non-negative weight (tokens) of each item.
        budget: weight that a part may reach, at least 1; an item above it gets a part of its own.

    Returns:
        The parts, ordered by their first index.

    Raises:
        ValueError: `budget` is not positive, or a weight is negative.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1, not {budget}")
    if any(weight < 0 for weight in weights):
        raise ValueError(f"weights must not be negative: {min(weights)}")
    parts: list[list[int]] = []
    loads: list[int] = []
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        fit = next((part for part, load in enumerate(loads) if load + weights[i] <= budget), None)
        if fit is None:
            parts.append([i])
            loads.append(weights[i])
        else:
            parts[fit].append(i)
            loads[fit] += weights[i]
    return sorted(sorted(part) for part in parts)


def micro_batches_balanced(weights: Sequence[int], *, n_mbs: int, budget: int | None = None) -> list[list[int]]:
    """Cut a minibatch of training into micro-batches of nearly equal tokens.

    Args:
        weights: tokens of each sample.
        n_mbs: number of micro-batches.
        budget: tokens of a micro-batch, in the place of `n_mbs`.
    """
    if budget is not None:
        return partition_by_budget(weights, budget)
    n_mbs = min(n_mbs, len(weights))
    return [list(range(len(weights)))] if n_mbs <= 1 else partition_balanced(weights, n_mbs)


def micro_batches_in_order(weights: Sequence[int], *, n_mbs: int, budget: int | None = None) -> list[range]:
    """Cut a batch of inference into micro-batches of neighbours; arguments as for `micro_batches_balanced`."""
    if not weights:
        return [range(0)]
    if budget is not None:
        starts = _starts_by_budget(weights, budget)
    else:
        starts = _starts_by_count(weights, min(n_mbs, len(weights)))
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(weights)], strict=True)]


def _starts_by_budget(weights: Sequence[int], budget: int) -> list[int]:
    starts, load = [0], 0
    for i, weight in enumerate(weights):
        if load and load + weight > budget:
            starts.append(i)
            load = 0
        load += weight
    return starts


def _starts_by_count(weights: Sequence[int], n_parts: int) -> list[int]:
    """Cut where the running total passes each further share of the whole, leaving no part empty."""
    before = [0, *accumulate(weights)]
    starts = [0]
    for part in range(1, n_parts):
        first, last = starts[-1] + 1, len(weights) - (n_parts - part)
        share = before[-1] * part / n_parts
        starts.append(min(range(first, last + 1), key=lambda i: abs(before[i] - share)))
    return starts

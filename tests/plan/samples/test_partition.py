"""Partitions: exactly the invariants that the module states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.plan.samples.partition import partition_balanced, partition_by_budget

WEIGHTS = st.lists(st.integers(0, 2000), max_size=60)


def check_cover(parts, n_items):
    assert sorted(i for part in parts for i in part) == list(range(n_items))
    assert all(part == sorted(part) for part in parts)


@given(WEIGHTS, st.integers(1, 12), st.booleans())
def test_balanced(weights, n_parts, equal_count):
    parts = partition_balanced(weights, n_parts, equal_count=equal_count)
    check_cover(parts, len(weights))
    assert len(parts) == n_parts
    assert all(parts) or len(weights) < n_parts
    loads = [sum(weights[i] for i in part) for part in parts]
    assert max(loads) <= sum(weights) / n_parts + max(weights, default=0)
    if equal_count:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    assert parts == partition_balanced(list(weights), n_parts, equal_count=equal_count)


def test_balanced_example():
    assert partition_balanced([7, 1, 5, 3, 6, 2], 2) == [[0, 3, 5], [1, 2, 4]]
    assert partition_balanced([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert partition_balanced([9, 1, 1, 1], 2, equal_count=True) == [[0, 3], [1, 2]]


@given(WEIGHTS, st.integers(1, 3000))
def test_by_budget(weights, budget):
    parts = partition_by_budget(weights, budget)
    check_cover(parts, len(weights))
    loads = [sum(weights[i] for i in part) for part in parts]
    assert all(parts)
    assert all(load <= budget or len(part) == 1 for load, part in zip(loads, parts, strict=True))
    assert all(a + b > budget for i, a in enumerate(loads) for b in loads[:i])
    assert parts == sorted(parts)


def test_by_budget_example():
    assert partition_by_budget([50, 300, 60, 40, 10], 100) == [[0, 4], [1], [2, 3]]
    assert partition_by_budget([], 5) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition_balanced([1], 0), "n_parts must be at least 1, not 0"),
        (lambda: partition_balanced([1, -2], 1), "must not be negative: -2"),
        (lambda: partition_by_budget([1], 0), "budget must be at least 1, not 0"),
        (lambda: partition_by_budget([-1], 1), "must not be negative: -1"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()

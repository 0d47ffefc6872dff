"""Files mixed by weights: the invariants of `realrl.plan.samples.mixture`, alone and behind a cursor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import DataError
from realrl.plan.samples.cursor import CursorState, DatasetCursor
from realrl.plan.samples.mixture import mixed_epoch, plan_mixture

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)
WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=4)


def rows_of(sizes: list[int]) -> list[str]:
    return [f"f{number}/{i}" for number, size in enumerate(sizes) for i in range(size)]


def weights_of(sizes: list[int], weights: list[float]) -> dict[str, float]:
    return {f"f{number}": weight for number, (_, weight) in enumerate(zip(sizes, weights, strict=False))}


def cursor(
    row_ids: list[str], weights: Mapping[str, float], *, shuffle: bool = True, start: CursorState | None = None
) -> DatasetCursor:
    return DatasetCursor(row_ids, seed=3, shuffle=shuffle, start=start, parts=plan_mixture(row_ids, weights))


@given(SIZES, WEIGHTS, st.booleans())
def test_every_epoch_has_the_shares_and_no_sample_comes_twice(
    sizes: list[int], weights: list[float], shuffle: bool
) -> None:
    row_ids, by_name = rows_of(sizes), weights_of(sizes, weights)
    parts = plan_mixture(row_ids, by_name)
    n, total = len(row_ids), sum(by_name.values())
    assert sum(part.n_samples for part in parts) == n
    is_even = all(n * weight / total >= 1 for weight in by_name.values())
    for part in parts:
        assert part.n_samples >= 1
        assert not is_even or abs(part.n_samples - n * by_name[part.name] / total) <= 1 + 1e-9
    seen: set[tuple[int, int]] = set()
    for epoch in (1, 2, 3):
        picks = mixed_epoch(parts, 7, epoch, shuffle)
        found = Counter(row_ids[row].partition("/")[0] for _, row in picks)
        assert found == {part.name: part.n_samples for part in parts}
        assert seen.isdisjoint(picks)
        seen |= set(picks)
    for part in parts:  # whole passes over a file hold all its rows
        rows = Counter(row for number, row in seen if part.first <= row < part.first + part.n_rows and number == 1)
        assert len(rows) == min(part.n_rows, 3 * part.n_samples)


@given(SIZES, WEIGHTS, st.booleans(), st.integers(0, 60), st.integers(0, 20))
def test_a_resumed_mixture_goes_on(
    sizes: list[int], weights: list[float], shuffle: bool, position: int, count: int
) -> None:
    row_ids, by_name = rows_of(sizes), weights_of(sizes, weights)
    whole = cursor(row_ids, by_name, shuffle=shuffle)
    resumed = cursor(row_ids, by_name, shuffle=shuffle, start=whole.state(position))
    assert whole.take(0, position + count)[position:] == resumed.take(position, count)
    assert len({ref.id for ref in whole.take(0, 80)}) == 80


def test_files_are_spread_evenly_in_the_order_of_their_rows() -> None:
    row_ids = rows_of([2, 4])
    refs = cursor(row_ids, {"f0": 2.0, "f1": 1.0}, shuffle=False).take(0, 12)
    assert [ref.id for ref in refs] == [
        "1/f0/0", "1/f1/0", "1/f0/1", "2/f0/0", "1/f1/1", "2/f0/1",
        "3/f0/0", "1/f1/2", "3/f0/1", "4/f0/0", "1/f1/3", "4/f0/1",
    ]  # fmt: skip
    assert [row_ids[ref.row] for ref in refs] == [ref.id.partition("/")[2] for ref in refs]


def test_other_weights_are_another_dataset() -> None:
    row_ids = rows_of([2, 4])
    start = cursor(row_ids, {"f0": 2.0, "f1": 1.0}).state(5)
    assert cursor(row_ids, {"f0": 4.0, "f1": 2.0}, start=start).start == 5
    for weights in ({"f0": 1.0, "f1": 1.0}, {}):
        with pytest.raises(DataError, match="made with another dataset"):
            cursor(row_ids, weights, start=start) if weights else DatasetCursor(
                row_ids, seed=3, shuffle=True, start=start
            )


def test_a_file_without_rows_is_named() -> None:
    with pytest.raises(DataError, match=r"no row of dataset\.files\.f1 is left to mix"):
        plan_mixture(["f0/1"], {"f0": 1.0, "f1": 1.0})

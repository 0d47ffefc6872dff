"""The order of samples: permutations that never change, and positions that continue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import ConfigError, DataError
from realrl.plan.samples.cursor import DatasetCursor, epoch_order, fingerprint


def cursor(n_rows=5, *, seed=1, shuffle=True, start=None):
    return DatasetCursor([f"row{i}" for i in range(n_rows)], seed=seed, shuffle=shuffle, start=start)


def test_the_order_is_the_same_on_every_platform_and_version():
    assert epoch_order(10, 1, 1) == (7, 1, 3, 0, 2, 9, 6, 8, 5, 4)
    assert epoch_order(10, 1, 2) != epoch_order(10, 1, 1) != epoch_order(10, 2, 1)


@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(1, 1000))
def test_every_epoch_is_a_permutation(n_rows, seed, epoch):
    assert sorted(epoch_order(n_rows, seed, epoch)) == list(range(n_rows))


@given(st.integers(1, 12), st.integers(0, 9), st.booleans(), st.lists(st.integers(0, 15), max_size=6))
def test_positions_continue_however_samples_are_taken(n_rows, seed, shuffle, counts):
    whole = cursor(n_rows, seed=seed, shuffle=shuffle)
    refs = whole.take(0, sum(counts))
    position = 0
    for count in counts:
        resumed = cursor(n_rows, seed=seed, shuffle=shuffle, start=whole.state(position))
        assert resumed.take(resumed.start, count) == refs[position : position + count]
        position += count
    for k, ref in enumerate(refs):
        epoch, row_id = ref.id.split("/")
        assert (int(epoch), row_id) == (k // n_rows + 1, f"row{ref.row}")
        assert whole.epoch_of(k) == int(epoch)
        assert shuffle or ref.row == k % n_rows
    assert len({ref.id for ref in refs}) == len(refs)
    for start in range(0, len(refs) - n_rows + 1, n_rows):
        assert {ref.row for ref in refs[start : start + n_rows]} == set(range(n_rows))


def test_fingerprint_knows_order_and_borders():
    assert len({fingerprint(ids) for ids in (["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""])}) == 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: cursor(0), DataError, "no usable row"),
        (lambda: DatasetCursor(["a", "b", "a"], seed=1, shuffle=True), DataError, "two rows 'a'"),
        (lambda: cursor(6, start=cursor(5).state(3)), DataError, "made with another dataset"),
        (lambda: cursor(seed=2, start=cursor(seed=1).state(3)), ConfigError, "seed=1, this run has seed=2"),
        (
            lambda: cursor(shuffle=False, start=cursor().state(3)),
            ConfigError,
            "dataset.shuffle=true, this run has dataset.shuffle=false",
        ),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from realrl.algo.api import MicroBatching
from realrl.engine.train.microbatch import split_balanced, split_in_order
from tests.helpers.training import make_batch

SPLITS = st.one_of(
    st.builds(MicroBatching, n_mbs=st.integers(1, 20)),
    st.builds(MicroBatching, max_tokens_per_mb=st.integers(1, 100)),
    st.just(MicroBatching()),
)


@given(n_samples=st.integers(1, 12), seed=st.integers(0, 5), micro_batching=SPLITS)
def test_parts_hold_each_sample_once_within_the_limits(
    n_samples: int, seed: int, micro_batching: MicroBatching
) -> None:
    batch = make_batch(n_samples, seed=seed)
    for split in (split_balanced, split_in_order):
        parts = split(batch, micro_batching)
        ids = [sample_id for part in parts for sample_id in part.ids]
        assert sorted(ids) == sorted(batch.ids)
        if split is split_in_order:
            assert tuple(ids) == batch.ids
        assert all(len(part) for part in parts)
        budget = micro_batching.max_tokens_per_mb
        if budget is None:
            assert len(parts) == min(micro_batching.n_mbs or 1, n_samples)
        else:
            assert all(len(part) == 1 or part.n_rows("input_ids") <= budget for part in parts)


@given(n_samples=st.integers(4, 12), seed=st.integers(0, 5), n_mbs=st.integers(2, 4))
def test_parts_in_order_are_balanced_up_to_one_sample_at_each_end(n_samples: int, seed: int, n_mbs: int) -> None:
    batch = make_batch(n_samples, seed=seed)
    longest = max(batch.flat_seqlens("input_ids"))
    share = batch.n_rows("input_ids") / n_mbs
    for part in split_in_order(batch, MicroBatching(n_mbs=n_mbs)):
        assert part.n_rows("input_ids") <= share + 2 * longest


def test_a_call_that_leaves_the_number_open() -> None:
    batch = make_batch(6)
    for split in (split_balanced, split_in_order):
        assert len(split(batch, MicroBatching(), default=4)) == 4
        assert len(split(batch, MicroBatching(), default=9)) == 6
        assert len(split(batch, MicroBatching(n_mbs=2), default=4)) == 2
        assert len(split(batch, MicroBatching(max_tokens_per_mb=10**6), default=4)) == 1

"""Cutting a rank's share of a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from realrl.algo.api import MicroBatching
from realrl.data.sample import SequenceSample
from realrl.plan.samples.partition import partition_balanced, partition_by_budget

TOKENS = "input_ids"


def split_balanced(batch: SequenceSample, micro_batching: MicroBatching, *, default: int = 1) -> list[SequenceSample]:
    """Micro-batches of nearly equal tokens, samples in any order; for training, where results are sums.

    With fewer samples than `n_mbs` there are as many micro-batches as samples; none is empty.

    Args:
        default: number of micro-batches if `micro_batching` sets none.
    """
    weights = _weights(batch)
    if micro_batching.max_tokens_per_mb is not None:
        return batch.split(partition_by_budget(weights, micro_batching.max_tokens_per_mb))
    n_mbs = min(micro_batching.n_mbs or default, len(batch))
    return [batch] if n_mbs <= 1 else batch.split(partition_balanced(weights, n_mbs))


def split_in_order(batch: SequenceSample, micro_batching: MicroBatching, *, default: int = 1) -> list[SequenceSample]:
    """Micro-batches of neighbouring samples, whose results concatenate to the order of `batch`.

    Args:
        default: number of micro-batches if `micro_batching` sets none.
    """
    if len(batch) == 0:
        return [batch]
    weights = _weights(batch)
    if micro_batching.max_tokens_per_mb is not None:
        starts = _starts_by_budget(weights, micro_batching.max_tokens_per_mb)
    else:
        starts = _starts_by_count(weights, min(micro_batching.n_mbs or default, len(batch)))
    ends = [*starts[1:], len(batch)]
    return batch.split([range(a, b) for a, b in zip(starts, ends, strict=True)]) if len(starts) > 1 else [batch]


def _weights(batch: SequenceSample) -> list[int]:
    return [sum(lens) for lens in batch.seqlens[TOKENS]]


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

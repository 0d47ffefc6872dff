"""Cutting a rank's share of a batch into micro-batches."""

from __future__ import annotations

from realrl.algo.api import MicroBatching
from realrl.data.sample import SequenceSample
from realrl.plan.samples.partition import micro_batches_balanced, micro_batches_in_order

TOKENS = "input_ids"


def split_balanced(batch: SequenceSample, micro_batching: MicroBatching, *, default: int = 1) -> list[SequenceSample]:
    """Micro-batches of nearly equal tokens, samples in any order; for training, where results are sums.

    With fewer samples than `n_mbs` there are as many micro-batches as samples; none is empty.

    Args:
        default: number of micro-batches if `micro_batching` sets none.
    """
    n_mbs, budget = micro_batching.n_mbs or default, micro_batching.max_tokens_per_mb
    parts = micro_batches_balanced(_weights(batch), n_mbs=n_mbs, budget=budget)
    return batch.split(parts) if len(parts) > 1 else [batch]


def split_in_order(batch: SequenceSample, micro_batching: MicroBatching, *, default: int = 1) -> list[SequenceSample]:
    """Micro-batches of neighbouring samples, whose results concatenate to the order of `batch`.

    Args:
        default: number of micro-batches if `micro_batching` sets none.
    """
    n_mbs, budget = micro_batching.n_mbs or default, micro_batching.max_tokens_per_mb
    parts = micro_batches_in_order(_weights(batch), n_mbs=n_mbs, budget=budget)
    return batch.split(parts) if len(parts) > 1 else [batch]


def _weights(batch: SequenceSample) -> list[int]:
    return [sum(lens) for lens in batch.seqlens[TOKENS]]

"""Tokens of a dispatch's samples, and of the micro-batches that an engine makes of them.

Invariants:
    - every sample of a minibatch is in one micro-batch, and the tokens of all add up to those of the samples;
    - micro-batches are those of `realrl.plan.samples.partition`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np

from realrl.graph.mfc import MFCDef
from realrl.plan.samples.partition import default_n_mbs, micro_batches_balanced, micro_batches_in_order
from realrl.plan.samples.prefixes import is_worth_sharing
from realrl.shape import DecoderConfig
from realrl.sim.costs.flops import Array, Window, attended, windows_of
from realrl.sim.costs.passes import Indices, Load
from realrl.sim.durations import SampleSizes


@dataclass(frozen=True)
class Tokens:
    """The samples of a dispatch as a model computes them.

    Attributes:
        index: sample -> its place in the arrays.
        weights: tokens of each sample, by which micro-batches are cut.
        load: of each sample.
    """

    index: Mapping[str, int]
    weights: Sequence[int]
    load: Load


def tokens_of(
    sizes: Mapping[str, SampleSizes], ids: Iterable[str], model: DecoderConfig, *, shares_prefixes: bool
) -> Tokens:
    """Return the tokens of samples.

    Args:
        shares_prefixes: the engine computes a prompt once for all its responses, where it is worth the trouble.
    """
    index = {sample_id: i for i, sample_id in enumerate(dict.fromkeys(ids))}
    found = [sizes[sample_id] for sample_id in index]
    counts = np.array([len(size.prompt_tokens) for size in found])
    starts = np.cumsum(counts) - counts
    prompts = np.fromiter(chain.from_iterable(size.prompt_tokens for size in found), dtype=np.float64)
    empty = (0,)
    responses = np.fromiter(
        chain.from_iterable(size.response_tokens or empty * len(size.prompt_tokens) for size in found),
        dtype=np.float64,
    )
    lengths = prompts + responses

    def of_samples(values: Array) -> Array:
        return np.add.reduceat(values, starts) if len(starts) else np.zeros(0)

    whole = of_samples(lengths)
    tokens = whole
    scored = of_samples(np.where(responses > 0, responses, lengths))
    pairs = {window: of_samples(attended(lengths, window)) for window in windows_of(model)}
    if shares_prefixes and model.moe is None and counts.max(initial=0) > 1:
        tokens, pairs = tokens.copy(), {window: n.copy() for window, n in pairs.items()}
        for i, size in enumerate(found):
            n, prompt = len(size.prompt_tokens), size.prompt_tokens[0]
            if size.response_tokens and n > 1 and is_worth_sharing(prompt, size.tokens, model.hidden_size):
                tokens[i] -= (n - 1) * prompt
                for window in pairs:
                    pairs[window][i] -= (n - 1) * float(attended(prompt, window))
    return Tokens(index, whole.astype(int).tolist(), Load(tokens, scored, pairs))


@dataclass(frozen=True)
class MicroBatches:
    """Shares of samples that were cut into equally many micro-batches.

    Attributes:
        places: which of the shares they are.
        load: arrays [micro-batches, shares].
    """

    places: tuple[int, ...]
    load: Load


def micro_batches(
    tokens: Tokens, shares: Sequence[Sequence[str]], mfc: MFCDef, *, n_stages: int
) -> Iterator[MicroBatches]:
    """Cut shares of samples into micro-batches as the engine does, and yield those with equally many together.

    Args:
        shares: samples of each rank, or of each minibatch of each rank; an empty one is left out.
    """
    default = default_n_mbs(n_stages, is_train=mfc.is_train)
    split = _balanced if mfc.is_train else _in_order
    by_number: dict[int, list[int]] = {}
    orders: list[list[int]] = []  # of each share: its samples, micro-batch after micro-batch
    cuts: list[list[int]] = []
    for place, ids in enumerate(shares):
        members = [tokens.index[sample_id] for sample_id in ids]
        weights = tuple([tokens.weights[i] for i in members])
        parts = split(weights, mfc.n_mbs or default, mfc.max_tokens_per_mb) if members else ()
        orders.append([members[i] for part in parts for i in part])
        cuts.append([len(part) for part in parts])
        if parts:
            by_number.setdefault(len(parts), []).append(place)
    for n_mbs, places in by_number.items():
        order = np.array([i for place in places for i in orders[place]])
        sizes = np.array([n for place in places for n in cuts[place]])
        starts = np.cumsum(sizes) - sizes

        def sums(
            values: Array,
            order: Indices = order,
            starts: Indices = starts,
            shape: tuple[int, int] = (len(places), n_mbs),
        ) -> Array:
            found: Array = np.add.reduceat(values[order], starts).reshape(shape).T
            return found

        load = tokens.load
        pairs: dict[Window, Array] = {window: sums(n) for window, n in load.pairs.items()}
        yield MicroBatches(tuple(places), Load(sums(load.tokens), sums(load.scored), pairs))


@lru_cache(maxsize=4096)
def _balanced(weights: tuple[int, ...], n_mbs: int, budget: int | None) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, micro_batches_balanced(weights, n_mbs=n_mbs, budget=budget)))


@lru_cache(maxsize=4096)
def _in_order(weights: tuple[int, ...], n_mbs: int, budget: int | None) -> tuple[range, ...]:
    return tuple(micro_batches_in_order(weights, n_mbs=n_mbs, budget=budget))

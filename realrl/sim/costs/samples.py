"""Tokens of a dispatch's samples, and of the micro-batches that an engine makes of them.

Invariants:
    - every sample of a minibatch is in one micro-batch, and the tokens of all add up to those of the samples;
    - micro-batches are those of `realrl.plan.samples.partition`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import is_

import numpy as np

from realrl.graph.mfc import MFCDef
from realrl.plan.samples.partition import default_n_mbs, micro_batches_balanced, micro_batches_in_order
from realrl.plan.samples.prefixes import is_worth_sharing
from realrl.shape import DecoderConfig
from realrl.sim.costs.flops import Array, Window, attended, windows_of
from realrl.sim.costs.passes import Indices, Load
from realrl.sim.durations import SampleSizes

_SAMPLE, _PADDING = 3.0, 2.0  # operations of all responses, and of uneven ones, over those of one response
_USUAL = 8 + _SAMPLE + _PADDING


@dataclass(frozen=True)
class Tokens:
    """The samples of a dispatch as a model computes them.

    Attributes:
        index: sample -> its place in the arrays.
        kinds: number of the kind of each sample; those of one kind are alike in all that follows.
        weights: tokens of each sample, by which micro-batches are cut.
        load: of each sample.
    """

    index: Mapping[str, int]
    kinds: Sequence[int]
    weights: Sequence[int]
    load: Load


def tokens_of(sizes: Mapping[str, SampleSizes], model: DecoderConfig, *, shares_prefixes: bool) -> Tokens:
    """Return the tokens of all samples of a dispatch; those of the last few dispatches are remembered.

    Args:
        shares_prefixes: the engine computes a prompt once for all its responses, where it is worth the trouble.
    """
    hidden_size = model.hidden_size if shares_prefixes and model.moe is None else None
    return _tokens_of(_Sizes(sizes), windows_of(model), hidden_size)


class _Sizes:
    """Sizes of samples, equal to others if these are the same objects."""

    __slots__ = ("ids", "sizes")

    def __init__(self, sizes: Mapping[str, SampleSizes]) -> None:
        self.ids, self.sizes = tuple(sizes), tuple(sizes.values())

    def __hash__(self) -> int:
        return hash((self.ids, tuple(map(id, self.sizes))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sizes) and self.ids == other.ids and all(map(is_, self.sizes, other.sizes))


@lru_cache(maxsize=16)
def _tokens_of(dispatch: _Sizes, windows: tuple[Window, ...], hidden_size: int | None) -> Tokens:
    """Return the tokens of a dispatch; a prompt is computed once by models of `hidden_size`, if that is given."""
    index = {sample_id: i for i, sample_id in enumerate(dispatch.ids)}
    found = dispatch.sizes
    of_prompts, of_responses = [size.prompt_tokens for size in found], [size.response_tokens for size in found]
    counts = np.array([len(lengths) for lengths in of_prompts])
    if not all(of_responses):
        of_responses = [some or (0,) * len(lengths) for some, lengths in zip(of_responses, of_prompts, strict=True)]
    prompts, responses = (np.array([*chain.from_iterable(some)], dtype=float) for some in (of_prompts, of_responses))
    lengths = prompts + responses
    starts = np.cumsum(counts) - counts

    def of_samples(values: Array) -> Array:
        return values if len(values) == len(starts) else np.add.reduceat(values, starts)

    whole = of_samples(lengths)
    tokens = whole
    scored = of_samples(np.where(responses > 0, responses, lengths))
    pairs = {window: of_samples(attended(lengths, window)) for window in windows}
    forks = np.zeros(len(found))
    if hidden_size is not None and counts.max(initial=0) > 1:
        tokens, pairs = tokens.copy(), {window: n.copy() for window, n in pairs.items()}
        for i, size in enumerate(found):
            n, prompt = len(size.prompt_tokens), size.prompt_tokens[0]
            if size.response_tokens and n > 1 and is_worth_sharing(prompt, size.tokens, hidden_size):
                tokens[i] -= (n - 1) * prompt
                forks[i] = _fork(size.response_tokens) / _USUAL
                for window in pairs:
                    pairs[window][i] -= (n - 1) * float(attended(prompt, window))
    _, kinds = np.unique(np.stack([whole, tokens, scored, forks, *pairs.values()]), axis=1, return_inverse=True)
    return Tokens(index, kinds.ravel().tolist(), whole.astype(int).tolist(), Load(tokens, scored, pairs, forks))


def _fork(responses: Sequence[int]) -> float:
    """Return the work of attention on a sample whose prompt counts once, beside that of its tokens.

    The unit is the work on one response; the constants were measured on two cores.
    """
    return len(responses) + _SAMPLE + _PADDING * (min(responses) < max(responses))


@dataclass(frozen=True)
class MicroBatches:
    """Shares of samples that were cut into equally many micro-batches.

    Attributes:
        places: which of the shares they are.
        columns: column of each of them in the load; shares that are alike have one together.
        load: arrays [micro-batches, columns].
    """

    places: tuple[int, ...]
    columns: Indices
    load: Load


def micro_batches(
    tokens: Tokens, shares: Sequence[Sequence[str]], mfc: MFCDef, *, n_stages: int
) -> Iterator[MicroBatches]:
    """Cut shares of samples into micro-batches as the engine does, and yield those with equally many together.

    Args:
        shares: samples of each rank, or of each minibatch of each rank; an empty one is left out.
    """
    n_mbs = mfc.n_mbs or default_n_mbs(n_stages, is_train=mfc.is_train)
    cut_of = _balanced if mfc.is_train else _in_order
    index, kinds = tokens.index, tokens.kinds
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, ids in enumerate(shares):
        if ids:
            alike.setdefault(tuple([kinds[index[sample_id]] for sample_id in ids]), []).append(place)
    by_number: dict[int, list[tuple[list[int], Indices, _Cut]]] = {}
    for places in alike.values():
        members = [index[sample_id] for sample_id in shares[places[0]]]
        weights = tuple([tokens.weights[i] for i in members])
        cut = _ALONE if len(members) == 1 else cut_of(weights, n_mbs, mfc.max_tokens_per_mb)
        by_number.setdefault(len(cut.sizes), []).append((places, np.array(members)[cut.order], cut))
    load = tokens.load
    for number, cuts in by_number.items():
        order = np.concatenate([members for _, members, _ in cuts])
        sizes = np.concatenate([cut.sizes for *_, cut in cuts])
        starts, shape = np.cumsum(sizes) - sizes, (len(cuts), number)
        pairs = {window: _sums(n[order], starts, shape) for window, n in load.pairs.items()}
        counts = (_sums(np.asarray(n)[order], starts, shape) for n in (load.tokens, load.scored, load.forks))
        n_tokens, n_scored, n_forks = counts
        cut_load = Load(n_tokens, n_scored, pairs, n_forks)
        columns = np.repeat(np.arange(len(cuts)), [len(places) for places, *_ in cuts])
        yield MicroBatches(tuple([place for places, *_ in cuts for place in places]), columns, cut_load)


def _sums(values: Array, starts: Indices, shape: tuple[int, int]) -> Array:
    found: Array = np.add.reduceat(values, starts).reshape(shape).T
    return found


@dataclass(frozen=True)
class _Cut:
    """Samples of a share, micro-batch after micro-batch, and the number in each."""

    order: Indices
    sizes: Indices

    @classmethod
    def of(cls, parts: Sequence[Sequence[int]]) -> _Cut:
        return cls(np.array([*chain.from_iterable(parts)]), np.array([*map(len, parts)]))


_ALONE = _Cut.of([[0]])


@lru_cache(maxsize=1 << 14)
def _balanced(weights: tuple[int, ...], n_mbs: int, budget: int | None) -> _Cut:
    return _Cut.of(micro_batches_balanced(weights, n_mbs=n_mbs, budget=budget))


@lru_cache(maxsize=1 << 14)
def _in_order(weights: tuple[int, ...], n_mbs: int, budget: int | None) -> _Cut:
    return _Cut.of(micro_batches_in_order(weights, n_mbs=n_mbs, budget=budget))

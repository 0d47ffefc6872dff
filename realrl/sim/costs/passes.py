"""Seconds of forward and backward passes of one stage, and of a pipeline of them.

A pass of T tokens takes, with c a constant and h the tokens at which products reach half of their rate,

    c + max(products (T + h) / rate, weights / bandwidth) + attention / its rate + rows / bandwidth + tensor collectives

and so on for the head. `Device` has the constants; c grows with the samples whose responses share their prompt. A
backward pass has the FLOPs of `realrl.sim.costs.flops`, twice the constant of a block, since it runs about twice as
many kernels, and with activation checkpointing a forward pass of the blocks ahead of it.

Invariants:
    - no pass takes less time for more tokens, pairs or scored tokens, and one without tokens takes none;
    - a pipeline of one stage takes the sum of its passes; one of p equal stages with m equal micro-batches and free
      messages takes m + p - 1 times a forward and a backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from realrl.plan.pipeline import Computation, StepKind, orders_of
from realrl.sim.costs.collectives import LinearCost
from realrl.sim.costs.flops import LOGIT_BYTES, Array, StageWork, Window
from realrl.sim.hardware import Device

Indices = npt.NDArray[np.int64]
_SOFTMAX_BYTES = 16.0  # of a scored token, that tensor-parallel ranks add up: log-probability, normaliser, entropy


@dataclass(frozen=True)
class Load:
    """Tokens of micro-batches, in arrays of one shape.

    Attributes:
        tokens: tokens that blocks compute; a prefix that a sample's sequences share may count once.
        scored: tokens whose logits or scores are computed.
        pairs: window -> pairs of a token and one that it sees.
        forks: samples whose sequences share a prefix that counts once, in units of one with eight uneven responses.
    """

    tokens: Array
    scored: Array
    pairs: Mapping[Window, Array]
    forks: Array | float = 0.0

    def reshape(self, *shape: int) -> Load:
        """Return the same numbers in arrays of another shape."""
        pairs = {window: n.reshape(shape) for window, n in self.pairs.items()}
        forks = np.broadcast_to(self.forks, self.tokens.shape).reshape(shape)
        return Load(self.tokens.reshape(shape), self.scored.reshape(shape), pairs, forks)


@dataclass(frozen=True)
class PassCost:
    """Seconds of passes of one stage on its tensor-parallel ranks.

    Args:
        work: of the stage.
        tensor: an all-reduce of the tensor-parallel group, by bytes.
        is_backward: of the backward pass instead of the forward one.
        recomputes: blocks are computed again before the backward pass.
        extra_s: seconds of each pass that depend on nothing, such as gathering parameters.
    """

    work: StageWork
    device: Device
    tensor: LinearCost
    is_backward: bool = False
    recomputes: bool = False
    extra_s: float = 0.0

    def __call__(self, load: Load) -> Array:
        """Return the seconds of each micro-batch."""
        seconds = self._blocks(load, is_backward=self.is_backward)
        if self.is_backward and self.recomputes:
            seconds = seconds + self._blocks(load, is_backward=False)
        if self.work.has_head:
            seconds = seconds + self._head(load.scored)
        constant = (2.0 if self.is_backward else 1.0) * self.device.pass_s + self.extra_s
        return np.where(load.tokens > 0, seconds + constant, 0.0)

    def _blocks(self, load: Load, *, is_backward: bool) -> Array:
        work, device, tokens = self.work, self.device, load.tokens
        slowdown = device.backward_slowdown if is_backward else 1.0
        times = 2.0 if is_backward else 1.0
        per_token = slowdown * work.product_flops(1.0, is_backward=is_backward) / device.rate(work.dtype)
        products = np.maximum(
            per_token * (tokens + device.half_tokens), times * work.bytes_read(tokens) / device.stream
        )
        pairs = sum((n * load.pairs[window] for window, n in work.windows), np.zeros_like(tokens))
        peak = device.rate(work.dtype) / device.efficiency * device.attention_efficiency
        attention = slowdown * work.attention_flops(1.0, is_backward=is_backward) / peak * pairs
        rows = times * work.row_bytes / device.activation_stream * tokens
        n_exchanges = 2 * work.n_layers + (work.has_embedding and not is_backward) + (work.has_head and is_backward)
        exchange = n_exchanges * (self.tensor.latency_s + self.tensor.s_per_byte * work.hidden_bytes * tokens)
        constant = times * work.n_layers * (device.block_s + device.fork_s * load.forks)
        return constant + products + attention + rows + exchange

    def _head(self, scored: Array) -> Array:
        work, device = self.work, self.device
        slowdown = device.backward_slowdown if self.is_backward else 1.0
        tokens = np.where(scored > 0, scored + device.half_tokens, 0.0)
        products = np.maximum(
            slowdown * work.head_flops(tokens, is_backward=self.is_backward) / device.rate(work.dtype),
            work.head * work.element_bytes / device.stream,
        )
        softmax = scored * work.logits * LOGIT_BYTES / device.activation_stream
        if work.logits and not self.is_backward:  # its parts on the ranks of the group, in two messages
            softmax = softmax + 2 * self.tensor.latency_s + self.tensor.s_per_byte * _SOFTMAX_BYTES * scored
        return np.where(scored > 0, products + softmax, 0.0)


# ---------------------------------------------------------------- pipelines


@dataclass(frozen=True)
class _Order:
    """The computations of a pipeline in levels: those of a level depend on earlier levels only.

    Attributes:
        chunks, micro_batches, is_backward: of each computation.
        levels: for each level its computations, which are neighbours, those before them on their stages, and those that
            feed them; one more than the last computation stands for none.
        crosses: 1.0 where something feeds a computation; that is always on another stage.
    """

    chunks: Indices
    micro_batches: Indices
    is_backward: npt.NDArray[np.bool_]
    levels: tuple[tuple[slice, Indices, Indices], ...]
    crosses: Array


@lru_cache(maxsize=256)
def _order_of(n_stages: int, n_micro_batches: int, vpp: int, *, trains: bool) -> _Order:
    lists = orders_of(n_stages, n_micro_batches, vpp, trains=trains)
    place: dict[Computation, int] = {}
    for steps in lists:
        for step in steps:
            place[step.computation] = len(place)
    none = len(place)
    before, feeds = np.full(none, none), np.full(none, none)
    chunks, micro_batches, is_backward = np.zeros(none, int), np.zeros(none, int), np.zeros(none, bool)
    for steps in lists:
        for i, step in enumerate(steps):
            at = place[step.computation]
            chunks[at], micro_batches[at] = step.chunk, step.micro_batch
            is_backward[at] = step.kind is StepKind.BACKWARD
            before[at] = place[steps[i - 1].computation] if i else none
            feeds[at] = none if step.source is None else place[step.source]
    waits = list(zip(before.tolist(), feeds.tolist(), strict=True))
    levels = [-1] * none + [0]
    stops = np.cumsum([0, *map(len, lists)]).tolist()
    done = stops[:-1]  # of each stage, the first computation that has no level
    while done != stops[1:]:
        for stage in range(n_stages):
            at = done[stage]
            while at < stops[stage + 1] and levels[waits[at][1]] >= 0:
                levels[at] = 1 + max(levels[waits[at][0]], levels[waits[at][1]])
                at += 1
            done[stage] = at
    level = np.array(levels)
    by_level = np.argsort(level[:none], kind="stable")
    new = np.append(np.empty(none, int), none)
    new[by_level] = np.arange(none)
    chunks, micro_batches, is_backward = chunks[by_level], micro_batches[by_level], is_backward[by_level]
    before, feeds = new[before[by_level]], new[feeds[by_level]]
    edges = np.searchsorted(level[:none][by_level], np.arange(1, level.max() + 2)).tolist()
    parts = [(slice(a, b), before[a:b], feeds[a:b]) for a, b in pairwise(edges)]
    crosses = np.where(feeds == none, 0.0, 1.0)
    return _Order(chunks, micro_batches, is_backward, tuple(parts), crosses)


def pipeline_seconds(
    forwards: Sequence[Array],
    backwards: Sequence[Array] | None,
    messages: Sequence[Array] | None = None,
    *,
    n_stages: int | None = None,
) -> Array:
    """Return the seconds of pipelines, from the first pass to the end of the last, in the engine's own order.

    Args:
        forwards: for each chunk [micro-batches, pipelines], seconds of a forward pass.
        backwards: the same of backward passes, in the order of (interleaved) 1F1B; None: there are none.
        messages: for each chunk but the last [micro-batches, pipelines], seconds of a message to the next, and of one
            back; None: they are free.
        n_stages: stages that share the chunks out in turn; as many as chunks by default.
    """
    n_chunks, (n_micro_batches, n_pipelines) = len(forwards), forwards[0].shape
    n_stages = n_stages or n_chunks
    if n_chunks == 1:
        total: Array = forwards[0].sum(axis=0)
        return total if backwards is None else total + backwards[0].sum(axis=0)
    if backwards is None and n_stages == n_chunks:
        return _forward_seconds(forwards, messages)
    order = _order_of(n_stages, n_micro_batches, n_chunks // n_stages, trains=backwards is not None)
    costs = np.stack([np.stack(passes) for passes in (forwards, backwards) if passes is not None])
    cost = costs[order.is_backward.astype(int), order.chunks, order.micro_batches]
    arrival = np.zeros_like(cost)
    if messages is not None:
        way = np.stack(messages)  # between the chunks i and i + 1
        link = np.where(order.is_backward, order.chunks, order.chunks - 1).clip(0, n_chunks - 2)
        arrival = way[link, order.micro_batches] * order.crosses[:, None]
    ends = np.zeros((len(cost) + 1, n_pipelines))
    for members, before, feeds in order.levels:
        fed = ends.take(feeds, 0)
        fed += arrival[members]
        np.maximum(fed, ends.take(before, 0), out=fed)
        np.add(fed, cost[members], out=ends[members])
    last: Array = ends.max(axis=0)
    return last


def _forward_seconds(forwards: Sequence[Array], messages: Sequence[Array] | None) -> Array:
    """Return the seconds of pipelines without backward passes, each of whose stages takes micro-batches in order.

    A stage that never waited would end micro-batch i after C_i seconds, all before it included. It ends it as much
    later as the largest wait up to i has it: max over j <= i of what j arrives after C_(j-1).
    """
    ends = np.cumsum(forwards[0], axis=0)
    for stage, costs in enumerate(forwards[1:]):
        arrivals = ends if messages is None else ends + messages[stage]
        unhindered = np.cumsum(costs, axis=0)
        ends = unhindered + np.maximum.accumulate(arrivals - (unhindered - costs), axis=0)
    last: Array = ends[-1]
    return last

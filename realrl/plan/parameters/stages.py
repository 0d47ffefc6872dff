"""Splitting blocks over pipeline stages, and over the chunks of virtual stages.

The blocks are cut into chunks 0, 1, ..., pp * vpp - 1; chunk k is on stage k mod pp. With vpp = 1 a stage is one chunk.

Invariants:
- the chunks are contiguous, not empty, and cover all blocks;
- no other such split has a cheaper dearest chunk;
- among those, none has a smaller sum of squared costs: no more even chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

from realrl.errors import AllocationError
from realrl.plan.parameters.adapters import is_adapter
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.specs import Layer, ParameterSpec
from realrl.shape import DecoderConfig

Stages = tuple[tuple[range, ...], ...]
"""For each pipeline stage its chunks of blocks, in the order in which they compute; all have equally many."""


def split_by_cost(blocks: Sequence[int], head: int, n_stages: int) -> tuple[range, ...]:
    """Return the blocks of each stage, in order.

    Takes time with the square of the number of blocks, for each stage.

    Args:
        blocks: the cost of each block; at least `n_stages`.
        head: additional cost of the last stage.
        n_stages: at least 1.
    """
    before = [0, *accumulate(blocks)]
    n_blocks = len(blocks)

    def cost(start: int, stop: int) -> int:
        return before[stop] - before[start] + (head if stop == n_blocks else 0)

    def solve(combine: Callable[[float, int], float], limit: float) -> list[list[tuple[float, int]]]:
        """Return ``[n][stop]``: value of the best n stages for the blocks below `stop`, and the last one's start."""
        table: list[list[tuple[float, int]]] = [[(0 if stop == 0 else math.inf, 0) for stop in range(n_blocks + 1)]]
        for n in range(1, n_stages + 1):
            row: list[tuple[float, int]] = [(math.inf, 0)]
            for stop in range(1, n_blocks + 1):
                starts = (start for start in range(n - 1, stop) if cost(start, stop) <= limit)
                values = ((combine(table[-1][start][0], cost(start, stop)), start) for start in starts)
                row.append(min(values, default=(math.inf, 0)))
            table.append(row)
        return table

    dearest = solve(max, math.inf)[n_stages][-1][0]
    table = solve(lambda total, stage: total + stage * stage, dearest)
    stages: list[range] = []
    stop = n_blocks
    for n in range(n_stages, 0, -1):
        start = table[n][stop][1]
        stages.append(range(start, stop))
        stop = start
    return tuple(reversed(stages))


@lru_cache(maxsize=512)
def stage_layers(config: DecoderConfig, pp: int, vpp: int = 1) -> Stages:
    """Return the chunks of each pipeline stage; see `stages_of`."""
    return stages_of(parameter_specs(config), pp, vpp)


def stage_of_layers(stages: Stages) -> dict[Layer, int]:
    """Return layer -> stage that has it; the embedding is on the first one, the head on the last."""
    stage_of: dict[Layer, int] = {"embedding": 0, "head": len(stages) - 1}
    for stage, chunks in enumerate(stages):
        for chunk in chunks:
            stage_of |= dict.fromkeys(chunk, stage)
    return stage_of


def stages_of(specs: Sequence[ParameterSpec], pp: int, vpp: int = 1) -> Stages:
    """Split the blocks over the chunks of `pp` stages with `vpp` chunks each, the dearest as cheap as possible.

    Raises:
        AllocationError: there are more chunks than blocks, or none.
    """
    n_layers = 1 + max(spec.layer for spec in specs if isinstance(spec.layer, int))
    if not 1 <= pp <= n_layers:
        raise AllocationError(
            f"pp={pp} does not fit a model of {n_layers} layer{'s' if n_layers > 1 else ''}: "
            "every pipeline stage needs a layer",
            remedy=f"The nearest legal pp is {min(max(pp, 1), n_layers)}.",
        )
    if pp * vpp > n_layers:
        most = n_layers // pp
        raise AllocationError(
            f"{vpp} virtual stages do not fit a model of {n_layers} layers on pp={pp}: each of the {pp * vpp} chunks "
            "needs a layer",
            remedy=f"The most that fit is {most}." if most > 1 else "Leave them out, or use fewer pipeline stages.",
        )
    chunks = chunks_of(specs, pp * vpp)
    return tuple(chunks[stage::pp] for stage in range(pp))


def chunks_of(specs: Sequence[ParameterSpec], n_chunks: int) -> tuple[range, ...]:
    """Split the blocks into chunks so that the dearest one is as cheap as possible.

    The cost of a block, and of the head on the last chunk, is the size of the matrices that a token meets; among
    experts only those that compute it count. Looking up the embedding is free, and so are adapters: a model has the
    same chunks with them and without. Among equal splits the one with the most even chunks is taken.

    Args:
        n_chunks: at least 1, and at most the number of blocks.
    """
    specs = [spec for spec in specs if not is_adapter(spec.name)]
    n_layers = 1 + max(spec.layer for spec in specs if isinstance(spec.layer, int))
    blocks = [0] * n_layers
    for spec in specs:
        if isinstance(spec.layer, int) and len(spec.shape) > 1:
            blocks[spec.layer] += spec.n_elements_per_token
    head = sum(spec.n_elements for spec in specs if "head" in spec.layers and len(spec.shape) > 1)
    if n_chunks > 1 and len(set(blocks)) > 1:
        return split_by_cost(blocks, head, n_chunks)
    block = blocks[0]

    def sizes(n_last: int) -> list[int]:
        share, extra = divmod(n_layers - n_last, n_chunks - 1)
        return [share + (stage >= n_chunks - 1 - extra) for stage in range(n_chunks - 1)] + [n_last]

    def cost(n_last: int) -> tuple[int, int]:
        costs = [size * block for size in sizes(n_last)]
        costs[-1] += head
        return max(costs), sum(c * c for c in costs)

    best = sizes(min(range(1, n_layers - n_chunks + 2), key=cost)) if n_chunks > 1 else [n_layers]
    ends = [sum(best[:stage]) for stage in range(n_chunks + 1)]
    return tuple(range(ends[stage], ends[stage + 1]) for stage in range(n_chunks))

"""Splitting blocks over pipeline stages.

Invariants:
- the stages are contiguous, not empty, and cover all blocks;
- no other such split has a cheaper dearest stage;
- among those, none has a smaller sum of squared costs: no more even stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

from realrl.errors import AllocationError
from realrl.plan.parameters.adapters import is_adapter
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.specs import ParameterSpec
from realrl.shape import DecoderConfig


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
def stage_layers(config: DecoderConfig, pp: int) -> tuple[range, ...]:
    """Return the blocks of each pipeline stage; see `stages_of`."""
    return stages_of(parameter_specs(config), pp)


def stages_of(specs: Sequence[ParameterSpec], pp: int) -> tuple[range, ...]:
    """Split the blocks over stages so that the dearest stage is as cheap as possible.

    The cost of a block, and of the head on the last stage, is the size of the matrices that a token meets; among
    experts only those that compute it count. Looking up the embedding is free, and so are adapters: a model has the
    same stages with them and without. Among equal splits the one with the most even stages is taken.

    Raises:
        AllocationError: there are more stages than blocks, or none.
    """
    specs = [spec for spec in specs if not is_adapter(spec.name)]
    n_layers = 1 + max(spec.layer for spec in specs if isinstance(spec.layer, int))
    if not 1 <= pp <= n_layers:
        raise AllocationError(
            f"pp={pp} does not fit a model of {n_layers} layer{'s' if n_layers > 1 else ''}: "
            "every pipeline stage needs a layer",
            remedy=f"The nearest legal pp is {min(max(pp, 1), n_layers)}.",
        )
    blocks = [0] * n_layers
    for spec in specs:
        if isinstance(spec.layer, int) and len(spec.shape) > 1:
            blocks[spec.layer] += spec.n_elements_per_token
    head = sum(spec.n_elements for spec in specs if "head" in spec.layers and len(spec.shape) > 1)
    if pp > 1 and len(set(blocks)) > 1:
        return split_by_cost(blocks, head, pp)
    block = blocks[0]

    def sizes(n_last: int) -> list[int]:
        share, extra = divmod(n_layers - n_last, pp - 1)
        return [share + (stage >= pp - 1 - extra) for stage in range(pp - 1)] + [n_last]

    def cost(n_last: int) -> tuple[int, int]:
        costs = [size * block for size in sizes(n_last)]
        costs[-1] += head
        return max(costs), sum(c * c for c in costs)

    best = sizes(min(range(1, n_layers - pp + 2), key=cost)) if pp > 1 else [n_layers]
    ends = [sum(best[:stage]) for stage in range(pp + 1)]
    return tuple(range(ends[stage], ends[stage + 1]) for stage in range(pp))

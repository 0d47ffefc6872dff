"""Splitting blocks of unlike cost over pipeline stages.

Invariants:
- the stages are contiguous, not empty, and cover all blocks;
- no other such split has a cheaper dearest stage;
- among those, none has a smaller sum of squared costs: no more even stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate


def split_by_cost(blocks: Sequence[int], head: int, n_stages: int) -> tuple[range, ...]:
    """The blocks of each stage, in order.

    Takes time with the square of the number of blocks, for each stage.

    Args:
        blocks: the cost of each block; at least `n_stages`.
        head: what the last stage costs in addition.
        n_stages: at least 1.
    """
    before = [0, *accumulate(blocks)]
    n_blocks = len(blocks)

    def cost(start: int, stop: int) -> int:
        return before[stop] - before[start] + (head if stop == n_blocks else 0)

    def solve(combine: Callable[[float, int], float], limit: float) -> list[list[tuple[float, int]]]:
        """``[n][stop]``: value of the best n stages that cover the blocks below `stop`, and where the last starts."""
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

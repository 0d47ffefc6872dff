"""Random permutations that are functions of a key: equal on every platform and Python version."""

from __future__ import annotations

import random
from collections.abc import Callable


def keyed_draw(*key: int | str) -> Callable[[], float]:
    """Return a source of uniform numbers in [0, 1) that `key` alone determines.

    It is `random.Random.random`, whose sequence for a given seed Python promises to keep across versions; it makes no
    such promise for `shuffle`.
    """
    return random.Random("/".join(map(str, key))).random


def permutation(n: int, draw: Callable[[], float]) -> list[int]:
    """Return 0..n-1 in random order: a Fisher-Yates shuffle that takes n - 1 numbers from `draw`."""
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        j = int(draw() * (i + 1))
        order[i], order[j] = order[j], order[i]
    return order

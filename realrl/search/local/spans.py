"""Ranks of meshes beside each other: which are allowed, and which stretches of ranks they cover."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np

from realrl.mesh.device_mesh import Cluster
from realrl.search.space import Span, relation, segments_of


def nests(one: Span, other: Span, node: int) -> bool:
    """Return True if two meshes share no devices, or one is a part of the other that a mesh may be."""
    is_apart = one[1] <= other[0] or other[1] <= one[0]
    return is_apart or relation(one, other, node) in ("same", "inside", "around")


def is_legal(span: Span, others: Iterable[Span], cluster: Cluster) -> bool:
    """Return True if a mesh may lie there, and nests with all others."""
    (start, end), node = span, cluster.n_devices_per_node
    size = end - start
    if start < 0 or end > cluster.n_devices or start % node % min(size, node):
        return False
    if size < node and start // node != (end - 1) // node:
        return False
    return all(nests(span, other, node) for other in others)


def random_start(cluster: Cluster, size: int, rng: random.Random) -> int:
    """Return the first rank of a random mesh of so many devices."""
    node = cluster.n_devices_per_node
    if size >= node:
        return node * rng.randrange(cluster.n_nodes - size // node + 1)
    return node * rng.randrange(cluster.n_nodes) + size * rng.randrange(node // size)


def covered_by(spans: Sequence[Span], span: Span) -> tuple[np.ndarray, slice]:
    """Return which spans cover each stretch of ranks, [stretches, spans], and the stretches of one span more."""
    bounds, segments = segments_of([*spans, span])
    covers = np.zeros((len(bounds), len(spans)), dtype=bool)
    for number, stretch in enumerate(segments[:-1]):
        covers[stretch.start : stretch.stop, number] = True
    return covers, slice(segments[-1].start, segments[-1].stop)


def most_kept(spans: Sequence[Span], kept: np.ndarray, span: Span) -> float:
    """Return the most bytes that calls on `spans`, which keep so many, keep together on a device of one span more."""
    covers, inside = covered_by(spans, span)
    return float((covers @ kept)[inside].max(initial=0.0))

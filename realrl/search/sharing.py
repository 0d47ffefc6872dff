"""Devices of a node that share cores, caches or memory, in the fast model: as `realrl.sim.contention` has them.

A price holds for a node whose devices all compute. A call is faster by what its devices gain while the others of their
nodes wait, and who waits is known after a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from realrl.mesh.device_mesh import Cluster
from realrl.sim.costs.flops import Array

Bar = tuple[int, float, float]
"""A call, its start and its end; a call's bars, and those of calls that share devices, do not overlap."""


def waiting_shares(bars: Sequence[Bar], spans: Sequence[tuple[int, int]], cluster: Cluster) -> list[float]:
    """Return for each call the share of its time in which the other devices of its nodes wait, on average.

    Args:
        spans: ranks of each call, from the first up to the one behind the last.
    """
    size = cluster.n_devices_per_node
    edges = sorted({*range(0, cluster.n_devices + 1, size), *(edge for span in spans for edge in span)})
    pieces = [*pairwise(edges)]  # of nodes, whose devices have the same calls
    counts = np.array([end - start for start, end in pieces])
    has = np.array([[first <= start and end <= last for start, end in pieces] for first, last in spans])
    in_node = np.array([start // size for start, _ in pieces])[:, None] == np.arange(cluster.n_nodes)
    calls = np.array([call for call, _, _ in bars])
    times = np.array([bar[1:] for bar in bars])  # [bars, 2]
    lengths = times[:, 1] - times[:, 0]
    idle = np.stack([lengths - _used(times, times[has[calls, piece]]) for piece in range(len(pieces))], axis=1)
    own = (has * counts) @ in_node  # [calls, nodes], devices
    free = (idle * counts * ~has[calls]) @ in_node  # [bars, nodes], device-seconds
    waited = np.bincount(calls, (own[calls] * free).sum(axis=1), len(spans))
    possible = np.bincount(calls, lengths * own[calls].sum(axis=1) * (size - 1), len(spans))
    shares: list[float] = np.clip(waited / np.where(possible > 0, possible, np.inf), 0.0, 1.0).tolist()
    return shares


def _used(times: Array, busy: Array) -> Array:
    """Return the seconds of each interval in which a device is busy, [intervals]."""
    if not len(busy):
        return np.zeros(len(times))
    edges = np.sort(busy, axis=0).reshape(-1)
    steps = np.diff(edges, prepend=edges[:1])
    steps[::2] = 0.0
    used: Array = np.diff(np.interp(times, edges, np.cumsum(steps)), axis=1)[:, 0]
    return used

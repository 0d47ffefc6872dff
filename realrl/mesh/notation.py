"""Strategies and allocations as text.

strategy    = size { size } [ "s" ]              d4t1p2   t2d2   d8s      missing sizes are 1; s = sequence parallel
size        = ("d" | "t" | "p" | "v") number     each letter at most once, in any order; v = virtual stages of each p
mesh        = node ":" device [ "-" device ]     0:0-7    0:3             devices of one node
            | node [ "-" node ]                  0-1      2               whole nodes
allocation  = strategy "@" mesh                  d4t1p2@0:0-7             d16@0-1
"""

from __future__ import annotations

import re

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy, nearest_mesh

_SIZE = re.compile(r"([dtpv])(\d{1,9})", re.ASCII)
_MESH = re.compile(r"(\d{1,9})(?P<on_node>:(\d{1,9}))?(-(\d{1,9}))?", re.ASCII)
_GRAMMAR = "Write a strategy like d4t1p2: data, tensor and pipeline parallel sizes, each at most once."
_MESH_GRAMMAR = "Write a mesh like 0:0-7 (node 0, devices 0 to 7), 0:3 (one device) or 0-1 (whole nodes)."


def parse_strategy(text: str) -> ParallelStrategy:
    """Read ``"d4t1p2"``: letters d, t, p and v in any order, each at most once, a missing one is 1; a last ``s`` sets
    `sp`.

    Raises:
        AllocationError: the text is no strategy; the message shows where it stops being one.
    """
    sizes: dict[str, int] = {}
    position = 0
    while match := _SIZE.match(text, position):
        letter, number = match[1], int(match[2])
        if letter in sizes:
            raise AllocationError(f"strategy '{text}' gives '{letter}' twice", remedy=_GRAMMAR)
        if number < 1:
            raise AllocationError(f"strategy '{text}' gives '{letter}' the size {number}", remedy="The least is 1.")
        sizes[letter] = number
        position = match.end()
    rest = text[position:]
    if not sizes or rest not in ("", "s"):
        where = f" at {rest!r}" if sizes else ""
        raise AllocationError(f"'{text}' is not a parallel strategy{where}", remedy=_GRAMMAR)
    d, t, p, v = (sizes.get(letter, 1) for letter in "dtpv")
    return ParallelStrategy(d, t, p, sp=rest == "s", vpp=v)


def parse_mesh(text: str, cluster: Cluster) -> DeviceMesh:
    """Read ``"0:0-7"`` or ``"0:3"`` (devices of one node), ``"0-1"`` or ``"2"`` (whole nodes).

    Raises:
        AllocationError: the text is no mesh, or not a legal one of this cluster; names the nearest legal one.
    """
    match = _MESH.match(text)
    if match is None or match.end() != len(text):
        where = f" at {text[match.end() :]!r}" if match else ""
        raise AllocationError(f"'{text}' is not a device mesh{where}", remedy=_MESH_GRAMMAR)
    if match["on_node"]:
        node, first = int(match[1]), int(match[3])
        last = first if match[5] is None else int(match[5])
        n_there, what = cluster.n_devices_per_node, "device"
    else:
        node, first = 0, int(match[1])
        last = first if match[5] is None else int(match[5])
        n_there, what = cluster.n_nodes, "node"
    if last < first:
        raise AllocationError(f"mesh '{text}' ends before it starts", remedy=f"Did you mean {last}-{first}?")
    if node >= cluster.n_nodes or last >= n_there:
        raise AllocationError(
            f"mesh '{text}' lies outside the cluster, which has {cluster}",
            remedy=f"The nearest mesh is '{_nearest_inside(cluster, node, first, last, what)}'.",
            mesh=text,
        )
    if what == "node":
        return DeviceMesh.of_nodes(cluster, first, last)
    return DeviceMesh.of_devices(cluster, node, first, last)


def parse_allocation(text: str, cluster: Cluster) -> Allocation:
    """Read ``"d4t1p2@0:0-7"``: a strategy at a mesh.

    Raises:
        AllocationError: a part cannot be read, the mesh is not one of the cluster, or the sizes do not multiply to
            the number of its devices.
    """
    strategy, at, mesh = text.partition("@")
    if not at:
        raise AllocationError(f"allocation '{text}' has no '@' and mesh", remedy=f"{_MESH_GRAMMAR} Example: d2@0:0-1.")
    return Allocation(parse_mesh(mesh, cluster), parse_strategy(strategy))


def _nearest_inside(cluster: Cluster, node: int, first: int, last: int, what: str) -> DeviceMesh:
    """The legal mesh closest to a span of devices or nodes that reaches out of the cluster."""
    if what == "node":
        last = min(last, cluster.n_nodes - 1)
        return DeviceMesh.of_nodes(cluster, min(first, last), last)
    size = cluster.n_devices_per_node
    n_devices = min(last - first + 1, size)
    start = min(node, cluster.n_nodes - 1) * size + min(first, size - n_devices)
    return nearest_mesh(cluster, tuple(range(start, start + n_devices)))

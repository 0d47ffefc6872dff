"""Seconds of moving parameters and rows: by the bytes of the planners, over the links that they take.

Invariants of `realloc_seconds`:
    - a reallocation takes at least the bytes of its busiest rank, in the busier direction, over that rank's link, and
      at least the bytes of its busiest node over the node's network cards;
    - one that moves nothing takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from realrl.mesh.device_mesh import Allocation, ParallelStrategy
from realrl.plan.memory.buffers import REALLOC_BUCKET, REALLOC_ROUNDS
from realrl.plan.memory.plan import layout_of
from realrl.plan.parameters.realloc import ReallocPlan, plan_realloc
from realrl.plan.samples.transfer import Pull, RowTransfer, pulls_of
from realrl.shape import DecoderConfig
from realrl.sim.durations import SampleSizes
from realrl.sim.hardware import Hardware, Link

ROW_BYTES = 8.0  # of one token in one key: token ids are int64, log-probabilities and values half of it


@lru_cache(maxsize=512)
def realloc_of(model: DecoderConfig, source: Allocation, target: Allocation) -> ReallocPlan:
    """Return the plan by which parameters move between two allocations."""
    node_of = target.mesh.cluster.node_of
    return plan_realloc(layout_of(model, source), layout_of(model, target), node_of=node_of)


def realloc_seconds(plan: ReallocPlan, hardware: Hardware, node_of: Callable[[int], int]) -> float:
    """Return the seconds from the start of a reallocation to the end of its last rank."""
    links = hardware.links
    inside: dict[int, tuple[int, int]] = {}
    crossing: dict[int, tuple[int, int]] = {}
    for rank in plan.ranks:
        crossing[rank] = plan.bytes_from_other_nodes(rank), plan.bytes_to_other_nodes(rank)
        inside[rank] = plan.bytes_received(rank) - crossing[rank][0], plan.bytes_sent(rank) - crossing[rank][1]
    seconds = max(_busiest(inside, links.device, node_of), _busiest(crossing, links.node, node_of))
    if not seconds:
        return 0.0
    busiest = max(max(plan.bytes_received(rank), plan.bytes_sent(rank)) for rank in plan.ranks)
    n_rounds = math.ceil(busiest / REALLOC_BUCKET) + (REALLOC_ROUNDS if plan.has_relays else 0)
    link = links.node if plan.bytes_between_nodes else links.device
    ends = plan.source_layout, plan.target_layout
    tensors = tensor_seconds(len(ends[0].specs), [end.strategy for end in ends], hardware)
    return seconds + n_rounds * link.latency_s + tensors


def tensor_seconds(n_tensors: int, strategies: Iterable[ParallelStrategy], hardware: Hardware) -> float:
    """Return the seconds in which ranks pack and unpack a model's tensors: those of a stage of each layout."""
    return hardware.device.tensor_s * sum(n_tensors / strategy.pp for strategy in strategies)


def _busiest(n_bytes: Mapping[int, tuple[int, int]], link: Link, node_of: Callable[[int], int]) -> float:
    """Return the seconds of the rank, or of the node, that has the most bytes in one direction."""
    most = max(max(both) for both in n_bytes.values()) / link.speed()
    if link.sharing is None:
        return most
    nodes: dict[int, list[int]] = {}
    for rank, (received, sent) in n_bytes.items():
        total = nodes.setdefault(node_of(rank), [0, 0])
        total[0] += received
        total[1] += sent
    return max(most, max(max(total) for total in nodes.values()) / (link.speed() * link.sharing))


def copy_seconds(n_bytes: float, n_active: int, hardware: Hardware) -> float:
    """Return the seconds of a copy between a device and host memory, while so many devices of a node copy."""
    host = hardware.links.host
    return host.latency_s + n_bytes / host.speed(n_active) if n_bytes else 0.0


class RowBytes:
    """Bytes of the rows of transfers.

    Args:
        sizes: sample -> its tokens.
    """

    def __init__(self, sizes: Mapping[str, SampleSizes]) -> None:
        self._sizes = sizes
        self._found: dict[tuple[str, ...], float] = {}

    def __call__(self, transfer: RowTransfer | Pull) -> float:
        """Return the bytes of one key."""
        n_bytes = self._found.get(transfer.ids)
        if n_bytes is None:
            n_bytes = ROW_BYTES * sum([sum(self._sizes[sample_id].tokens) for sample_id in transfer.ids])
            self._found[transfer.ids] = n_bytes
        return n_bytes


def pull_seconds(transfers: Iterable[RowTransfer], bytes_of: RowBytes, hardware: Hardware) -> float:
    """Return the seconds in which a rank pulls rows over sockets, one pull after the other."""
    seconds = 0.0
    for pull in pulls_of(transfers):
        n_keys = len(pull.keys)
        seconds += hardware.host.pull_seconds(n_keys * len(pull.ids), n_keys * bytes_of(pull))
    return seconds


def exchange_seconds(
    transfers: Iterable[RowTransfer], bytes_of: RowBytes, hardware: Hardware, node_of: Callable[[int], int]
) -> float:
    """Return the seconds in which a rank sends or receives rows by collectives, all of one direction."""
    seconds = latency = 0.0
    for transfer in transfers:
        is_far = node_of(transfer.source) != node_of(transfer.target)
        link = hardware.links.node if is_far else hardware.links.device
        seconds += bytes_of(transfer) / link.speed()
        latency = max(latency, link.latency_s)
    return seconds + latency

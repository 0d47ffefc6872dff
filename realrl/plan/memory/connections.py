"""Memory of a device that torch's allocator does not see: the CUDA context, and NCCL's connections to other devices.

Sizes are those of NVLink machines with eight H100, where they are largest; NCCL opens fewer channels over PCIe.

- The context of a process holds its kernels, which are loaded when they are first used: 0.3 GB to 0.5 GB
  (github.com/pytorch/pytorch/issues/107667).
- A channel's connection to one peer has a buffer for each protocol: 8 steps of 512 threads' 8 lines of 16 bytes (LL), 8
  of 640 threads' 120 words of 8 bytes (LL128), and NCCL_BUFFSIZE, 4 MiB (Simple). That is 9.2 MiB, which an
  allocation rounds up to 10 MiB, and 2 MiB for flags (NCCL 2.28, src/init.cc, src/transport/p2p.cc).
- A communicator connects the rings of its collectives when it is first used (NCCL_RUNTIME_CONNECT), and does not share
  them with the one that it was split from (NCCL_COMM_SPLIT_SHARE_RESOURCES). A ring has one connection in each channel.
- Messages between two ranks use 32 channels, which all are connected by the first message, and are kept
  (github.com/NVIDIA/nccl/issues/1685: 3.3 GB for seven peers). Between nodes one buffer serves all peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations

from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation
from realrl.plan.groups import GroupKind, ProcessGroup
from realrl.plan.hooks import Realloc
from realrl.plan.memory.plan import CallState, RoleState, layout_of
from realrl.plan.parameters.realloc import plan_realloc
from realrl.shape import DecoderConfig

CUDA_CONTEXT = 512 << 20
CONNECTION = 12 << 20  # bytes of one channel's connection
RING_CHANNELS = 24
MESSAGE_CHANNELS = 32
_WITH_COLLECTIVES = (GroupKind.PP, GroupKind.TP, GroupKind.DP, GroupKind.TIED)

Pair = tuple[frozenset[int], frozenset[int]]
"""The members of a communicator, and two of them that send each other messages."""


def connection_bytes(
    groups: Sequence[ProcessGroup],
    roles: Mapping[str, RoleState],
    calls: Sequence[CallState],
    *,
    node_of: Callable[[int], int],
    any_rows: bool,
) -> dict[int, int]:
    """Return rank -> bytes of NCCL's connections, once every call has run, every row moved and every role been saved.

    Args:
        groups: process groups of the run; the first holds all ranks.
        any_rows: rows of samples may move between any two ranks, as they do on the collective plane.
    """
    rings = {frozenset(group.ranks) for group in groups if group.n_ranks > 1 and group.kind in _WITH_COLLECTIVES}
    world = frozenset(groups[0].ranks)
    between = _in_node(sorted(world), node_of) if any_rows else _in_world(roles, calls, node_of)
    pairs = {(world, frozenset(pair)) for pair in between}
    pairs |= {(members, pair) for members, pair in _in_groups(groups, calls) if len({*map(node_of, pair)}) == 1}
    n_rings = Counter(rank for members in rings for rank in members)
    n_pairs = Counter(rank for _, pair in pairs for rank in pair)
    return {
        rank: CONNECTION * (RING_CHANNELS * n_rings[rank] + MESSAGE_CHANNELS * n_pairs[rank]) for rank in sorted(world)
    }


def _in_node(ranks: Iterable[int], node_of: Callable[[int], int]) -> Iterator[tuple[int, ...]]:
    """Yield the pairs of ranks that are on one node, the smaller rank first."""
    on_node: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        on_node.setdefault(node_of(rank), []).append(rank)
    for members in on_node.values():
        yield from combinations(members, 2)


def _in_world(
    roles: Mapping[str, RoleState], calls: Sequence[CallState], node_of: Callable[[int], int]
) -> Iterator[tuple[int, ...]]:
    """Yield the pairs of a node between which parameters move, or rows inside the replicas of a call."""
    for allocation in dict.fromkeys(call.allocation for call in calls):
        for dp_rank in range(allocation.strategy.dp):
            yield from _in_node(allocation.dp_group_members(dp_rank), node_of)
    for call in calls:
        for hook in (*call.hooks.before, *call.hooks.after):
            if not isinstance(hook, Realloc) or hook.source not in roles:
                continue
            yield from moving_pairs(roles[hook.source].model, hook.source_allocation, hook.target_allocation)


@lru_cache(maxsize=128)  # a search asks for the same moves again and again
def moving_pairs(model: DecoderConfig, home: Allocation, target: Allocation) -> frozenset[tuple[int, int]]:
    """Return the pairs of a node between which the parameters of a role move."""
    source, node_of = layout_of(model, home), home.mesh.cluster.node_of
    plan = plan_realloc(source, layout_of(model, target), node_of=node_of)
    first = home.ranks[0]  # which sends the state of interfaces to ranks outside the home
    pairs = [*plan.pairs, *((first, rank) for rank in target.ranks if rank not in source)]
    return frozenset(pair for pair in pairs if node_of(pair[0]) == node_of(pair[1]))


def _in_groups(groups: Iterable[ProcessGroup], calls: Sequence[CallState]) -> Iterator[Pair]:
    """Yield pairs of neighbouring stages, and those of a rank that collects slices of a model that is saved."""
    saved = {(c.allocation.mesh, c.allocation.strategy.tp) for c in calls if c.kind is InterfaceType.TRAIN_STEP}
    for group in groups:
        first, *others = group.ranks
        pairs: list[tuple[int, int]] = []
        if group.kind is GroupKind.PP or (group.kind is GroupKind.TP and (group.mesh, group.n_ranks) in saved):
            pairs += [(first, other) for other in others]
        if group.kind is GroupKind.PP:
            pairs += zip(group.ranks, others, strict=False)
        yield from ((frozenset(group.ranks), frozenset(pair)) for pair in pairs)

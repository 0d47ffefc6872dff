"""Transfer protocols: the division of a call's samples over the ranks of its mesh, and the keepers of its output.

A protocol is a named pair of pure functions. `distribute` assigns samples to ranks; `collect` assigns each sample's
output to the rank that keeps it. A call names its protocol in `MFCDef.protocol`:

| name | each rank gets | output is kept by |
|---|---|---|
| `3D_PROTO` | its data-parallel slice; tp and pp ranks the same | tp rank 0 of the last stage, its slice |
| `DP_PROTO` | a slice of its own, as if dp were the number of devices | every rank, its slice |
| `ALL_TO_ALL` | as `DP_PROTO`, but consecutive samples as given, not balanced by tokens | every rank, its slice |
| `ONE_TO_ALL` | everything | every rank, an equal part |
| `3D_PP_ONLY` | everything | tp and dp rank 0 of every stage, an equal part |
| `3D_ALL_MICRO_DP` | as `3D_PROTO`; a slice of the home stays with the replicas inside of it | as `3D_PROTO` |

A train_step asks its protocol once, with one sample for each round of minibatches: see `realrl.plan.minibatches`.

The names are those of HybridFlow (Sheng et al., "HybridFlow: A Flexible and Efficient RLHF Framework", 2024, table 3).
There, a controller concatenates collected output; here, samples have ids and stay with the rank that keeps them, so
"collect from all" means that all take part and every sample is still kept once.

Invariants of every registered protocol, asserted by `check_protocol`:
    - a rank of the mesh is in exactly one share, and no other rank is in any;
    - every sample is in some share;
    - every sample is kept by exactly one rank, which is one that got it: distribute, then collect is the identity;
    - equal arguments give equal results.
Shares of the built-in ones are empty only where there are fewer samples than slices.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from realrl.definitions import definition_of
from realrl.errors import AllocationError, GraphError, RunError, did_you_mean
from realrl.graph.mfc import DEFAULT_PROTOCOL, add_protocol_name
from realrl.mesh.device_mesh import Allocation
from realrl.plan.samples.partition import partition_balanced
from realrl.plan.samples.transfer import Share


@dataclass(frozen=True)
class CallLayout:
    """Layout of a call, as far as protocols are concerned.

    Attributes:
        home: allocation of its role's parameters; None for a role without any.
        equal_count: data-parallel ranks get the same number of samples, up to one, instead of tokens.
    """

    allocation: Allocation
    home: Allocation | None = None
    equal_count: bool = False


Distribute = Callable[[Sequence[str], Sequence[int], CallLayout], Sequence[Share]]
"""``distribute(ids, token_counts, layout)`` -> shares of the ranks; ids in the order given."""

Collect = Callable[[Sequence[Share], CallLayout], Mapping[int, tuple[str, ...]]]
"""``collect(shares, layout)`` -> global rank -> samples whose output it keeps; one that keeps none may be absent."""


@dataclass(frozen=True)
class TransferProtocol:
    """A registered pair."""

    name: str
    distribute: Distribute
    collect: Collect


def register_protocol(name: str, distribute: Distribute, collect: Collect) -> None:
    """Make a protocol known, so that an `MFCDef` can name it; every process of a run must do it, best on import.

    Raises:
        GraphError: the name is taken by other functions.
    """
    known = _PROTOCOLS.get(name)
    new = [definition_of(distribute), definition_of(collect)]
    if known is not None and [definition_of(known.distribute), definition_of(known.collect)] != new:
        raise GraphError(f"there is a transfer protocol '{name}' already", remedy="Choose another name.")
    _PROTOCOLS[name] = TransferProtocol(name, distribute, collect)
    add_protocol_name(name)


def transfer_protocol(name: str) -> TransferProtocol:
    """Return the protocol of that name.

    Raises:
        GraphError: it is not registered.
    """
    if name not in _PROTOCOLS:
        raise GraphError(
            f"there is no transfer protocol '{name}'",
            remedy=f"Protocols: {', '.join(_PROTOCOLS)}.{did_you_mean(name, _PROTOCOLS)}",
        )
    return _PROTOCOLS[name]


def check_protocol(
    shares: Sequence[Share], kept: Mapping[int, tuple[str, ...]], ids: Sequence[str], mesh: Sequence[int]
) -> None:
    """Check the invariants above on one result.

    Raises:
        ValueError: names the first one that does not hold.
    """
    ranks = Counter(rank for share in shares for rank in share.ranks)
    if sorted(ranks) != sorted(mesh) or max(ranks.values()) > 1:
        raise ValueError("its shares do not name every rank of the mesh once")
    given = {rank: set(share.ids) for share in shares for rank in share.ranks}
    if set().union(*given.values()) != set(ids):
        raise ValueError("its shares do not hold exactly the samples that were given")
    if sorted(sample_id for kept_ids in kept.values() for sample_id in kept_ids) != sorted(ids):
        raise ValueError("it does not keep every sample once")
    for rank, kept_ids in kept.items():
        if not given.get(rank, set()).issuperset(kept_ids):
            raise ValueError(f"rank {rank} keeps a sample that it does not get")


def divide(
    name: str, ids: Sequence[str], token_counts: Sequence[int], layout: CallLayout, *, call: str
) -> tuple[Sequence[Share], Mapping[int, tuple[str, ...]]]:
    """Divide one batch of a call by a protocol; return the shares, and rank -> samples that it keeps.

    Raises:
        RunError: a registered protocol raises, or does not keep its promises with this batch; names its file and line.
    """
    protocol = transfer_protocol(name)
    try:
        shares = protocol.distribute(ids, token_counts, layout)
        kept = protocol.collect(shares, layout)
        if name not in _BUILT_IN:
            check_protocol(shares, kept, ids, layout.allocation.ranks)
        return shares, kept
    except Exception as err:  # functions of the user may raise anything
        if name in _BUILT_IN:
            raise
        place = traceback.extract_tb(err.__traceback__)[-1]
        is_broken_promise = isinstance(err, ValueError) and place.filename == __file__
        problem = str(err) if is_broken_promise else f"{err!r}, raised at {place.filename}:{place.lineno}"
    raise RunError(
        f"transfer protocol '{name}' failed on {len(ids)} samples for {layout.allocation}: {problem}",
        remedy="See the invariants in realrl.plan.protocols, or use 3D_PROTO.",
        call=call,
        mesh=str(layout.allocation.mesh),
    )


def slices_of(name: str, layout: CallLayout) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that get the same samples, when there are as many equal samples as devices.

    Raises:
        AllocationError: the protocol does not fit the layout, or a registered one does not keep its promises.
    """
    protocol = transfer_protocol(name)
    ids = tuple(f"sample {i}" for i in range(layout.allocation.mesh.n_devices))
    shares = protocol.distribute(ids, [1] * len(ids), layout)
    try:
        check_protocol(shares, protocol.collect(shares, layout), ids, layout.allocation.ranks)
    except ValueError as err:
        raise AllocationError(
            f"transfer protocol '{name}' does not work on {layout.allocation}: {err}",
            remedy="See the invariants in realrl.plan.protocols, or use 3D_PROTO.",
            mesh=str(layout.allocation.mesh),
        ) from None
    groups: dict[tuple[str, ...], tuple[int, ...]] = {}
    for share in shares:
        groups[share.ids] = groups.get(share.ids, ()) + share.ranks
    return tuple(groups.values())


# ---------------------------------------------------------------- the built-in ones


def _split(
    ids: Sequence[str], token_counts: Sequence[int], groups: Sequence[tuple[int, ...]], *, equal_count: bool
) -> list[Share]:
    parts = partition_balanced(token_counts, len(groups), equal_count=equal_count)
    return [Share(ranks, tuple([ids[i] for i in part])) for ranks, part in zip(groups, parts, strict=True)]


def _split_over_dp(ids: Sequence[str], token_counts: Sequence[int], layout: CallLayout) -> list[Share]:
    return _split(ids, token_counts, layout.allocation.dp_groups, equal_count=layout.equal_count)


def _split_over_ranks(ids: Sequence[str], token_counts: Sequence[int], layout: CallLayout) -> list[Share]:
    groups = [(rank,) for rank in layout.allocation.ranks]
    return _split(ids, token_counts, groups, equal_count=layout.equal_count)


def _split_as_given(ids: Sequence[str], token_counts: Sequence[int], layout: CallLayout) -> list[Share]:
    ranks = layout.allocation.ranks
    return [Share((rank,), part) for rank, part in zip(ranks, _equal_parts(ids, len(ranks)), strict=True)]


def _give_all(ids: Sequence[str], token_counts: Sequence[int], layout: CallLayout) -> list[Share]:
    return [Share(layout.allocation.ranks, tuple(ids))]


def _split_over_micro_dp(ids: Sequence[str], token_counts: Sequence[int], layout: CallLayout) -> list[Share]:
    """Split over the slices of the home first, then over the replicas of the call that lie inside each."""
    replicas_in = _micro_dp_groups(layout)
    if not replicas_in:
        return _split_over_dp(ids, token_counts, layout)
    shares: list[Share] = []
    # Equal counts: a slice then has a sample for each of its replicas whenever there are enough in all.
    for members, part in zip(replicas_in, partition_balanced(token_counts, len(replicas_in), equal_count=True)):
        counts = [token_counts[i] for i in part]
        shares += _split([ids[i] for i in part], counts, members, equal_count=layout.equal_count)
    return shares


def _micro_dp_groups(layout: CallLayout) -> list[list[tuple[int, ...]]]:
    """Return, by slice of the home, the ranks of each of the call's replicas inside of it; empty without a home.

    Raises:
        AllocationError: the two layouts are not nested.
    """
    allocation, home = layout.allocation, layout.home
    if home is None:
        return []
    replicas = allocation.dp_groups
    found = [[ranks for ranks in replicas if set(ranks) <= set(members)] for members in home.dp_groups]
    if home.mesh != allocation.mesh or sum(map(len, found)) != len(replicas):
        raise AllocationError(
            f"protocol 3D_ALL_MICRO_DP needs replicas of {allocation} that lie inside the data-parallel slices of the "
            f"role's home {home}",
            remedy="Use 3D_PROTO, or strategies on one mesh where each tp and pp of the call divides the home's.",
            mesh=str(allocation.mesh),
        )
    return found


def _keep_on_last_stage(shares: Sequence[Share], layout: CallLayout) -> dict[int, tuple[str, ...]]:
    allocation = layout.allocation
    keepers = {allocation.output_rank(dp_rank) for dp_rank in range(allocation.strategy.dp)}
    return {rank: share.ids for share in shares for rank in share.ranks if rank in keepers}


def _keep_own(shares: Sequence[Share], layout: CallLayout) -> dict[int, tuple[str, ...]]:
    return {rank: share.ids for share in shares for rank in share.ranks}


def _keep_equal_parts(shares: Sequence[Share], layout: CallLayout) -> dict[int, tuple[str, ...]]:
    ranks, ids = layout.allocation.ranks, shares[0].ids
    return dict(zip(ranks, _equal_parts(ids, len(ranks)), strict=True))


def _keep_on_every_stage(shares: Sequence[Share], layout: CallLayout) -> dict[int, tuple[str, ...]]:
    allocation = layout.allocation
    leaders = [
        allocation.ranks[allocation.strategy.mesh_rank(pp_rank=pp_rank, dp_rank=0, tp_rank=0)]
        for pp_rank in range(allocation.strategy.pp)
    ]
    return dict(zip(leaders, _equal_parts(shares[0].ids, len(leaders)), strict=True))


def _equal_parts(ids: Sequence[str], n_parts: int) -> list[tuple[str, ...]]:
    """Return consecutive parts whose sizes differ by at most one."""
    ends = [part * len(ids) // n_parts for part in range(n_parts + 1)]
    return [tuple(ids[ends[part] : ends[part + 1]]) for part in range(n_parts)]


_PROTOCOLS: dict[str, TransferProtocol] = {}
register_protocol(DEFAULT_PROTOCOL, _split_over_dp, _keep_on_last_stage)
register_protocol("DP_PROTO", _split_over_ranks, _keep_own)
register_protocol("ONE_TO_ALL", _give_all, _keep_equal_parts)
register_protocol("ALL_TO_ALL", _split_as_given, _keep_own)
register_protocol("3D_ALL_MICRO_DP", _split_over_micro_dp, _keep_on_last_stage)
register_protocol("3D_PP_ONLY", _give_all, _keep_on_every_stage)
_BUILT_IN = frozenset(_PROTOCOLS)
EQUAL_COUNT_PROTOCOLS = frozenset({"ONE_TO_ALL", "ALL_TO_ALL", "3D_PP_ONLY"})  # with any balanced_dp of the call

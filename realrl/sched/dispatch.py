"""One batch of one call on its way through the ranks of its mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from realrl.plan.partition import split_minibatches
from realrl.plan.transfer import Arrival, Placement, Share, plan_transfers
from realrl.sched.master_plan import ScheduledCall
from realrl.sched.messages import RunCall, Transfer


@dataclass
class Dispatch:
    """A call that was sent to every rank of its mesh.

    Attributes:
        id: unique number.
        call: the call.
        step: step from 1.
        ids: samples, oldest first.
        work: rank -> its minibatches and what it must fetch; in mesh order.
        arrivals: what the fetching changes.
        pending: ranks that have not answered.
        seconds: time that each rank which answered spent in the call itself.
    """

    id: int
    call: ScheduledCall
    step: int
    ids: tuple[str, ...]
    work: Mapping[int, RankWork]
    arrivals: tuple[Arrival, ...]
    pending: set[int] = field(default_factory=set)
    seconds: dict[int, float] = field(default_factory=dict)

    def requests(self, next_seq: Callable[[int], int], n_steps: int) -> Iterator[tuple[int, RunCall]]:
        """Yield (rank, request) for every rank of the mesh."""
        for rank, work in self.work.items():
            yield (
                rank,
                RunCall(
                    seq=next_seq(rank),
                    dispatch_id=self.id,
                    call=self.call.name,
                    step=self.step,
                    minibatches=work.minibatches,
                    transfers=work.transfers,
                    n_steps=n_steps,
                ),
            )


@dataclass(frozen=True)
class RankWork:
    """One rank's part of a dispatch."""

    minibatches: tuple[tuple[str, ...], ...]
    transfers: tuple[Transfer, ...]


def plan_work(
    call: ScheduledCall,
    ids: Sequence[str],
    token_counts: Sequence[int],
    placements: Mapping[str, Mapping[str, Placement]],
    node_of: Callable[[int], int],
) -> tuple[dict[int, RankWork], tuple[Arrival, ...]]:
    """Divide a batch over the ranks of a call's mesh, and plan what each must fetch.

    Args:
        call: the call.
        ids: samples, oldest first.
        token_counts: tokens of each sample.
        placements: key -> sample id -> where it is, for the call's input keys.
        node_of: global rank -> node.

    Returns:
        Rank -> its work, in mesh order; and what the fetching changes. Ranks that hold the same data-parallel slice
        have the same samples.
    """
    dp_size = call.allocation.strategy.dp
    n_minibatches = call.n_minibatches if call.is_train else 1
    split = split_minibatches(ids, token_counts, n_minibatches, dp_size, equal_count=call.balanced_dp)
    minibatches_of: dict[int, tuple[tuple[str, ...], ...]] = {}
    shares = []
    for dp_rank in range(dp_size):
        minibatches = tuple(tuple(minibatch[dp_rank]) for minibatch in split)
        ranks = call.allocation.dp_group_members(dp_rank)
        minibatches_of |= dict.fromkeys(ranks, minibatches)
        shares.append(Share(ranks, tuple(sample_id for minibatch in minibatches for sample_id in minibatch)))
    plan = plan_transfers(shares, placements, node_of=node_of)
    transfers_of: dict[int, list[Transfer]] = {rank: [] for rank in call.ranks}
    for route in plan.routes:
        transfers_of[route.target].append(Transfer(route.source, route.target, route.key, route.ids))
    work = {rank: RankWork(minibatches_of[rank], tuple(transfers_of[rank])) for rank in call.ranks}
    return work, plan.arrivals

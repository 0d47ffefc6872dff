"""One rank's place in a (dp, tp, pp) layout: its coordinates and the communicator of each axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realrl.engine.groups import ALONE, Communicator, Groups
from realrl.mesh.device_mesh import Allocation, ParallelStrategy
from realrl.plan.groups import GroupKind, ProcessGroup, group_of

_ONE_DEVICE = ParallelStrategy()


@dataclass(frozen=True)
class Parallel:
    """The groups that one rank of a layout works with; the rank in each group is its coordinate on that axis.

    Without arguments: one rank that holds everything.

    Attributes:
        dp: the ranks that hold the same parameters and different samples.
        tp: the ranks that hold the slices of the same layers.
        pp: the stages of this rank's pipeline, in order.
        tied: first and last stage of the pipeline, which both hold a tied embedding; a group of one elsewhere.
        mesh: all ranks of the layout, in ascending order of their global ranks.
        strategy: sizes of the axes; `sp` splits rows over `tp` too.
    """

    dp: Communicator = ALONE
    tp: Communicator = ALONE
    pp: Communicator = ALONE
    tied: Communicator = ALONE
    mesh: Communicator = ALONE
    strategy: ParallelStrategy = _ONE_DEVICE

    def __post_init__(self) -> None:
        sizes = (self.dp.n_ranks, self.tp.n_ranks, self.pp.n_ranks)
        if sizes != (self.strategy.dp, self.strategy.tp, self.strategy.pp):
            raise ValueError(f"groups of (dp, tp, pp) = {sizes} ranks are not those of {self.strategy}")

    @property
    def dp_rank(self) -> int:
        return self.dp.rank

    @property
    def tp_rank(self) -> int:
        return self.tp.rank

    @property
    def pp_rank(self) -> int:
        return self.pp.rank

    @property
    def mesh_rank(self) -> int:
        return self.strategy.mesh_rank(pp_rank=self.pp_rank, dp_rank=self.dp_rank, tp_rank=self.tp_rank)

    @property
    def is_first_stage(self) -> bool:
        """True if this rank reads tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank has the head."""
        return self.pp_rank == self.strategy.pp - 1

    @property
    def last_stage(self) -> int:
        """The rank in `pp` that has the head."""
        return self.strategy.pp - 1


def parallel_of(groups: Groups, planned: Sequence[ProcessGroup], allocation: Allocation, rank: int) -> Parallel:
    """The place of a global rank in an allocation.

    Args:
        groups: created from `planned`.
        planned: result of `realrl.plan.groups.process_groups` for all allocations of the run.

    Raises:
        LookupError: the groups were not planned for this allocation, or the rank is not on its mesh.
    """

    def group(kind: GroupKind) -> Communicator:
        return groups[group_of(planned, kind, allocation, rank)]

    pp = group(GroupKind.PP)
    is_end = pp.n_ranks > 1 and pp.rank in (0, pp.n_ranks - 1)
    return Parallel(
        dp=group(GroupKind.DP),
        tp=group(GroupKind.TP),
        pp=pp,
        tied=group(GroupKind.TIED) if is_end else ALONE,
        mesh=group(GroupKind.MESH),
        strategy=allocation.strategy,
    )

"""A rank's place in a layout."""

from __future__ import annotations

import pytest

from realrl.engine.groups import ALONE, Communicator, Groups
from realrl.engine.parallel import Parallel, parallel_of
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.groups import process_groups


def test_alone_is_every_stage() -> None:
    alone = Parallel()
    assert alone.is_first_stage
    assert alone.is_last_stage
    assert (alone.dp_rank, alone.tp_rank, alone.pp_rank, alone.mesh_rank, alone.last_stage) == (0, 0, 0, 0, 0)


def test_every_rank_has_its_coordinates() -> None:
    cluster = Cluster(2, 8)
    allocation = Allocation(DeviceMesh.of_nodes(cluster, 1, 1), ParallelStrategy(dp=2, tp=1, pp=4, sp=True))
    planned = process_groups([allocation], cluster)
    for mesh_rank, rank in enumerate(allocation.ranks):
        mine = {g: Communicator(None, g.n_ranks, g.ranks.index(rank)) for g in planned if rank in g.ranks}
        place = parallel_of(Groups(mine), planned, allocation, rank)
        assert (place.pp_rank, place.dp_rank, place.tp_rank) == allocation.strategy.coordinates(mesh_rank)
        assert place.mesh_rank == mesh_rank
        assert place.strategy is allocation.strategy
        is_end = place.is_first_stage or place.is_last_stage
        assert place.tied == (Communicator(None, 2, int(place.is_last_stage)) if is_end else ALONE)
    with pytest.raises(LookupError, match="with rank 3"):
        parallel_of(Groups({}), planned, allocation, 3)


def test_coordinates_follow_the_rank_order() -> None:
    cluster, order = Cluster(1, 8), (0, 2, 1, 3, 7, 6, 5, 4)
    allocation = Allocation(DeviceMesh.whole(cluster), ParallelStrategy(dp=2, tp=2, pp=2), order)
    planned = process_groups([allocation], cluster)
    for mesh_rank, rank in enumerate(order):
        mine = {g: Communicator.of(g, rank, None) for g in planned if rank in g.ranks}
        assert parallel_of(Groups(mine), planned, allocation, rank).mesh_rank == mesh_rank


def test_groups_must_fit_the_strategy() -> None:
    with pytest.raises(ValueError, match=r"groups of \(dp, tp, pp\) = \(1, 1, 1\) ranks are not those of d2t1p1"):
        Parallel(strategy=ParallelStrategy(dp=2))

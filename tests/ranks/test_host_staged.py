"""Collectives through host memory against the same ones without, and a run whose workers use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from realrl.engine.groups import Groups, GroupSettings, HostStaged
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.groups import GroupKind, group_of, process_groups
from realrl.sched.key_value import KeyValueClient
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import assert_same_numbers, run_ppo


def _every_operation(rank: int, world_size: int, meeting: KeyValueClient, through_host: bool) -> tuple:
    cluster = Cluster(1, world_size)
    allocation = Allocation(DeviceMesh.whole(cluster), ParallelStrategy(dp=world_size), (2, 0, 1))
    planned = process_groups([allocation], cluster)
    groups = Groups.create(
        planned, rank=rank, world_size=world_size, meeting=meeting, device=torch.device("cpu"), timeout_s=30.0,
        settings=GroupSettings(through_host=through_host),
    )  # fmt: skip
    group = groups[group_of(planned, GroupKind.DP, allocation, rank)]
    assert isinstance(group, HostStaged) is through_host
    mine = torch.randn(6, 5, generator=torch.Generator().manual_seed(rank))
    columns = mine.t()  # not contiguous
    received = [torch.empty(2, 5, dtype=torch.bfloat16) for _ in range(world_size)]
    others = [peer for peer in range(world_size) if peer != group.rank]
    pending = group.exchange(
        [(peer, mine[2 * peer : 2 * peer + 2].bfloat16()) for peer in others],
        [(peer, received[peer]) for peer in others],
    )
    pending.wait()
    found = [
        group.all_reduce_(mine.clone()),
        group.all_reduce_(mine.clone(), "max"),
        group.all_gather(columns),
        group.reduce_scatter(mine),
        group.broadcast_(mine.clone(), 1),
        group.broadcast_unknown(mine.bfloat16() if group.rank == 2 else None, 2, mine.device),
        *(received[peer] for peer in others),
    ]
    group.barrier()
    groups.destroy()
    return tuple(tensor.float().numpy().tolist() for tensor in found)


def test_operations_give_the_same_bits() -> None:
    plain, staged = (run_ranks(3, _every_operation, through, joined=False) for through in (False, True))
    assert plain == staged
    assert plain[0][0] == plain[1][0] == plain[2][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("allocation.mode=tensor",),
        ("allocation.mode=split", "allocation.calls.actor_gen=d2@0:0-1", "cluster.data_plane=collective"),
    ],
)
def test_a_run_gives_the_same_bits(tmp_path: Path, layout: tuple[str, ...]) -> None:
    settings = ("steps=2", "cluster.n_devices_per_node=2", *layout)
    plain = run_ppo(tmp_path / "plain", *settings)
    staged = run_ppo(tmp_path / "staged", *settings, "cluster.shares_devices=true")
    assert_same_numbers(plain, staged, rel=0, floor=0)

"""Data-parallel training over gloo: the numbers are those of one rank, and groups come and go cleanly."""

from __future__ import annotations

import os
import time

import pytest
import torch

from realrl.algo.api import MicroBatching
from realrl.data.sample import SequenceSample
from realrl.engine.groups import ALONE, Groups
from realrl.errors import CallError, TransportError
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.groups import GroupKind, ProcessGroup, group_of, process_groups
from realrl.runtime.transport.inproc import InprocKeyValues
from realrl.sched.key_value import KeyValueClient
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_batch, make_engine, masked_nll, n_masked

CPU = torch.device("cpu")
N_STEPS = 3


def plan(n_ranks: int) -> tuple[Allocation, tuple[ProcessGroup, ...]]:
    cluster = Cluster(1, n_ranks)
    allocation = Allocation(DeviceMesh(cluster, tuple(range(n_ranks))), ParallelStrategy(dp=n_ranks))
    return allocation, process_groups([allocation], cluster)


def join(rank: int, world_size: int, meeting: KeyValueClient, timeout_s: float = 30.0) -> Groups:
    _, planned = plan(world_size)
    return Groups.create(planned, rank=rank, world_size=world_size, meeting=meeting, device=CPU, timeout_s=timeout_s)


def train(dp: object, share: SequenceSample, whole: SequenceSample, n_mbs: int, dtype: torch.dtype) -> tuple:
    engine = make_engine(dp=dp, compute_dtype=dtype)  # type: ignore[arg-type]
    results = [
        engine.train_batch(share, masked_nll, normaliser=n_masked(whole), micro_batching=MicroBatching(n_mbs=n_mbs))
        for _ in range(N_STEPS)
    ]
    return results, {name: p.detach().float().numpy() for name, p in engine.decoder.named_parameters()}


def _train_share(rank: int, world_size: int, meeting: KeyValueClient, dtype: torch.dtype) -> tuple:
    groups = join(rank, world_size, meeting)
    allocation, planned = plan(world_size)
    dp = groups[group_of(planned, GroupKind.DP, allocation, rank)]
    whole = make_batch(10)
    share = whole.split([[0, 2, 9], [1, 3, 4, 5, 6, 7, 8]])[rank]
    outcome = train(dp, share, whole, n_mbs=[5, 2][rank], dtype=dtype)  # rank 0 has fewer samples than micro-batches
    groups.destroy()
    return outcome


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_two_ranks_train_like_one(dtype: torch.dtype, tolerance: float) -> None:
    whole = make_batch(10)
    expected, weights = train(ALONE, whole, whole, n_mbs=1, dtype=dtype)
    (results, weights_0), (results_1, weights_1) = run_ranks(2, _train_share, dtype, joined=False)
    assert results == results_1
    for a, b in zip(results, expected, strict=True):
        assert a.stats == pytest.approx(b.stats, rel=tolerance)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=tolerance)
        assert (a.lr, a.stepped) == (b.lr, b.stepped)
    for name, weight in weights.items():
        assert (weights_0[name] == weights_1[name]).all()
        if dtype == torch.float32:
            assert weights_0[name] == pytest.approx(weight, abs=1e-4)


def _nan_on_one_rank(rank: int, world_size: int, meeting: KeyValueClient) -> str:
    groups = join(rank, world_size, meeting)
    allocation, planned = plan(world_size)
    engine = make_engine(dp=groups[group_of(planned, GroupKind.DP, allocation, rank)])

    def loss(out, batch):  # type: ignore[no-untyped-def]
        result = masked_nll(out, batch)
        result.loss.mul_(float("nan") if rank == 1 else 1.0)
        return result

    with pytest.raises(CallError) as caught:
        engine.train_batch(make_batch(), loss, normaliser=1.0, micro_batching=MicroBatching())
    groups.destroy()
    return caught.value.message


def test_nan_on_one_rank_is_an_error_on_all() -> None:
    messages = run_ranks(2, _nan_on_one_rank, joined=False)
    assert messages == ["the loss of role 'actor' is nan"] * 2


def _reduce(rank: int, world_size: int, meeting: KeyValueClient) -> tuple[float, float, list[int]]:
    groups = join(rank, world_size, meeting)
    cluster = Cluster(1, world_size)
    allocation = Allocation(DeviceMesh(cluster, tuple(range(world_size))), ParallelStrategy(dp=world_size))
    _, planned = plan(world_size)
    engine = make_engine(optimizer=None, dp=groups[group_of(planned, GroupKind.DP, allocation, rank)])
    mine = torch.tensor([float(rank + 1)])
    out = engine.all_reduce(mine).item(), engine.all_reduce(mine, "max").item(), mine.int().tolist()
    groups.destroy()
    return out


def test_all_reduce_sums_and_maximises() -> None:
    assert run_ranks(3, _reduce, joined=False) == [(6.0, 3.0, [i + 1]) for i in range(3)]


def _split_meshes(rank: int, world_size: int, meeting: KeyValueClient) -> list[float]:
    cluster = Cluster(1, world_size)
    halves = [Allocation(DeviceMesh(cluster, ranks), ParallelStrategy(dp=2)) for ranks in ((0, 1), (2, 3))]
    planned = process_groups(halves, cluster)
    groups = Groups.create(planned, rank=rank, world_size=world_size, meeting=meeting, device=CPU, timeout_s=30.0)
    mine = groups[group_of(planned, GroupKind.DP, halves[rank // 2], rank)]
    everyone = groups[group_of(planned, GroupKind.GLOBAL, halves[0], rank)]
    assert (mine.n_ranks, mine.rank) == (2, rank % 2)
    out = [g.all_reduce_(torch.tensor([float(rank)])).item() for g in (mine, everyone)]
    groups.destroy()
    return out


def test_groups_of_disjoint_meshes() -> None:
    assert run_ranks(4, _split_meshes, joined=False) == [[1.0, 6.0]] * 2 + [[5.0, 6.0]] * 2


def _overlapping_meshes(rank: int, world_size: int, meeting: KeyValueClient) -> list[float]:
    cluster = Cluster(1, world_size)
    first = Allocation(DeviceMesh(cluster, (0, 1)), ParallelStrategy(dp=2))
    whole = Allocation(DeviceMesh.whole(cluster), ParallelStrategy(dp=2, pp=2))
    planned = process_groups([first, whole], cluster)
    groups = Groups.create(planned, rank=rank, world_size=world_size, meeting=meeting, device=CPU, timeout_s=30.0)
    mine = [groups[group_of(planned, kind, whole, rank)] for kind in (GroupKind.PP, GroupKind.DP)]
    out = [group.all_reduce_(torch.tensor([float(rank)])).item() for group in mine]
    groups.destroy()
    return out


def test_groups_of_ranks_that_are_in_different_numbers_of_groups() -> None:
    found = run_ranks(4, _overlapping_meshes, joined=False)
    assert found == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


def _only_loopback(rank: int, world_size: int, meeting: KeyValueClient) -> list[str]:
    groups = join(rank, world_size, meeting)
    inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table, encoding="ascii") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    listening.append(fields[1].split(":")[0])
    groups.destroy()
    return listening


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs /proc")
def test_every_socket_listens_on_loopback_only() -> None:
    listening = run_ranks(2, _only_loopback, joined=False)
    assert listening[0]
    assert {address for found in listening for address in found} <= {"0100007F"}


def _leave_after_a_death(rank: int, world_size: int, meeting: KeyValueClient) -> float:
    groups = join(rank, world_size, meeting)
    if rank == 1:
        os._exit(0)
    start_s = time.monotonic()
    groups.destroy()
    return time.monotonic() - start_s


def test_leaving_does_not_wait_for_the_dead() -> None:
    start_s = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 failed:\nprocess died with exit code 0"):
        run_ranks(2, _leave_after_a_death, joined=False)
    assert time.monotonic() - start_s < 30.0


def test_a_single_worker_meets_nobody() -> None:
    allocation, planned = plan(1)
    groups = Groups.create(planned, rank=0, world_size=1, meeting=None, device=CPU, timeout_s=1.0)
    assert groups[group_of(planned, GroupKind.DP, allocation, 0)] is ALONE
    assert not torch.distributed.is_initialized()
    groups.destroy()


def test_nobody_else_comes() -> None:
    told = r"worker 1 could not join the 2 workers of this run: no other worker has set '.*' within 0\.5 s"
    with pytest.raises(TransportError, match=told):
        join(1, 2, InprocKeyValues(), timeout_s=0.5)

"""The gloo harness must fail loudly in every way that ranks can fail."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankFailure, run_ranks


def _sum_of_ranks(rank: int, world_size: int) -> float:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


def _one_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("planned")
    dist.barrier()


def _all_raise(rank: int, world_size: int) -> None:
    raise ValueError("planned")


def _crash(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(139)
    dist.barrier()


def _crash_in_a_collective(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def _hang(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(1000)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_in_rank_order(world_size: int) -> None:
    assert run_ranks(world_size, _sum_of_ranks) == [world_size * (world_size - 1) / 2] * world_size


def test_one_rank_raises() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 failed[^$]*planned"):
        run_ranks(2, _one_raises)


def test_all_ranks_raise() -> None:
    with pytest.raises(RankFailure, match=r"rank 0 failed[^$]*planned"):
        run_ranks(2, _all_raise)


def test_one_rank_crashes() -> None:
    with pytest.raises(RankFailure, match="rank 0 failed:\nprocess died with exit code 139"):
        run_ranks(2, _crash)


def test_one_rank_crashes_inside_a_collective() -> None:
    with pytest.raises(RankFailure, match="rank 1 failed:\nprocess died with exit code -11"):
        run_ranks(2, _crash_in_a_collective)


def test_one_rank_hangs() -> None:
    with pytest.raises((TimeoutError, RankFailure)):
        run_ranks(2, _hang, timeout_s=4)

"""Checks of the device, its collectives and its attention kernels."""

from __future__ import annotations

import multiprocessing as mp
import queue
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch.profiler import profile

from realrl.engine import device as devices
from realrl.engine.groups import Communicator, Groups, GroupSettings, all_gather_single, reduce_scatter_single
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.model.layers.attention import PackedAttention
from realrl.plan.groups import process_groups
from realrl.runtime.transport.sockets import RunKeys, WorkerKeys
from realrl.runtime.transport.zmq import ZmqKeyValueClient, ZmqKeyValueServer
from scripts.gpu_checks.common import DeviceMemory, Figures, activities, require

TIMEOUT_S = 60.0
N_TOKENS = {"cuda": 8192, "cpu": 512}


def versions() -> Figures:
    """Versions, capability and free memory of the device."""
    figures: Figures = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    device = devices.resolve_device("auto")
    if device.type == "cpu":
        return {**figures, "device": "cpu", "threads": torch.get_num_threads()}
    total, free = devices.total_memory_bytes(device), devices.free_memory_bytes(device)
    properties = torch.cuda.get_device_properties(device)
    figures |= {"device": properties.name, "capability": [properties.major, properties.minor]}
    figures |= {"nccl": list(torch.cuda.nccl.version()), "total_bytes": total, "free_bytes": free}
    require(0 < free <= total, "free memory is not part of the total", figures)
    return figures


# ---------------------------------------------------------------- collectives


@contextmanager
def one_rank(device: torch.device) -> Iterator[torch.distributed.ProcessGroup]:
    """Yield the group of a world of one rank on the device."""
    keys = RunKeys.new()
    planned = process_groups([], Cluster(1, 1))
    with (
        closing(ZmqKeyValueServer(keys)) as server,
        closing(ZmqKeyValueClient(server.address, keys.for_workers)) as meeting,
    ):
        groups = Groups.create(
            planned, rank=0, world_size=1, meeting=meeting, device=device, timeout_s=TIMEOUT_S,
            settings=GroupSettings(for_libraries=True),
        )  # fmt: skip
        handle = groups[planned[0]].library_handle
        assert handle is not None
        try:
            yield handle
        finally:
            groups.destroy()


def collectives_of_one_rank() -> Figures:
    """Every collective that realrl uses, over NCCL with one rank (gloo on the CPU): each gives its input back.

    Messages need two ranks: torch sends a rank none of its own.
    """
    device = devices.resolve_device("auto")
    with one_rank(device) as group:
        mine = torch.arange(12.0, device=device)
        found = {name: torch.empty_like(mine) for name in ("all_gather", "reduce_scatter")}
        all_gather_single(found["all_gather"], mine, group=group)
        reduce_scatter_single(found["reduce_scatter"], mine, group=group)
        for name in ("sum", "max", "broadcast"):
            found[name] = mine.clone()
        torch.distributed.all_reduce(found["sum"], group=group)
        torch.distributed.all_reduce(found["max"], torch.distributed.ReduceOp.MAX, group=group)
        torch.distributed.broadcast(found["broadcast"], group=group, group_src=0)
        torch.distributed.barrier(group=group)
        wrong = [name for name, tensor in found.items() if not torch.equal(tensor, mine)]
    figures = {"backend": devices.backend_name(device), "operations": [*found, "barrier"]}
    require(not wrong, f"wrong results of {', '.join(wrong)}", figures)
    return figures


def operations(group: Communicator, device: torch.device) -> list[str]:
    """Do every operation of a communicator of two; returns the names of those with wrong results."""
    rank, peer = group.rank, 1 - group.rank
    both = [torch.arange(12.0, device=device) * (n + 1) for n in range(2)]
    mine, theirs = both[rank], both[peer]
    received = [torch.empty(6, dtype=torch.bfloat16, device=device) for _ in range(2)]
    halves = [tensor.bfloat16().chunk(2) for tensor in both]
    pending = group.exchange([(peer, half) for half in halves[rank]], [(peer, place) for place in received])
    pending.wait()
    described = group.broadcast_unknown(mine if rank == 1 else None, 1, device)
    right = {
        "sum": torch.equal(group.all_reduce_(mine.clone()), mine + theirs),
        "max": torch.equal(group.all_reduce_(mine.clone(), "max"), both[1]),
        "all_gather": torch.equal(group.all_gather(mine), torch.cat(both)),
        "reduce_scatter": torch.equal(group.reduce_scatter(mine), (mine + theirs).chunk(2)[rank]),
        "broadcast": torch.equal(group.broadcast_(mine.clone(), 1), both[1]),
        "broadcast of unknown shape": torch.equal(described, both[1]),
        "messages": all(map(torch.equal, received, halves[peer])),
    }
    group.barrier()
    return [name for name, is_right in right.items() if not is_right]


def _member(rank: int, address: str, keys: WorkerKeys, kind: str, through_host: bool, out: Any) -> None:
    """Join the world of two and put the wrong operations, or what went wrong with them, into the queue."""
    try:
        device = devices.resolve_device(kind, 0 if through_host else rank)
        cluster = Cluster(1, 2)
        allocation = Allocation(DeviceMesh.whole(cluster), ParallelStrategy(dp=2))
        planned = process_groups([allocation], cluster)
        with closing(ZmqKeyValueClient(address, keys)) as meeting:
            groups = Groups.create(
                planned, rank=rank, world_size=2, meeting=meeting, device=device, timeout_s=TIMEOUT_S,
                settings=GroupSettings(through_host=through_host, collective_timeout_s=TIMEOUT_S),
            )  # fmt: skip
            wrong = operations(groups[planned[0]], device)
            groups.destroy()
        out.put(wrong)
    except Exception as error:  # noqa: BLE001 - the check's line says what happened
        out.put([f"{type(error).__name__}: {error}"])


def collectives_of_two_ranks() -> Figures:
    """Every operation between two processes, messages included: over NCCL where there are two GPUs.

    Two ranks on one GPU, which NCCL refuses, go through host memory.
    """
    device, keys, spawn = devices.resolve_device("auto"), RunKeys.new(), mp.get_context("spawn")
    through_host = device.type == "cuda" and devices.device_count() < 2
    out = spawn.Queue()
    with closing(ZmqKeyValueServer(keys)) as server:
        shared = (server.address, keys.for_workers, device.type, through_host, out)
        members = [spawn.Process(target=_member, args=(rank, *shared)) for rank in range(2)]
        for member in members:
            member.start()
        try:
            wrong = {name for _ in members for name in out.get(timeout=2 * TIMEOUT_S)}
        except queue.Empty:
            wrong = {"a rank did not answer"}
        for member in members:
            member.join(10.0)
            member.kill()
    backend = "gloo, through host memory" if through_host else devices.backend_name(device)
    figures: Figures = {"backend": backend}
    if through_host:
        figures["nccl"] = "skipped: NCCL refuses two ranks on one GPU, and there is one"
    require(not wrong, f"wrong: {', '.join(sorted(wrong))}", figures)
    return figures


# ---------------------------------------------------------------- attention


def attend_on(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], window: int | None) -> Figures:
    """Attend once, forward and backward, to one sequence: kernels by name, and peak bytes."""
    n_heads, n_kv_heads, head_dim = heads
    n_tokens = N_TOKENS[device.type]
    sizes = (n_heads, n_kv_heads, n_kv_heads)
    q, k, v = (torch.randn(n_tokens, n, head_dim, device=device, dtype=dtype, requires_grad=True) for n in sizes)
    with DeviceMemory(device) as memory:
        PackedAttention([n_tokens]).attend(0, q, k, v, window=window).sum().backward()
    with profile(activities=activities(device)) as profiler:
        PackedAttention([n_tokens]).attend(0, q, k, v, window=window).sum().backward()
        devices.synchronize(device)
    names = sorted({event.key for event in profiler.key_averages() if "attention" in event.key.lower()})
    scores = n_heads * n_tokens**2 * dtype.itemsize
    return {"peak_bytes": memory.peak, "share_of_scores": memory.peak / scores, "kernels": names}


def attention() -> Figures:
    """Attention in each dtype, with grouped heads and windows: no kernel keeps all scores."""
    device = devices.resolve_device("auto")
    found: dict[str, Figures] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for n_kv_heads in (2, 8):
            for window in (None, N_TOKENS[device.type] // 8):
                for head_dim in (64, 128, 256):
                    name = f"{dtype} {8}/{n_kv_heads} heads of {head_dim}, window {window}".removeprefix("torch.")
                    found[name] = attend_on(device, dtype, (8, n_kv_heads, head_dim), window)
    figures: Figures = {"n_tokens": N_TOKENS[device.type], **found}
    if device.type == "cpu":
        figures["limit"] = "skipped: q, k and v of so few tokens take as much as their scores"
        return figures
    quadratic = [name for name, case in found.items() if case["share_of_scores"] >= 1.0]
    require(not quadratic, f"as much memory as all scores: {'; '.join(quadratic)}", figures)
    return figures

"""Bytes that torch's allocator gives out on the CUDA device of a process, to compare a memory estimate with."""

from __future__ import annotations

import gc
from typing import Any, Self

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from realrl.engine.generate.cuda_graphs import CudaGraphs
from realrl.engine.generate.replay import Work

_NO_POOL = (0, 0)
_NUMBERS = 4096  # bytes of numbers by themselves, such as an optimizer's counters, which no plan counts


class AllocatedMemory:
    """Counts what was asked of the allocator, and what CUDA graphs keep for their replays.

    Workspaces of cuBLAS are left out: they belong to the libraries, whose memory is planned beside the allocator's.
    One instance a process: it listens to recordings of graphs.
    """

    def __init__(self) -> None:
        self._kept = self._peak = self._workspaces = 0
        recorded = CudaGraphs.record

        def record(graphs: CudaGraphs, work: Work) -> Work:
            replay = recorded(graphs, work)
            self._peak = max(self._peak, self._stat("peak") + self._kept)
            torch.cuda.reset_peak_memory_stats()
            self._kept = _idle_bytes_of_pools()
            return replay

        CudaGraphs.record = record  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def now(self) -> int:
        """Bytes that live."""
        return self._stat("current") - self._workspaces

    @property
    def peak(self) -> int:
        """The most since the last `restart`."""
        return max(self._peak, self._stat("peak") + self._kept) - self._workspaces - _NUMBERS

    def restart(self) -> None:
        """Forget the peak."""
        if not self._workspaces:
            _make_workspaces()
            before = self._stat("current")
            torch._C._cuda_clearCublasWorkspaces()
            self._workspaces = before - self._stat("current")
        _make_workspaces()
        self._peak = self._kept = 0
        torch.cuda.reset_peak_memory_stats()

    def count(self, tensor: torch.Tensor) -> None:
        """Do nothing: the allocator knows all tensors."""

    def _stat(self, which: str) -> int:
        return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0))


def _make_workspaces() -> None:
    """Multiply wherever a call does: on the device's stream, in the thread of backward passes, and where graphs are.

    With checkpoints, backward passes add biases, too.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(8, 8, device=device, dtype=dtype, requires_grad=True)
        (checkpoint(_squared_product, x, use_reentrant=False) @ x).sum().backward()
        CudaGraphs(device).warm_up(lambda x=x: F.linear(x.detach(), x.detach(), x[0].detach()))  # type: ignore[misc]


def _squared_product(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, x, x[0]).square()  # whose backward pass needs the product again, not its operands alone


def _idle_bytes_of_pools() -> int:
    """Bytes of blocks without a tensor in pools that belong to graphs."""
    gc.collect()
    torch.cuda.empty_cache()  # pools whose graphs are gone give their blocks back whenever memory is short
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    blocks = [block for one in segments if tuple(one["segment_pool_id"]) != _NO_POOL for block in one["blocks"]]
    return sum(block["size"] for block in blocks if block["state"] == "inactive")

"""Bytes that torch's allocator gives out on the CUDA device of a process, to compare a memory estimate with."""

from __future__ import annotations

from typing import Any, Self

import torch

from realrl.engine.generate.cuda_graphs import CudaGraphs
from realrl.engine.generate.replay import Work

_NO_POOL = (0, 0)


class AllocatedMemory:
    """Counts what was asked of the allocator, and what CUDA graphs keep for their replays, inside of the context.

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
        before = self._stat("current")
        torch._C._cuda_clearCublasWorkspaces()
        self._workspaces = before - self._stat("current")

    @property
    def now(self) -> int:
        return self._stat("current")

    @property
    def peak(self) -> int:
        """The most since the last `restart`."""
        return max(self._peak, self._stat("peak") + self._kept) - self._workspaces

    def restart(self) -> None:
        """Forget the peak."""
        self._peak = self._kept = self._workspaces = 0
        torch.cuda.reset_peak_memory_stats()

    def count(self, tensor: torch.Tensor) -> None:
        """Do nothing: the allocator knows all tensors."""

    def _stat(self, which: str) -> int:
        return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0))


def _idle_bytes_of_pools() -> int:
    """Bytes of blocks without a tensor in pools that belong to graphs."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    blocks = [block for one in segments if tuple(one["segment_pool_id"]) != _NO_POOL for block in one["blocks"]]
    return sum(block["size"] for block in blocks if block["state"] == "inactive")

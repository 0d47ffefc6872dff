"""Records of work as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from realrl.engine.generate.replay import Recorder, Work
from realrl.errors import CallError


class CudaGraphs:
    """Records as CUDA graphs, which share one pool of memory: between replays nothing in it may be needed.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _recording_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor = self._capture(lambda: torch.empty(1, device=device).fill_(0))  # a pool without graphs ends

    def warm_up(self, work: Work) -> None:
        """Do the work once on the stream of the recordings, where libraries then have their workspace."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Work) -> Work:
        """Capture the work.

        Raises:
            CallError: the work waits for the device, or does what else no graph can hold.
        """
        return self._capture(work).replay

    def _capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            with torch.cuda.stream(self._stream):
                # other threads, such as that of an offload, may allocate meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CallError(
                f"a decode step cannot be recorded as a CUDA graph: {error}",
                remedy="Set generation.cuda_graphs=false.",
            ) from error
        return graph


def make_recorder(device: torch.device) -> Recorder | None:
    """Make the recorder of a device; None where launches cost nothing."""
    return CudaGraphs(device) if device.type == "cuda" else None


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # one for the process: each has a workspace of cuBLAS, which stays

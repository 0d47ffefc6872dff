"""Work that a device does again and again with equal shapes, recorded once and then launched as a whole.

A decode step has dozens of small kernels for each block. Launched one by one, they take the host longer than the device
needs for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Protocol

import torch

from realrl.errors import CallError

Work = Callable[[], None]
"""A function whose inputs and results are tensors that stay in place."""


class Recorder(Protocol):
    """A maker of records."""

    def warm_up(self, work: Work) -> None:
        """Do the work in a way that lets work of these shapes be recorded."""

    def record(self, work: Work) -> Work:
        """Return what does the work again, on the same tensors, without the host's part; the work is not done yet."""


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


class Replays:
    """Work by its shapes: done as it is the first time, recorded the second time, and replayed from then on.

    Args:
        recorder: maker of the records.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._warm: set[Hashable] = set()
        self._records: dict[Hashable, Work] = {}

    def run(self, shapes: Hashable, work: Work) -> None:
        """Do the work, by its record if there is one.

        Args:
            shapes: what decides the operations and the tensors of the work.
        """
        replay = self._records.get(shapes)
        if replay is None:
            if shapes not in self._warm:
                self._warm.add(shapes)
                self._recorder.warm_up(work)
                return
            replay = self._records[shapes] = self._recorder.record(work)
        replay()

    def forget(self) -> None:
        """Drop all records, since tensors that they use have moved; libraries stay warm."""
        self._records.clear()

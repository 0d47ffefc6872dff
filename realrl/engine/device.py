"""Devices by name: their choice, their collective backend, their memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from realrl.errors import ConfigError

_GB = 1e9
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # <malloc.h>
_MMAP_BYTES = 32 << 20  # the largest that glibc takes
_TRIM_BYTES = 512 << 20
_here = threading.local()


def is_built_for_cuda() -> bool:
    """True if this build of torch computes on CUDA devices."""
    return torch.backends.cuda.is_built()


def device_count() -> int:
    """Number of CUDA devices that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve_device(kind: str, local_rank: int = 0) -> torch.device:
    """Return the device of one worker, and make it the process's current one.

    Args:
        kind: "auto" (CUDA when it is there), "cpu" or "cuda".
        local_rank: index of the worker's device among those that this process sees; the launcher shows each one.

    Raises:
        ConfigError: CUDA was asked for and is absent, or the node has too few devices.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        reuse_host_memory()
        return torch.device("cpu")
    if kind != "cuda":
        raise ConfigError(f"cluster.device={kind!r} is not a device", remedy="Use auto, cpu or cuda.")
    n_devices = device_count()
    if local_rank >= n_devices:
        raise ConfigError(
            f"worker {local_rank} of this node needs a CUDA device of its own, the node has {n_devices}",
            remedy="Use cluster.device=cpu, or a smaller cluster.n_devices_per_node.",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new shape for tens of ms; lengths here hardly repeat
    return device


def reuse_host_memory() -> None:
    """Let glibc keep freed blocks for the next tensor; does nothing under other C libraries.

    By default glibc maps each tensor that is larger than any freed before, and returns the end of the heap early, so
    the kernel clears the same pages again and again. Tensors above `_MMAP_BYTES` are still mapped one by one: in the
    heap, which cannot move them, they would leave holes, and a long run would grow without end.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_MMAP_THRESHOLD, _MMAP_BYTES), (_M_TRIM_THRESHOLD, _TRIM_BYTES), (_M_ARENA_MAX, 1))
    for parameter, value in settings:
        mallopt(parameter, value)


def use_one_thread() -> None:
    """Let torch do what this thread asks for without helpers, from now on; in the main thread, which computes, nothing.

    The main thread must have computed before. If another one had helpers, too, OpenMP would count more threads than
    cores, and from then on let all of them sleep whenever they wait for each other: passes of small models would take
    up to a third longer.
    """
    if threading.current_thread() is not threading.main_thread() and not getattr(_here, "is_alone", False):
        torch.set_num_threads(1)  # torch keeps a part of it for each thread
        _here.is_alone = True


def backend_name(device: torch.device) -> str:
    """The torch.distributed backend for tensors on this device."""
    return "nccl" if device.type == "cuda" else "gloo"


def device_name(device: torch.device) -> str:
    """The model of an accelerator, or of the processor, in words."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_gb(device: torch.device) -> float:
    """Memory in use, in 1e9 bytes: the allocator's on CUDA, the process's resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / _GB
    return _resident_bytes() / _GB


def peak_memory_gb(device: torch.device) -> float:
    """Highest memory in use since the process started, in 1e9 bytes, measured like `memory_gb`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GB
    return _peak_resident_bytes() / _GB


def total_memory_bytes(device: torch.device) -> int:
    """Memory of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_memory_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that no process uses."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def release_cached_memory(device: torch.device) -> None:
    """Return unused memory that the CUDA allocator keeps to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory, pinned if it comes from CUDA."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)


def pinned(n_bytes: int) -> torch.Tensor:
    """Host memory [n_bytes] that the operating system does not move, which CUDA copies to without waiting."""
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)


def release_pinned() -> None:
    """Give freed pinned memory, which torch keeps for the next use, back to the operating system."""
    if torch.cuda.is_available():
        torch._C._host_emptyCache()


class Staging:
    """Copies to pageable host memory through two pinned buffers: one fills while the other is emptied.

    Memory for whole checkpoints must not be pinned for as long as a run lasts, and to pin it takes longer than to copy
    it. The buffers are released with the object.

    Args:
        n_bytes: size of each buffer.
        allocate: maker of a buffer, [n] bytes.
    """

    def __init__(self, n_bytes: int, allocate: Callable[[int], torch.Tensor] = pinned) -> None:
        self._buffers = [allocate(n_bytes) for _ in range(2)]

    def copy(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Copy a tensor into contiguous host memory of its shape and dtype, which is complete on return."""
        n_bytes = self._buffers[0].numel()
        sources = tensor.detach().contiguous().view(-1).view(torch.uint8).split(n_bytes)
        places = into.view(-1).view(torch.uint8).split(n_bytes)
        filled: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None] | None = None
        for i, (source, place) in enumerate(zip(sources, places, strict=True)):
            buffer = self._buffers[i % 2][: source.numel()]
            buffer.copy_(source, non_blocking=True)
            event = None
            if source.is_cuda:
                event = torch.cuda.Event()
                event.record()
            if filled is not None:
                _empty(*filled)
            filled = buffer, place, event
        if filled is not None:
            _empty(*filled)


def _empty(buffer: torch.Tensor, place: torch.Tensor, event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
    place.copy_(buffer)


class CopyLane:
    """Copies between a device and host memory that overlap with computation; on the CPU they complete at once.

    Copies happen in the order of the calls, and after everything queued on the device before them.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory (pinned for CUDA); the tensor may be dropped right away."""
        if self._stream is None:
            return tensor.clone()
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the device; usable after `join`."""
        if self._stream is None:
            return host.clone()
        tensor = torch.empty_like(host, device=self._device)  # allocated by the current stream, which later frees it
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
        tensor.record_stream(self._stream)
        return tensor

    def join(self) -> None:
        """Make later work on the current stream wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # not Linux: the peak is the closest that the standard library has
        return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""A role's parameters in host memory while no call needs them, and back on the device before the next one does.

    resident ──offload──► offloaded ──prefetch──► returning ──wait──► resident

The parameter objects stay; their data is empty unless they are resident, so that using them fails instead of reading
stale numbers. On CUDA both copies overlap with computation; on the CPU they complete at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from realrl.engine.device import CopyLane
from realrl.errors import InvalidTransitionError


class Residence(Enum):
    """Location of the parameters."""

    RESIDENT = "resident"
    OFFLOADED = "offloaded"
    RETURNING = "returning"


@dataclass(frozen=True)
class _View:
    """Place of a tensor in a block of memory that it may share with others, in elements."""

    tensor: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class _Block:
    """Memory [n] of one dtype and the tensors that lie in it."""

    memory: torch.Tensor
    views: tuple[_View, ...]


class Offloader:
    """Moves tensors between a device and host memory; they come back bit for bit, sharing the memory that they shared.

    Other views of the tensors, such as a layout that aliases them, keep the device's memory alive and must be dropped
    first. No optimizer may touch the tensors while they are away.

    Args:
        tensors: parameters by name; several names may mean one tensor. Each `offload` reads their current data, so they
            may be re-pointed or updated while resident.
        device: where they are when resident.
        keeps_host_copy: True, for parameters that never change (a frozen role), makes the host copy once and keeps it,
            so that every later `offload` copies nothing.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device, *, keeps_host_copy: bool = False
    ) -> None:
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._tensors = list({id(tensor): tensor for tensor in tensors.values()}.values())
        self._lane = CopyLane(device)
        self._keeps_host_copy = keeps_host_copy
        self._host: list[_Block] = []
        self._arriving: list[_Block] = []
        self.residence = Residence.RESIDENT

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors; 0 while they are away."""
        return sum(block.memory.nbytes for block in _blocks(self._tensors))

    def offload(self) -> None:
        """Copy to host memory and empty the tensors.

        Raises:
            InvalidTransitionError: they are not resident, or one of them has a gradient that belongs to its data.
        """
        self._require(Residence.RESIDENT, "offload")
        for tensor in self._tensors:
            if tensor.grad is not None:
                raise InvalidTransitionError(
                    f"cannot offload {self._names[id(tensor)]!r}: it has a gradient; take the optimizer step first"
                )
        blocks = _blocks(self._tensors)
        is_on_host = bool(self._host)
        while blocks:  # one block at a time, so that little exists twice
            block = blocks.pop(0)
            if not is_on_host:
                self._host.append(_Block(self._lane.to_host(block.memory), block.views))
            for view in block.views:
                view.tensor.data = view.tensor.data.new_empty(0)
        self.residence = Residence.OFFLOADED

    def prefetch(self) -> None:
        """Start bringing the tensors back; they stay empty until `wait`.

        Raises:
            InvalidTransitionError: they are not offloaded.
        """
        self._require(Residence.OFFLOADED, "prefetch")
        waiting = list(self._host)
        if not self._keeps_host_copy:
            self._host = []
        while waiting:
            block = waiting.pop(0)
            self._arriving.append(_Block(self._lane.to_device(block.memory), block.views))
        self.residence = Residence.RETURNING

    def wait(self) -> None:
        """Make the tensors resident, with a `prefetch` if there was none yet; returns when they can be used."""
        if self.residence is Residence.RESIDENT:
            return
        if self.residence is Residence.OFFLOADED:
            self.prefetch()
        self._lane.join()
        for block in self._arriving:
            for view in block.views:
                view.tensor.data = block.memory.as_strided(view.size, view.stride, view.start)
        self._arriving = []
        self.residence = Residence.RESIDENT

    def _require(self, needed: Residence, action: str) -> None:
        if self.residence is not needed:
            names = list(self._names.values())
            what = ", ".join(names[:1]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            raise InvalidTransitionError(
                f"cannot {action} parameters ({what}) that are {self.residence.value}, only {needed.value} ones"
            )


def _blocks(tensors: Sequence[torch.Tensor]) -> list[_Block]:
    """The memory under the tensors: those in one storage and dtype form one block, first element to last."""
    shared: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            shared.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(tensor)
    blocks = []
    for members in shared.values():
        start = min(int(t.storage_offset()) for t in members)
        stop = max(_stop(t) for t in members)
        memory = members[0].detach().as_strided((stop - start,), (1,), start)
        views = tuple(_View(t, t.size(), t.stride(), int(t.storage_offset()) - start) for t in members)
        blocks.append(_Block(memory, views))
    return blocks


def _stop(tensor: torch.Tensor) -> int:
    """One past the last element of the storage that the tensor reaches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1

"""Bytes of live tensors on the CPU, to compare a memory estimate with."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def bytes_alive(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages under the tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class LiveMemory(TorchDispatchMode):
    """Counts the storages of all tensors that operations return inside of the context, while they live.

    Attributes:
        now: bytes that live.
        peak: largest number of bytes that lived at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor; a second time changes nothing."""
        if tensor.device.type == "meta":
            return
        is_opaque = tensor.layout is not torch.strided  # oneDNN's own layout has no storage
        holder: Any = tensor if is_opaque else tensor.untyped_storage()
        number = id(holder) if is_opaque else holder._cdata
        if number in self._known:
            return
        n_bytes = tensor.numel() * tensor.element_size() if is_opaque else holder.nbytes()
        self._known.add(number)
        self.now += n_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(holder, self._forget, number, n_bytes)

    def _forget(self, number: int, n_bytes: int) -> None:
        self._known.discard(number)
        self.now -= n_bytes

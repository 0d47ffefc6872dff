"""An accelerator that every machine has: its tensors compute on the CPU, say that they are elsewhere, and are counted
when they come to host memory.

`DEVICE` is torch's "meta" device, which has no memory. While a `FakeDevice` is entered, tensors made there are
`OnDevice` tensors; operations on these give others of their kind, and mix with host tensors only by copies.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
_copies_to_host: list[int] = []


class OnDevice(torch.Tensor):
    """A tensor of the device; `inner` has its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        with torch.inference_mode(False):  # where inference is going on too, `inner` alone knows of it
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
            )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """Makes `torch.tensor` copy from host memory: it fills memory itself, which torch's own "meta" device has not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


class FakeDevice(TorchDispatchMode):
    """Makes the device usable in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self._factories = _Factories()

    def __enter__(self) -> Self:
        self._factories.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._factories.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def copies_to_host(self) -> list[int]:
        """Bytes of each tensor that came to host memory, also by other threads, since the last `forget`."""
        return list(_copies_to_host)

    def forget(self) -> None:
        """Count from here on."""
        _copies_to_host.clear()


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
    of_device = [a for a in flat if isinstance(a, OnDevice)]
    others = [a for a in flat if not isinstance(a, OnDevice) and a.dim() > 0]
    if func not in _COPIES and of_device and others:
        raise RuntimeError(f"{func} mixes tensors of the device with tensors in host memory")
    target = kwargs.get("device")
    stays = bool(of_device) if target is None else torch.device(target) == DEVICE
    if func is torch.ops.aten.copy_.default:
        stays = isinstance(args[0], OnDevice)
    if func in _COPIES and not stays and of_device:
        _copies_to_host.append(of_device[0].inner.nbytes)
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(lambda a: a.inner if isinstance(a, OnDevice) else a, (args, kwargs))
    result = func(*args, **kwargs)
    if func is torch.ops.aten.copy_.default:
        return flat[0]
    return tree_map(lambda a: OnDevice(a) if isinstance(a, torch.Tensor) and stays else a, result)

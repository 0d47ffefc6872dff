"""Megatron-core on a machine without CUDA: within a block, its calls of CUDA go to the CPU.

Mapped are the device of tensors that it makes, the type names that it compares parameters with, and the functions that
ask for the current device, wait for it or seed it. Nothing outside of the block changes, and on a machine with CUDA the
block does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from realrl.engine.backends.replaced import replaced

_CPU = torch.device("cpu")


class _CpuForCuda(TorchFunctionMode):
    """Rewrites calls of torch that name CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


@contextmanager
def cpu_for_cuda(device: torch.device) -> Iterator[None]:
    """Let megatron-core run on `device`, the device of the parameters."""
    if device.type == "cuda":
        yield
        return
    # megatron-core calls these functions by name and knows no other device
    answers = replaced(
        torch.cuda,
        current_device=_gives(_CPU),
        synchronize=_gives(None),
        empty_cache=_gives(None),
        get_rng_state=_gives(None),
        manual_seed=_gives(None),
    )
    with answers, _CpuForCuda():
        yield


def _gives(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer

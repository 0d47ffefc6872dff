"""Facts about this machine's CPU as torch's own kernels see it; `loader` finds those of the compiled ones."""

from __future__ import annotations

import platform
from functools import cache

import torch

HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""True if torch lets oneDNN be called by name."""
TRAINS_WITH_ONEDNN = HAS_ONEDNN and HAS_AVX512 and platform.machine().lower() in ("x86_64", "amd64")
"""True if oneDNN is faster than the default BLAS of torch's builds; see `products`."""


@cache
def has_bf16_kernels() -> bool:
    """True if this machine's CPU multiplies bfloat16 matrices with vector instructions."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which matrices of `dtype` are multiplied on this kind of device."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not has_bf16_kernels():
        return torch.float32
    return dtype


def attention_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which training attends to queries, keys and values of `dtype` on this kind of device."""
    if device.type == "cpu" and dtype == torch.bfloat16:  # the CPU kernel's bf16 backward is twice as slow
        return torch.float32
    return dtype

"""Choice of the kernels of a decoder's step."""

from __future__ import annotations

import torch

from realrl.cpu.compiled_kernels import CompiledKernels
from realrl.cpu.machine import HAS_AVX512, product_dtype
from realrl.cpu.operations import can_use
from realrl.cpu.torch_kernels import OneDNNKernels, TorchKernels, can_pack

_MOST_ROWS_WITH_AVX2 = 24  # SmolLM2-135M: packed a fifth faster with 8 rows, as fast with 32, slower with hundreds


def choose_kernels(device: torch.device, dtype: torch.dtype, *, n_rows: int = 1) -> TorchKernels:
    """Make the fastest kernels without gradient for weights of `dtype`.

    Where the CPU has no bfloat16 arithmetic, bfloat16 weights are multiplied in float32. The first call may compile,
    which takes some seconds.

    Args:
        n_rows: rows that a decode step computes at a time.
    """
    dtype = product_dtype(device, dtype)
    if can_use(device, dtype):
        return CompiledKernels(dtype)
    if can_pack(device, dtype) and (HAS_AVX512 or n_rows <= _MOST_ROWS_WITH_AVX2):
        return OneDNNKernels(dtype)
    return TorchKernels(dtype)

"""Matrix products of training: on the CPU with the fastest kernel and in the fastest precision, elsewhere torch's own.

float32: oneDNN where the CPU has AVX-512, because the default BLAS of torch's x86 builds takes a narrower path there on
processors of other makers than its own, at half the speed or less. With AVX2 alone the default is the faster one.

bfloat16: torch multiplies without vector instructions where the CPU has none for it, many times slower than in float32.
There the operands are converted, multiplied in float32, and the result is rounded to bfloat16: the same rounding as
that of a bfloat16 kernel, which also accumulates in float32. Large matrices are converted piece by piece.

Other dtypes and devices go to torch's own kernels, which are already the best there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from realrl.cpu import machine
from realrl.cpu.machine import product_dtype
from realrl.plan.memory.buffers import PRODUCT_PIECE

_WORTH_IT = 1 << 14  # elements of the weight; below, the cost of a call outweighs the arithmetic
_FEW_ROWS = 256  # without gradient; up to here speed matters little, and torch's own kernel rounds less
# float32 copies are made in pieces of at most this many elements (16 MB), which the allocator keeps for the next one;
# larger blocks go back to the system, and clearing their pages costs more than the conversion


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute a [m, k] @ b [k, n] without gradient, in the dtype of `a`; either may be a transposed view."""
    return _converted(a, b) if _converts(a, b) else _multiply(a, b)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x [T, in] @ weight [out, in].T + bias, with gradients."""
    converts = _converts(x, weight)
    if not converts and not _uses_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)
    if not converts and x.shape[0] <= _FEW_ROWS:
        return F.linear(x, weight, bias)
    return _linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            matmul(grad, weight) if needs_x else None,
            matmul(grad.T, x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if _converts(x, weight):
        return _converted(x, weight.T, bias)
    return _onednn(x, weight, bias)


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _onednn(a, b.T, None) if _uses_onednn(a, b) else a @ b


def _uses_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if a product with the matrix `b` goes to oneDNN here."""
    return (
        machine.TRAINS_WITH_ONEDNN
        and a.device.type == "cpu"
        and a.dtype == torch.float32
        and b.dtype == torch.float32
        and b.numel() >= _WORTH_IT
        and a.numel() > 0
        # with gaps, where a layout is a view of another one, oneDNN takes its reference code: a thousand times slower
        and (b.is_contiguous() or b.T.is_contiguous())
    )


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _converts(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the product of operands of one dtype is computed in another, float32."""
    return a.dtype == b.dtype and product_dtype(a.device, a.dtype) != a.dtype


def _converted(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a [m, k] @ b [k, n] + bias [n], accumulated in float32 and rounded once to the dtype of `a`."""
    (m, k), n = a.shape, b.shape[1]
    _, middle, largest = sorted((m, k, n))
    size = max(1, PRODUCT_PIECE // max(1, middle))
    if largest <= size:
        return _rounded(_multiply(a.float(), b.float()), bias, a.dtype)
    if largest == k:  # the pieces are summands
        total = torch.zeros(m, n, dtype=torch.float32, device=a.device)
        for piece in _pieces(k, size):
            total += _multiply(a[:, piece].float(), b[piece].float())
        return _rounded(total, bias, a.dtype)
    out = a.new_empty(m, n)
    if largest == n:
        whole = a.float()
        for piece in _pieces(n, size):
            product = _multiply(whole, b[:, piece].float())
            out[:, piece] = product if bias is None else product.add_(bias[piece])
    else:
        whole = b.float()
        for piece in _pieces(m, size):
            product = _multiply(a[piece].float(), whole)
            out[piece] = product if bias is None else product.add_(bias)
    return out


def _rounded(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (product if bias is None else product.add_(bias)).to(dtype)


def _pieces(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))

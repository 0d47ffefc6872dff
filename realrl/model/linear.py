"""Matrix products on the CPU in float32 through oneDNN, which uses the full vector width of every x86 maker.

The default BLAS of torch's x86 builds takes a narrower path on processors of other makers than its own: half the speed
or less where AVX-512 is there. Other dtypes and devices go to torch's own kernels, which are already the best there.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_HAS_ONEDNN = (
    platform.machine().lower() in ("x86_64", "amd64")
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)
_WORTH_IT = 1 << 14  # elements of the weight; below, the cost of a call outweighs the arithmetic
_FEW_ROWS = 256  # without gradient; up to here speed matters little, and torch's own kernel rounds less


def uses_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a product with the matrix `b` goes to oneDNN here."""
    return (
        _HAS_ONEDNN
        and a.device.type == "cpu"
        and a.dtype == torch.float32
        and b.dtype == torch.float32
        and b.numel() >= _WORTH_IT
        and a.numel() > 0
    )


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [m, k] @ b [k, n] without gradient; either may be a transposed view."""
    return _onednn(a, b.T, None) if uses_onednn(a, b) else a @ b


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] @ weight [out, in].T + bias, with gradients."""
    if not uses_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)
    return _onednn(x, weight, bias) if x.shape[0] > _FEW_ROWS else F.linear(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` for packed tokens [T, in]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _onednn(grad, weight.T, None) if needs_x else None,
            _onednn(grad.T, x.T, None) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

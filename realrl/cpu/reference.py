"""Elementary operations as formulas: model code computes with them, and the kernels must agree with them."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch.nn import functional as F

from realrl.shape import Activation

Rope: TypeAlias = tuple[torch.Tensor, torch.Tensor] | None
"""(cos, sin) of `realrl.model.layers.rope.rope_table`; None where nothing is rotated."""


def activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """Apply silu(x) = x sigmoid(x), or the tanh approximation of GELU (Hendrycks and Gimpel 2016), to each element."""
    return F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [T, heads, head_dim] by the table of a `Rope`."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, x.roll(half, dims=-1), sin)


def window_mask(n_tokens: int, window: int, device: torch.device) -> torch.Tensor:
    """Bool [n_tokens, n_tokens]: True where token i sees token j, that is where i - window < j <= i."""
    return torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=device).tril_().triu_(1 - window)

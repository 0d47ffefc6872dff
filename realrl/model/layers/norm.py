"""The norms of the families: RMSNorm, with the weight stored as it is or minus one, and LayerNorm."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from realrl.shape import NormKind


class Norm(nn.Module):
    """Normalises the last dim; statistics are in float32 whatever the dtype.

    "rms" is x / rms(x) * weight (Zhang and Sennrich 2019), or * (1 + weight) with an offset; "layer" is
    (x - mean(x)) / std(x) * weight + bias (Ba et al. 2016).

    Args:
        weight: [size].
        bias: [size]; "layer" only.
        kind: "rms" or "layer".
        eps: added to the mean square, or to the variance.
        has_offset: True if the stored weight is the factor minus one; "rms" only.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, *, kind: NormKind, eps: float, has_offset: bool
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.kind: NormKind = kind
        self.eps = eps
        self.has_offset = has_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (x.shape[-1],)
        if self.kind == "layer":
            return F.layer_norm(x, size, self.weight, self.bias, self.eps)
        if self.has_offset:  # not in bfloat16, in which 1 + weight loses most of a small weight's bits
            wide = torch.promote_types(x.dtype, torch.float32)
            return F.rms_norm(x.to(wide), size, 1.0 + self.weight.to(wide), self.eps).to(x.dtype)
        return F.rms_norm(x, size, self.weight, self.eps)

    def frozen(self, dtype: torch.dtype) -> Norm:
        """A copy for activations of `dtype`, without gradient; it may share memory with this norm."""
        weight, bias = (
            None if p is None else nn.Parameter(p.detach().to(dtype), requires_grad=False)
            for p in (self.weight, self.bias)
        )
        assert weight is not None
        return Norm(weight, bias, kind=self.kind, eps=self.eps, has_offset=self.has_offset)

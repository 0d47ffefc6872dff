"""The norms of the families: RMSNorm, with the weight stored as it is or minus one, and LayerNorm."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from realrl.model.parallel import TensorParallel
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

    def by(self, mean_square: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., size] by a mean square [..., 1] in float32 or better, as "rms" does by its own."""
        wide = mean_square.dtype
        factor = 1.0 + self.weight.to(wide) if self.has_offset else self.weight.to(wide)
        return (x.to(wide) * (mean_square + self.eps).rsqrt() * factor).to(x.dtype)

    def frozen(self, dtype: torch.dtype) -> Norm:
        """A copy for activations of `dtype`, without gradient; it may share memory with this norm."""
        weight, bias = (
            None if p is None else nn.Parameter(p.detach().to(dtype), requires_grad=False)
            for p in (self.weight, self.bias)
        )
        assert weight is not None
        return Norm(weight, bias, kind=self.kind, eps=self.eps, has_offset=self.has_offset)


class QKNorm(Norm):
    """RMSNorm of the queries or the keys: of each head, or of all heads together, those of other ranks included.

    Args:
        weight: [D]; or [heads * D] of this rank's heads, where they are normalised together.
        eps, has_offset: see `Norm`.
        is_joint: all heads are normalised together.
        parallel: the ranks that hold the other heads; with fewer heads than ranks, equally many hold the same one.
    """

    def __init__(
        self, weight: nn.Parameter, *, eps: float, has_offset: bool, is_joint: bool, parallel: TensorParallel
    ) -> None:
        super().__init__(weight, None, kind="rms", eps=eps, has_offset=has_offset)
        self.is_joint = is_joint
        self._parallel = parallel

    def heads(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        """Normalise x [T, heads, D]; `n_rows` is T."""
        if not self.is_joint:
            return self(x)
        flat = x.flatten(1)
        if self._parallel.tp_size == 1:
            return self(flat).view_as(x)
        share = self._parallel.leave(mean_square(flat) / self._parallel.tp_size)
        return self.by(self._parallel.enter(share, n_rows), flat).view_as(x)


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """The mean square [..., 1] of x [..., size], in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True)

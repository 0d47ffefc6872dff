"""What the MLP applies between its matrices."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from realrl.shape import Activation


def activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """silu(x) = x sigmoid(x), or the tanh approximation of GELU (Hendrycks and Gimpel 2016), element by element."""
    return F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh")

"""The linear layer of a decoder."""

from __future__ import annotations

import torch
from torch import nn

from realrl.cpu import linear


class Linear(nn.Linear):
    """`nn.Linear` for packed tokens [T, in], uninitialised."""

    def reset_parameters(self) -> None:
        """Leave the parameters alone: numbers come from files, other ranks or `realrl.model.init`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` without the bias."""
        return linear(x, self.weight)

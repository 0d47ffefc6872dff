"""Heads on the decoder's hidden states: logits, or one number per token."""

from __future__ import annotations

import torch
from torch import nn

from realrl.cpu import linear, softcap


class LMHead(nn.Module):
    """Logits over the vocabulary, or over this rank's part of it.

    Args:
        weight: [V, H]; may be the embedding's own parameter (tied). In a tensor-parallel group, this rank's rows.
        vocab_start: token of the first row.
        softcap: bound of logits; None for none.
    """

    def __init__(self, weight: nn.Parameter, *, vocab_start: int = 0, softcap: float | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.vocab_start = vocab_start
        self.softcap = softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] of the chosen rows `hidden` [N, H], in the parameters' dtype."""
        return softcap(linear(hidden, self.weight), self.softcap)


class ScalarHead(nn.Module):
    """Value or reward: a linear map to one number, computed in float32. `weight` [1, H], whole on every rank."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 scores [N] of `hidden` [N, H]."""
        return hidden.float() @ self.weight[0].float()

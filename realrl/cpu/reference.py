"""Elementary operations as formulas: model code computes with them, and the kernels must agree with them."""

from __future__ import annotations

from dataclasses import dataclass
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
    """Rotate `x` [T, heads, head_dim] by the table of a `Rope`; dims that a narrower table lacks stay as they are."""
    n = cos.shape[-1]
    if n < x.shape[-1]:
        return torch.cat((rotate(x[..., :n], cos, sin), x[..., n:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(n // 2, dims=-1), sin)


def softcap(x: torch.Tensor, bound: float | None) -> torch.Tensor:
    """Bound x smoothly: bound * tanh(x / bound) (Gemma Team 2024, Gemma 2); None leaves it as it is."""
    return x if bound is None else torch.tanh(x / bound) * bound


@dataclass(frozen=True)
class ScoreTerms:
    """Treatment of a layer's attention scores that no fused kernel knows.

    Attributes:
        softcap: bound of scaled scores; None for none.
        sinks: [N], a score for each head that takes part in the softmax and adds nothing; None for none.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def weights(self, scores: torch.Tensor, is_hidden: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Turn scaled scores [..., C] into weights of C tokens, of which some are hidden; at least one is not.

        Args:
            sinks: `sinks` in a shape that fits [..., 1].
        """
        scores = softcap(scores, self.softcap).masked_fill(is_hidden, -torch.inf)
        if sinks is None:
            return scores.softmax(-1)
        last = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, last), dim=-1).softmax(-1)[..., :-1]


def attend_by_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_hidden: torch.Tensor, terms: ScoreTerms
) -> torch.Tensor:
    """Attention of q [G, N, L, D] over k, v [G, K, C, D], N a multiple of K, with all scores at once; [G, N, L, D].

    Scores and weights are in float32 or better.

    Args:
        is_hidden: bool [L, C], True where a row does not see a column.
    """
    n_groups, n_kv_heads = q.shape[1] // k.shape[1], k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.unflatten(1, (n_kv_heads, n_groups)).to(wide) * q.shape[-1] ** -0.5
    scores = queries @ k.to(wide)[:, :, None].transpose(-1, -2)  # [G, K, N / K, L, C]
    sinks = None if terms.sinks is None else terms.sinks.view(n_kv_heads, n_groups, 1, 1)
    out = terms.weights(scores, is_hidden, sinks).to(v.dtype) @ v[:, :, None]
    return out.flatten(1, 2)


def window_mask(n_tokens: int, window: int, device: torch.device) -> torch.Tensor:
    """Bool [n_tokens, n_tokens]: True where token i sees token j, that is where i - window < j <= i."""
    return torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=device).tril_().triu_(1 - window)

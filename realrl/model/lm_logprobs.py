"""Log-probabilities of given tokens from hidden states, without holding [N, V] logits of many tokens at once.

N rows, H hidden, V vocabulary. Forward and backward walk over chunks of rows. The backward pass needs each chunk's
log-softmax again: it is kept when all of them together are small, and recomputed otherwise.

With z = (hidden @ weight.T) / temperature, p = softmax(z), target y, and gradients g of the log-probability and e of
the entropy S = -sum p log p:  d/dz = g * (onehot(y) - p) - e * p * (log p + S).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from realrl.model.linear import matmul

_CHUNK_BYTES = 64 << 20  # float32 logits of one chunk
_KEEP_BYTES = 256 << 20  # float32 log-softmax kept for the backward pass, per call


def lm_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return float32 [N] log-probabilities of `targets` and, on request, float32 [N] entropies (nats).

    Both carry gradient to `hidden` and `weight`.

    Args:
        hidden: [N, H].
        weight: [V, H], the language-model head.
        targets: int64 [N].
        temperature: divides the logits; 0 (greedy sampling) counts as 1.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    logprobs, entropy = _LMLogprobs.apply(hidden, weight, targets, scale, with_entropy)
    return logprobs, entropy if with_entropy else None


class _LMLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n_rows, n_vocab = hidden.shape[0], weight.shape[0]
        size = max(1, _CHUNK_BYTES // (4 * n_vocab))
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        keep = needs_grad and 4 * n_rows * n_vocab <= _KEEP_BYTES
        kept: list[torch.Tensor] = []
        logprobs = torch.empty(n_rows, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty(n_rows if with_entropy else 0, dtype=torch.float32, device=hidden.device)
        for start in range(0, n_rows, size):
            rows = slice(start, start + size)
            log_p = _log_softmax(hidden[rows], weight, scale)
            logprobs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
            if with_entropy:
                entropy[rows] = _entropy(log_p)
            if keep:
                kept.append(log_p)
        ctx.save_for_backward(hidden, weight, targets, entropy, *kept)
        ctx.scale, ctx.chunk_size, ctx.with_entropy = scale, size, with_entropy
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, weight, targets, entropy, *kept = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: torch.Tensor | None = None
        for i in range(math.ceil(hidden.shape[0] / ctx.chunk_size)):
            rows = slice(i * ctx.chunk_size, (i + 1) * ctx.chunk_size)
            log_p = kept[i] if kept else _log_softmax(hidden[rows], weight, ctx.scale)
            g = grad_logprobs[rows, None] * ctx.scale
            grad_z = log_p.exp()
            if ctx.with_entropy:
                e = grad_entropy[rows, None] * ctx.scale
                grad_z.mul_(torch.addcmul(e * entropy[rows, None] + g, e, log_p).neg_())
            else:
                grad_z.mul_(-g)
            grad_z.scatter_add_(1, targets[rows, None], g)
            grad_z = grad_z.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = matmul(grad_z, weight)
            if wants_weight:
                grad_weight = _accumulate(grad_weight, grad_z, hidden[rows])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        elif wants_weight:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight, None, None, None


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    logits = matmul(hidden, weight.T)
    if scale != 1.0:
        logits = logits.float().mul_(scale)
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def _entropy(log_p: torch.Tensor) -> torch.Tensor:
    return -torch.linalg.vecdot(log_p.exp(), log_p)


def _accumulate(total: torch.Tensor | None, grad_z: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Add grad_z.T @ hidden [V, H]; several chunks sum in float32 also when they are computed in bf16."""
    part = matmul(grad_z.T, hidden)
    return part if total is None else total.float().add_(part)

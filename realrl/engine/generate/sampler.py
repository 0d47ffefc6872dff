"""From logits and one uniform number per row to a token and its log-probabilities.

Inverse-CDF sampling in vocabulary order: rows do not see each other, and a logit that differs by rounding between two
batch shapes changes the token only if the uniform lands within rounding distance of a boundary.

Shapes: B rows, V vocabulary, M candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from realrl.config.schema import GenerationConfig

_BLOCK = 256  # the cumulative sum first runs over blocks of this many tokens, then inside the chosen one
_FIRST_CANDIDATES = 256  # top-p sorts this many tokens before it tries more


@dataclass(frozen=True)
class SampledTokens:
    """One token per row.

    Attributes:
        tokens: int64 [B].
        logprobs: float32 [B] under the distribution that was sampled from; 0 when it is a single point (temperature 0).
        policy_logprobs: float32 [B] under softmax(logits / temperature) alone; with temperature 1 if it is 0.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    policy_logprobs: torch.Tensor


def find_invalid_row(logits: torch.Tensor) -> int | None:
    """The first row of [B, V] that holds NaN or positive infinity, or no finite number at all."""
    bad = ~torch.isfinite(logits.amax(dim=-1))
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    generation: GenerationConfig,
    *,
    forbidden: torch.Tensor | None = None,
) -> SampledTokens:
    """Choose one token per row.

    Top-k is applied first; top-p then keeps the smallest set of most probable tokens whose renormalised mass reaches
    `top_p` (Holtzman et al. 2020, nucleus sampling).

    Args:
        logits: [B, V], floating point, finite where a token is possible.
        uniforms: float64 [B] in [0, 1).
        forbidden: bool [B, V] or [V], tokens that cannot be chosen (stop tokens before the minimum length).
    """
    scaled = logits.float()
    if generation.temperature not in (0.0, 1.0):
        scaled = scaled / generation.temperature
    policy = torch.log_softmax(scaled, dim=-1)
    allowed = policy if forbidden is None else policy.masked_fill(forbidden, -torch.inf)

    if generation.temperature == 0.0:
        tokens = allowed.argmax(dim=-1)
        logprobs = torch.zeros(len(tokens), device=logits.device)
    elif 0 < generation.top_k < logits.shape[-1] or generation.top_p < 1.0:
        tokens, logprobs = _sample_filtered(allowed, uniforms, generation.top_k, generation.top_p)
    else:
        tokens = _invert_cdf_blocked(torch.softmax(allowed, dim=-1), uniforms)
        distribution = policy if forbidden is None else torch.log_softmax(allowed, dim=-1)
        logprobs = _pick(distribution, tokens)
    return SampledTokens(tokens, logprobs, _pick(policy, tokens))


def _pick(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, indices[:, None]).squeeze(-1)


def _invert_cdf(weights: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index of [B, M] non-negative weights whose cumulative sum exceeds the target, and what remains of it.

    A target at or beyond the total (rounding) falls on the last index with weight.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    below_total = torch.nextafter(cumulative[:, -1], cumulative.new_zeros(()))
    targets = torch.minimum(targets, below_total)
    indices = torch.searchsorted(cumulative, targets[:, None], right=True).squeeze(-1)
    before = _pick(cumulative, indices) - _pick(weights, indices)
    return indices, (targets - before).clamp_(min=0.0)


def _invert_cdf_blocked(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [B] for probabilities [B, V]; one pass over V, then one over a single block."""
    n_missing = -probs.shape[-1] % _BLOCK
    blocks = (F.pad(probs, (0, n_missing)) if n_missing else probs).unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(dim=-1)
    block_indices, rest = _invert_cdf(sums, uniforms * sums.sum(dim=-1, dtype=torch.float64))
    chosen = blocks[torch.arange(len(probs), device=probs.device), block_indices]
    return block_indices * _BLOCK + _invert_cdf(chosen, rest)[0]


def _sample_filtered(
    logprobs: torch.Tensor, uniforms: torch.Tensor, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities after top-k and top-p, from normalised or masked log-probabilities [B, V]."""
    vocab_size = logprobs.shape[-1]
    if 0 < top_k < vocab_size:
        values, tokens = logprobs.topk(top_k, dim=-1)
        kept = values.exp()
        if top_p < 1.0:
            kept = _nucleus(kept, top_p * kept.sum(dim=-1, dtype=torch.float64))
        return _sample_candidates(kept, tokens, uniforms)

    mass = top_p * logprobs.exp().sum(dim=-1, dtype=torch.float64)
    chosen = torch.empty_like(uniforms, dtype=torch.int64)
    chosen_logprobs = torch.empty_like(logprobs[:, 0])
    rows = torch.arange(len(logprobs), device=logprobs.device)
    n_candidates = _FIRST_CANDIDATES
    while len(rows):
        n_candidates = min(n_candidates, vocab_size)
        values, tokens = logprobs[rows].topk(n_candidates, dim=-1)
        probs = values.exp()
        enough = probs.sum(dim=-1, dtype=torch.float64) >= mass[rows]
        if n_candidates == vocab_size:
            enough[:] = True
        done = rows[enough]
        kept = _nucleus(probs[enough], mass[done])
        chosen[done], chosen_logprobs[done] = _sample_candidates(kept, tokens[enough], uniforms[done])
        rows = rows[~enough]
        n_candidates *= 16
    return chosen, chosen_logprobs


def _nucleus(probs: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Zero what comes after the mass [B] is reached in descending probabilities [B, M]; the first always stays."""
    before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
    dropped = before >= mass[:, None]
    dropped[:, 0] = False
    return probs.masked_fill(dropped, 0.0)


def _sample_candidates(
    kept: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample among candidates [B, M] with weights `kept`, in vocabulary order.

    In descending order two tokens of nearly equal probability could swap places between batch shapes, and with them
    everything that the uniform number points at.
    """
    tokens, order = tokens.sort(dim=-1)
    kept = kept.gather(-1, order)
    total = kept.sum(dim=-1, dtype=torch.float64)
    indices, _ = _invert_cdf(kept, uniforms * total)
    return _pick(tokens, indices), (_pick(kept, indices).double() / total).log().float()

"""Sampling of a token per row from logits and one uniform number, with its log-probabilities.

Inverse-CDF sampling in vocabulary order: rows do not see each other, and a logit that differs by rounding between two
batch shapes changes the token only if the uniform lands within rounding distance of a boundary.

Shapes: B rows, V vocabulary, M candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from realrl.config.schema import GenerationConfig

_BLOCK = 256  # the cumulative sum first runs over blocks of this many tokens, then inside the chosen one
_FIRST_CANDIDATES = 256  # top-p sorts this many tokens before it tries more
_ALL_BUT_STOPPING = 0.99


@dataclass(frozen=True)
class SampledTokens:
    """One token per row.

    Attributes:
        tokens: int64 [B].
        logprobs: float32 [B] under the distribution that was sampled from; 0 if it is a single point (temperature 0).
        policy_logprobs: float32 [B] under softmax(logits / temperature) alone; with temperature 1 if it is 0.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    policy_logprobs: torch.Tensor


class InvalidLogitsError(ArithmeticError):
    """Logits hold NaN, infinity, or no token that can be chosen; `row` is the first such row."""

    def __init__(self, row: int) -> None:
        super().__init__(f"the logits of row {row} are not finite")
        self.row = row


SamplingOp = Callable[[torch.Tensor, torch.Tensor, npt.NDArray[np.bool_]], SampledTokens]
"""Function (logits, uniforms, is_early) -> one token per row; see `Sampler.sample`."""


def keeps_all(generation: GenerationConfig, vocab_size: int) -> bool:
    """True if every token of the vocabulary can be drawn."""
    return generation.top_p == 1.0 and not 0 < generation.top_k < vocab_size


class Sampler:
    """Sampling by torch's operations, within buffers that live as long as a generate call.

    Top-k is applied first; top-p then keeps the smallest set of most probable tokens whose renormalised mass reaches
    `top_p` (Holtzman et al. 2020, nucleus sampling).

    Args:
        generation: temperature and filters.
        stop_ids: tokens that rows below the minimum length cannot take.
        max_rows: largest number of rows at a time.
        vocab_size: V.
        device: device of the logits.
    """

    def __init__(
        self,
        generation: GenerationConfig,
        stop_ids: Sequence[int],
        *,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._generation = generation
        self._stops = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        # allocated once: blocks of this size go back to the system when freed, and cost a page fault per 4 KiB when new
        self._scaled, self._probs = torch.empty(2, max_rows, vocab_size, device=device)

    def sample(self, logits: torch.Tensor, uniforms: torch.Tensor, is_early: npt.NDArray[np.bool_]) -> SampledTokens:
        """Choose one token per row.

        Args:
            logits: [B, V], any floating-point type.
            uniforms: float64 [B] in [0, 1).
            is_early: bool [B], True for rows that cannot stop yet.

        Raises:
            InvalidLogitsError: a row with NaN, infinity, or nothing but minus infinity to choose from.
        """
        probs = self._policy_probs(logits)
        invalid = torch.isnan(probs[:, 0])  # the softmax spreads a single NaN or infinity over its row
        if bool(invalid.any()):
            raise InvalidLogitsError(int(invalid.nonzero()[0]))
        if not (len(self._stops) and is_early.any()):
            return self._draw(probs, uniforms)
        allowed = self._bar_stops(probs, logits, torch.from_numpy(np.flatnonzero(is_early)).to(probs.device))
        drawn = self._draw(probs, uniforms)
        return replace(drawn, policy_logprobs=drawn.policy_logprobs + allowed)

    def draw(
        self, logits: torch.Tensor, uniforms: torch.Tensor, is_early: torch.Tensor | None
    ) -> tuple[SampledTokens, torch.Tensor]:
        """Choose one token per row as `sample` does, by operations that the host launches without a wait.

        Args:
            is_early: bool [B], True for rows that cannot stop yet; None if every row can.

        Returns:
            The tokens, and bool [B]: False where the row needs `sample`, and its token means nothing. Its logits are
            invalid, the policy all but stops where it cannot, or the nucleus is larger than the first candidates.
        """
        probs = self._policy_probs(logits)
        is_settled = torch.isfinite(probs[:, 0])
        if is_early is not None:
            stops = probs[:, self._stops]
            is_settled &= ~is_early | (stops.sum(dim=-1) <= _ALL_BUT_STOPPING)
            probs[:, self._stops] = stops.masked_fill(is_early[:, None], 0.0)
        probs.masked_fill_(~is_settled[:, None], 1.0)  # a search among NaN ends outside of the vocabulary
        generation = self._generation
        if generation.temperature == 0.0 or generation.top_p == 1.0 or 0 < generation.top_k < probs.shape[-1]:
            return self._draw(probs, uniforms), is_settled
        mass = generation.top_p * probs.sum(dim=-1, dtype=torch.float64)
        tokens, kept, is_enough = _draw_nucleus(probs, uniforms, mass, _FIRST_CANDIDATES)
        return _sampled(probs, tokens, kept), is_settled & is_enough

    def _bar_stops(self, probs: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Take the stop tokens out of some rows of the policy's probabilities.

        Returns:
            float32 [B]: the summand that turns a row's new log-probabilities into the policy's. It is 0 unless the
            policy all but stops: there the other tokens' probabilities are scaled up, many being 0 in float32.
        """
        rest = torch.zeros(len(probs), device=probs.device)
        stopping = rows[probs[rows[:, None], self._stops].sum(dim=-1) > _ALL_BUT_STOPPING]
        probs[rows[:, None], self._stops] = 0.0
        if len(stopping):
            scaled = logits[stopping].float() / (self._generation.temperature or 1.0)
            total = scaled.logsumexp(dim=-1)
            scaled[:, self._stops] = -torch.inf
            rest[stopping] = scaled.logsumexp(dim=-1) - total
            if bool(rest.isinf().any()):
                raise InvalidLogitsError(int(rest.isinf().nonzero()[0]))
            probs[stopping] = torch.softmax(scaled, dim=-1)
        return rest

    def _policy_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute softmax(logits / temperature), float32 [B, V], with temperature 1 if it is 0."""
        temperature = self._generation.temperature or 1.0
        if temperature != 1.0 or logits.dtype != torch.float32:
            scaled = self._scaled[: len(logits)].copy_(logits)
            logits = scaled if temperature == 1.0 else scaled.div_(temperature)
        return torch.softmax(logits, dim=-1, out=self._probs[: len(logits)])

    def _draw(self, probs: torch.Tensor, uniforms: torch.Tensor) -> SampledTokens:
        generation = self._generation
        if generation.temperature == 0.0:
            tokens = probs.argmax(dim=-1)
            policy_logprobs = _pick(probs, tokens).log()
            return SampledTokens(tokens, torch.zeros_like(policy_logprobs), policy_logprobs)
        if 0 < generation.top_k < probs.shape[-1]:
            tokens, mass = _draw_top_k(probs, uniforms, generation.top_k, generation.top_p)
        elif generation.top_p < 1.0:
            tokens, mass = _draw_top_p(probs, uniforms, generation.top_p)
        else:
            tokens, mass = _draw_any(probs, uniforms)
        return _sampled(probs, tokens, mass)


def _sampled(probs: torch.Tensor, tokens: torch.Tensor, mass: torch.Tensor) -> SampledTokens:
    chosen = _pick(probs, tokens)
    return SampledTokens(tokens, (chosen.double() / mass).log().float(), chosen.log())


def _pick(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, indices[:, None]).squeeze(-1)


def _invert_cdf(weights: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the first index whose cumulative weight exceeds the target; returns it and the target's rest in it.

    A target at or beyond the total (rounding) falls on the last index with weight.

    Args:
        weights: [B, M], not negative.
        targets: float64 [B].
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    below_total = torch.nextafter(cumulative[:, -1], cumulative.new_zeros(()))
    targets = torch.minimum(targets, below_total)
    indices = torch.searchsorted(cumulative, targets[:, None], right=True).squeeze(-1)
    before = _pick(cumulative, indices) - _pick(weights, indices)
    return indices, (targets - before).clamp_(min=0.0)


def _draw_any(probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [B], and return the total mass [B] too; one pass over V, then one over a single block."""
    n_missing = -probs.shape[-1] % _BLOCK
    blocks = (F.pad(probs, (0, n_missing)) if n_missing else probs).unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(dim=-1)
    mass = sums.sum(dim=-1, dtype=torch.float64)
    block_indices, rest = _invert_cdf(sums, uniforms * mass)
    chosen = blocks[torch.arange(len(probs), device=probs.device), block_indices]
    return block_indices * _BLOCK + _invert_cdf(chosen, rest)[0], mass


def _draw_top_k(
    probs: torch.Tensor, uniforms: torch.Tensor, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [B], and return the mass [B] of the tokens kept."""
    kept, tokens = probs.topk(top_k, dim=-1)
    if top_p < 1.0:
        kept = _nucleus(kept, top_p * kept.sum(dim=-1, dtype=torch.float64))
    return _draw_candidate(kept, tokens, uniforms)


def _draw_top_p(probs: torch.Tensor, uniforms: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [B], and return the mass [B] of the tokens kept.

    Sorting the vocabulary is slow and rarely needed: only rows whose nucleus is larger than the candidates try more.
    """
    mass = top_p * probs.sum(dim=-1, dtype=torch.float64)
    chosen, chosen_mass = torch.empty_like(uniforms, dtype=torch.int64), torch.empty_like(uniforms)
    rows = torch.arange(len(probs), device=probs.device)
    n_candidates = _FIRST_CANDIDATES
    while len(rows):
        tokens, kept, is_enough = _draw_nucleus(probs[rows], uniforms[rows], mass[rows], n_candidates)
        done = rows[is_enough]
        chosen[done], chosen_mass[done] = tokens[is_enough], kept[is_enough]
        rows = rows[~is_enough]
        n_candidates *= 16
    return chosen, chosen_mass


def _draw_nucleus(
    probs: torch.Tensor, uniforms: torch.Tensor, mass: torch.Tensor, n_candidates: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw tokens [B] among the smallest set of the most probable that reaches the mass [B].

    Returns:
        The tokens, the mass [B] of the tokens kept, and bool [B]: False where the candidates do not reach the mass.
    """
    candidates, tokens = probs.topk(min(n_candidates, probs.shape[-1]), dim=-1)
    is_enough = candidates.sum(dim=-1, dtype=torch.float64) >= mass
    if n_candidates >= probs.shape[-1]:
        is_enough = torch.ones_like(is_enough)
    return *_draw_candidate(_nucleus(candidates, mass), tokens, uniforms), is_enough


def _nucleus(probs: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Zero descending probabilities [B, M] after the mass [B] is reached; the first always stays."""
    before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
    dropped = before >= mass[:, None]
    dropped[:, 0] = False
    return probs.masked_fill(dropped, 0.0)


def _draw_candidate(
    kept: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among candidates [B, M] with weights `kept`, in vocabulary order, and return their mass [B] too.

    In descending order two tokens of nearly equal probability could swap places between batch shapes, and the same
    uniform number would give another token.
    """
    tokens, order = tokens.sort(dim=-1)
    kept = kept.gather(-1, order)
    mass = kept.sum(dim=-1, dtype=torch.float64)
    indices, _ = _invert_cdf(kept, uniforms * mass)
    return _pick(tokens, indices), mass

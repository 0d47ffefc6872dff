"""Log-probabilities of given tokens from hidden states, without holding [N, V] logits of many tokens at once.

N rows, H hidden, V vocabulary. Rows are processed in chunks, one matrix product each; inside a chunk the softmax walks
over blocks of few rows that stay in the CPU's cache. The logits of a single chunk are kept for the backward pass;
those of several are computed again.

With z = (hidden @ weight.T) / temperature, p = softmax(z), target y, and gradients g of the log-probability and e of
the entropy S = -sum p log p:  d/dz = g * (onehot(y) - p) - e * p * (log p + S). Several targets add up. A head
that bounds its logits does so before the temperature.

Over a tensor-parallel group, each rank r has the logits of its part of the vocabulary, and from them L_r, the log sum
exp of its part, and S_r, the entropy of the softmax of its part. The whole follows from a few numbers per row:
L = log sum_r exp L_r  and  S = sum_r w_r (S_r + L - L_r)  with w_r = exp(L_r - L).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from realrl.cpu import matmul
from realrl.model.layers.heads import LMHead
from realrl.model.parallel import UNSHARDED, TensorParallel
from realrl.plan.memory.buffers import LOGITS_BLOCK, LOGITS_CHUNK


def lm_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor | LMHead,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    parallel: TensorParallel = UNSHARDED,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return float32 log-probabilities of `targets`, in their shape, and, on request, float32 [N] entropies (nats).

    Both carry gradient to `hidden` and `weight`. Over a group, the results are equal on all ranks. The gradient of
    `hidden` is the summand of this rank's part of the vocabulary: `parallel.enter` before this adds the summands up.

    Args:
        hidden: [N, H], equal on all ranks of the group.
        head: the language-model head, or this rank's rows of it; or the weight [V, H] of a whole one.
        targets: int64 [N], or [N, K] for K tokens at a time, numbered over the whole vocabulary.
        temperature: divides the logits; 0 (greedy sampling) counts as 1.
        parallel: the group that shares the vocabulary.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    if isinstance(head, torch.Tensor):
        weight, place = head, _Place(0, None, parallel)
    else:
        weight, place = head.weight, _Place(head.vocab_start, head.softcap, parallel)
    columns = targets.view(len(targets), -1) if len(targets) else targets.view(0, targets.shape[-1] or 1)
    logprobs, entropy = _LMLogprobs.apply(hidden, weight, columns, scale, with_entropy, place)
    return logprobs.view(targets.shape), entropy if with_entropy else None


@dataclass(frozen=True)
class _Place:
    """The place of this rank's rows of the head in the vocabulary, and the bound of their logits."""

    start: int
    softcap: float | None
    parallel: TensorParallel

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        z = matmul(hidden, weight.T)
        return z if self.softcap is None else z.div_(self.softcap).tanh_().mul_(self.softcap)

    def through_softcap(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The gradient of logits before their bound, from that of bounded ones; overwrites `grad`."""
        if self.softcap is None:
            return grad
        return grad.addcmul_(grad, (logits / self.softcap).square_(), value=-1.0)

    @property
    def is_whole(self) -> bool:
        return self.parallel.tp_size == 1

    def local(self, targets: torch.Tensor, n_rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Targets as rows of this rank's weight, and a mask of those on other ranks, which get row 0."""
        if self.is_whole:
            return targets, None
        rows = targets - self.start
        is_elsewhere = (rows < 0) | (rows >= n_rows)
        return rows.masked_fill_(is_elsewhere, 0), is_elsewhere


class _LMLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        with_entropy: bool,
        place: _Place,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n_rows = hidden.shape[0]
        log_norm = torch.empty(n_rows, dtype=torch.float32, device=hidden.device)  # log sum exp z
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_norm if with_entropy else log_norm[:0])
        chunks = _chunks(n_rows, weight.shape[0])
        logits = hidden.new_empty(0)
        local, is_elsewhere = place.local(targets, weight.shape[0])
        for rows in chunks:
            logits = place.logits(hidden[rows], weight)
            chosen = logits.gather(1, local[rows]).float() * scale
            _reduce(logits, scale, log_norm[rows], entropy[rows] if with_entropy else None)
            if is_elsewhere is None:
                torch.sub(chosen, log_norm[rows, None], out=logprobs[rows])
            else:
                logprobs[rows] = chosen.masked_fill_(is_elsewhere[rows], 0.0)
        if not place.is_whole:
            _merge(log_norm, entropy, logprobs, place.parallel)
        kept = [logits] if len(chunks) == 1 and any(ctx.needs_input_grad[:2]) else []
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy, *kept)
        ctx.scale, ctx.place = scale, place
        ctx.set_materialize_grads(False)  # an entropy that is only measured costs nothing here
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy, *kept = ctx.saved_tensors
        g, e = grads
        if g is None:
            g = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: torch.Tensor | None = None
        local, is_elsewhere = ctx.place.local(targets, weight.shape[0])
        g_chosen = g if is_elsewhere is None else g.masked_fill(is_elsewhere, 0.0)
        g_total = g.sum(1)
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            logits = kept[0] if kept else ctx.place.logits(hidden[rows], weight)
            extra = None if e is None else (e[rows], entropy[rows])
            chosen = (local[rows], g_chosen[rows])
            grad_logits = _logits_gradient(logits, chosen, ctx.scale, log_norm[rows], g_total[rows], extra)
            grad_logits = ctx.place.through_softcap(grad_logits, logits)
            if grad_hidden is not None:
                grad_hidden[rows] = matmul(grad_logits, weight)
            if needs_weight:
                part = matmul(grad_logits.T, hidden[rows])
                grad_weight = part if grad_weight is None else grad_weight.float().add_(part)
        if needs_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _merge(log_norm: torch.Tensor, entropy: torch.Tensor, chosen: torch.Tensor, parallel: TensorParallel) -> None:
    """Turn each rank's part, in place, into the whole: log sum exp z, entropy (may be empty) and log-probabilities."""
    top = parallel.reduce_max(log_norm.clone())
    shifted = log_norm - top
    w = shifted.exp()
    parts = [w] if len(entropy) == 0 else [w, w * (entropy - shifted)]
    sums = parallel.reduce_sum(torch.cat([chosen.T, torch.stack(parts)]))
    chosen_z, (total, *weighted) = sums[: chosen.shape[1]].T, sums[chosen.shape[1] :]
    log_total = total.log()
    torch.add(top, log_total, out=log_norm)
    torch.sub(chosen_z, log_norm[:, None], out=chosen)
    for mean in weighted:
        torch.add(log_total, mean / total, out=entropy)


def _reduce(logits: torch.Tensor, scale: float, log_norm: torch.Tensor, entropy: torch.Tensor | None) -> None:
    """Write log sum exp z and, where asked for, log sum exp c - sum c exp(c) / sum exp c with c = z - max z."""
    for block in _blocks(logits):
        z = logits[block].float().mul(scale) if scale != 1.0 else logits[block].to(torch.float32, copy=True)
        top = z.amax(1, keepdim=True)
        z.sub_(top)
        p = z.exp() if entropy is not None else z.exp_()
        total = p.sum(1)
        log_total = total.log()
        torch.add(top[:, 0], log_total, out=log_norm[block])
        if entropy is not None:
            dot = torch.bmm(p[:, None], z[:, :, None])[:, 0, 0]
            torch.sub(log_total, dot.div_(total), out=entropy[block])


def _logits_gradient(
    logits: torch.Tensor,
    chosen: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    log_norm: torch.Tensor,
    g: torch.Tensor,
    extra: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Compute scale * (sum of g_k onehot(target_k) - g * p - e * p * (log p + S)), in the dtype of `logits`.

    Args:
        chosen: targets [n, K], and g_k [n, K], set to 0 where another rank has the target's logit.
        g: [n], the sum of g_k over all targets.
        extra: (e, S) if the entropy has a gradient.
    """
    targets, g_chosen = chosen
    grad_logits = torch.empty_like(logits)
    for block in _blocks(logits):
        log_p = logits[block].float().mul(scale) if scale != 1.0 else logits[block].to(torch.float32, copy=True)
        log_p.sub_(log_norm[block, None])
        if extra is None:
            log_p.exp_().mul_(g[block, None] * -scale)
        else:
            e, entropy = (x[block, None] for x in extra)
            p = log_p.exp()
            log_p.add_(entropy).mul_(e).add_(g[block, None]).mul_(-scale).mul_(p)
        log_p.scatter_add_(1, targets[block], g_chosen[block] * scale)
        grad_logits[block] = log_p
    return grad_logits


def _chunks(n_rows: int, n_vocab: int) -> list[slice]:
    """Divide the rows into equal slices of at most `LOGITS_CHUNK` logits each (or a single row)."""
    most = max(1, LOGITS_CHUNK // n_vocab)
    size = math.ceil(n_rows / max(1, math.ceil(n_rows / most)))
    return [slice(start, start + size) for start in range(0, n_rows, max(1, size))]


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    n_rows, n_vocab = logits.shape
    size = max(1, LOGITS_BLOCK // n_vocab) if logits.device.type == "cpu" else n_rows
    return (slice(start, start + size) for start in range(0, n_rows, max(1, size)))


@torch.no_grad()
def top_logprobs(
    hidden: torch.Tensor,
    head: LMHead,
    k: int,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    parallel: TensorParallel = UNSHARDED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest tokens, int64 [N, k], most likely first, and their float32 log-probabilities; no gradient.

    Args:
        hidden: [N, H], equal on all ranks of the group.
        head: the language-model head, or this rank's rows of it.
        k: at most `vocab_size`.
        temperature: divides the logits; 0 counts as 1.
        vocab_size: size of the whole vocabulary.
        parallel: the group that shares the vocabulary; the results are equal on all its ranks.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    tokens = torch.empty((hidden.shape[0], k), dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty((hidden.shape[0], k), dtype=torch.float32, device=hidden.device)
    for rows in _chunks(hidden.shape[0], vocab_size):
        z = parallel.gather_logits(head(hidden[rows]), vocab_size).float() * scale
        top, tokens[rows] = z.topk(k, dim=1)
        logprobs[rows] = top - z.logsumexp(1, keepdim=True)
    return tokens, logprobs

"""Bytes of what comes after the blocks: the final norm, the head, and what is computed on logits."""

from __future__ import annotations

import math

from realrl.plan.memory.buffers import (
    FLOAT32,
    LOGITS_BLOCK,
    LOGITS_CHUNK,
    PRODUCT_PIECE,
)
from realrl.plan.memory.formulas.blocks import backward_of_norm
from realrl.plan.memory.formulas.local import Kernels, LocalShape
from realrl.plan.memory.load import Load


def kept_by_ends(local: LocalShape, load: Load, n_tokens: int, kernels: Kernels) -> float:
    """Return bytes kept by final norm and head: hidden states, the scored ones, and logits that fit into one chunk.

    Args:
        n_tokens: tokens of the largest micro-batch that are computed.
    """
    if not local.has_head:
        return 0.0
    h, b = local.hidden, local.element_bytes
    rows = local.row_share * h  # those of the norm's input; its result has all
    norm = rows * local.norm_bytes + h * b
    if not kernels.fused_norms and not local.model.norm_bias:  # the input in float32, and its product with the weight
        norm = rows * FLOAT32 * (2 if local.model.lora is None else 1) + h * b
    if not local.vocabulary:
        return n_tokens * norm + scalar_floats(local, load)
    is_kept = load.n_scored_once * local.vocabulary <= LOGITS_CHUNK
    return n_tokens * norm + load.n_scored * (h + local.vocabulary * is_kept) * b


def scalar_floats(local: LocalShape, load: Load) -> int:
    """Return the bytes of all tokens' hidden states in float32, in which a scalar head computes."""
    return load.n_tokens * local.hidden * FLOAT32 if local.element_bytes < FLOAT32 else 0


def backward_of_last_norm(local: LocalShape, kernels: Kernels) -> float:
    """Return the bytes per token of the last norm's backward pass, when logits and their gradients are gone."""
    if not local.has_head:
        return 0.0
    return local.hidden * local.element_bytes + backward_of_norm(local, kernels)


def backward_of_head(local: LocalShape, load: Load, kernels: Kernels) -> float:
    """Return bytes of gradients of one chunk's logits, and of the head's weight unless it becomes the parameter's.

    The gradient of one of two products with the head waits for that of the other, when its own logits are gone. The sum
    of both comes last.
    """
    if not local.vocabulary:
        return 0.0
    n_scored, accumulates = load.n_scored_once, load.n_mbs > 1  # gradients are added to those of earlier micro-batches
    b, is_trained = local.element_bytes, local.model.lora is None
    weight = local.vocabulary * local.hidden * is_trained
    chunk = logits_chunk(n_scored, local.vocabulary)
    is_whole = chunk == n_scored * local.vocabulary
    logits = chunk * b * (1 if is_whole else 2) + product_floats(chunk, kernels)
    weights = (weight * b if accumulates or b < FLOAT32 else 0) + (0 if is_whole else weight * FLOAT32)
    floats = softmax_floats(chunk, kernels, with_entropy=load.trains_entropy)
    bounded = chunk * b if local.model.logit_softcap is not None else 0  # logits over their bound, beside the gradient
    backward = logits + weights + n_scored * local.hidden * b + max(floats, bounded)
    if load.n_scorings > 1:
        kept = local.vocabulary * b * is_whole
        second = backward + weight * b - (load.n_scored - n_scored) * kept
        backward = max(backward, second, weights + 2 * weight * b - load.n_scored * kept)
    # before it, logits that are not kept beside their softmax
    forward = (0 if is_whole else chunk * b) + max(
        softmax_floats(chunk, kernels, with_entropy=load.with_entropy), product_floats(chunk, kernels)
    )
    return max(backward, forward)


def logits_chunk(n_scored: int, vocabulary: int) -> int:
    n_chunks = max(1, math.ceil(n_scored / max(1, LOGITS_CHUNK // vocabulary)))
    return math.ceil(n_scored / n_chunks) * vocabulary


def softmax_floats(n_logits: int, kernels: Kernels, *, with_entropy: bool) -> int:
    """Return the bytes of float32 copies of logits: shifted, and exponentiated; without entropy one takes the other's
    place. A block lives until the next one is there."""
    n_elements = n_logits if kernels.whole_logits else min(n_logits, 2 * LOGITS_BLOCK)
    return (2 if with_entropy else 1) * FLOAT32 * n_elements


def product_floats(n_elements: int, kernels: Kernels) -> int:
    """Return the bytes of a product's float32 pieces: at most two at a time, the last and the next."""
    return FLOAT32 * min(n_elements, 2 * PRODUCT_PIECE) if kernels.float_products else 0

"""Bytes of forward and backward passes of a call on one rank: activations, messages between stages, and rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import TypedDict

from realrl.plan.memory.buffers import (
    CALL_ROW_BYTES,
    FLOAT32,
    PASS_ROW_BYTES,
    PIPELINE_PENDING,
    ROW_BYTES,
)
from realrl.plan.memory.formulas.blocks import (
    converted_bytes,
    expert_matrix,
    forward_of_block,
    forward_of_forks,
    kept_by_block,
    matrices,
    padding_of_attention,
    passing_through_block,
    scores_of_block,
)
from realrl.plan.memory.formulas.ends import (
    backward_of_head,
    backward_of_last_norm,
    kept_by_ends,
    logits_chunk,
    product_floats,
    scalar_floats,
    softmax_floats,
)
from realrl.plan.memory.formulas.local import Kernels, LocalShape, own_units
from realrl.plan.memory.formulas.masks import fork_masks, n_windowed, own_mask, window_masks
from realrl.plan.memory.load import Load
from realrl.plan.pipeline import InFlight


class Settings(TypedDict):
    """Settings of training that decide how many bytes its passes take."""

    checkpointing: bool
    kernels: Kernels


def forward_bytes(local: LocalShape, load: Load, *, kernels: Kernels, n_waiting: int = 0) -> int:
    """Return the bytes of a call without gradient, with the rows that it computes on.

    Args:
        n_waiting: with several chunks on each stage, messages that wait for later computations, at most.
    """
    n_again = load.repeated(local.hidden) if kernels.computes_once(local.model) else 0
    computed = inference_activations(local, load, n_again=n_again, kernels=kernels)
    # a stage waits for a message together with those that it has sent before; the first one waits for none
    n_received = 1 if not local.has_embedding and len(local.layers) > 1 else 0  # or it is the input of the only block
    n_sent = min(PIPELINE_PENDING, load.n_mbs - 1) if local.has_embedding and not local.has_head else 0
    if n_waiting:
        n_received, n_sent = n_waiting, PIPELINE_PENDING
    messages = (n_received + n_sent) * _message_bytes(local, load.n_tokens - n_again)
    return computed + messages + ROW_BYTES * load.n_held + converted_bytes(local)


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes of a minibatch's passes on one rank, with the rows that are computed on.

    Attributes:
        head: activations when the backward pass begins, in the head.
        block: activations when it is in the last block, and `gradients` those that are there by then, float32.
        last: activations in the first block, the last that it reaches.
        embedding: what the gradient of the embedding takes.
        rows: rows alone.
    """

    head: int
    block: int
    gradients: int
    last: int
    embedding: int
    rows: int


@lru_cache(maxsize=1 << 14)  # settings of the optimizer do not matter
def training_bytes(
    local: LocalShape, load: Load, *, n_in_flight: float, checkpointing: bool, kernels: Kernels
) -> TrainingBytes:
    """Return the most bytes that a train_step takes at the moments of its passes.

    Args:
        n_in_flight: micro-batches that are held, counted as the largest, see `Load.at_once`.
    """
    n_again = load.repeated(local.hidden) if kernels.computes_once(local.model) else 0
    n_tokens, h, b = load.n_tokens - n_again, local.hidden, local.element_bytes
    accumulates = load.n_mbs > 1
    rows = (
        CALL_ROW_BYTES * load.n_held + PASS_ROW_BYTES * load.n_tokens + math.ceil(n_in_flight) * converted_bytes(local)
    )
    head, block, other = training_activations(
        local, load, n_tokens=n_tokens, n_in_flight=n_in_flight, checkpointing=checkpointing, kernels=kernels
    )
    masks = math.ceil(fork_masks(local, load, n_again, kernels) + window_masks(local, load, kernels))
    own, windowed = own_mask(local, load, kernels), n_windowed(local, load)
    n_kept = 0 if checkpointing else len(local.layers)
    of_block, of_other, of_all = (
        n * masks + min(n_blocks, max(1, n * windowed)) * own + n_blocks * kept_by_forks(local, load, n_again, kernels)
        for n, n_blocks in ((1, 1), (1, n_kept), (n_in_flight, max(1, n_in_flight * n_kept)))
    )
    # the rows of all tokens, of which the head keeps those that it scores: none is there behind the head
    expanded = load.n_tokens * h * b if n_again and local.has_head else 0
    # from each neighbour something comes, to the one before a gradient goes; outputs stay as long as their micro-batch
    n_messages = (0 if local.has_embedding else 2) + (0 if local.has_head else 1 + n_in_flight)
    beside = n_messages * _message_bytes(local, n_tokens) + rows + (n_in_flight - 1) * PASS_ROW_BYTES * load.n_tokens
    others = (n_in_flight - 1) * (other + of_other + expanded)  # micro-batches whose backward passes come later
    padding = padding_of_attention(local, load, kernels)
    kept_scores, _, scores = scores_of_block(local, load, kernels, padding)
    last = max(
        (
            n_tokens * (kept_by_block(local, layer, kernels, padding) + kept_scores)
            + passing_through_block(local, layer, n_tokens, kernels, scores)
            for layer, _ in local.kinds
        ),
        default=0.0,
    )
    is_trained, is_summed = local.model.lora is None, accumulates or b < FLOAT32
    new = max(matrices(local)) * b if is_trained and is_summed else 0  # a matrix's gradient, until it is added
    new += expert_matrix(local) * b if is_trained else 0
    is_tied = local.model.tied_embeddings and local.has_embedding
    waiting = _waiting_gradient(local, load)
    embedding = own_units(local.model.vocab_size, local.tp_rank, local.tp_size) * h * b
    is_second = is_trained and (is_summed or local.model.tied_embeddings)  # beside the head's, or an earlier one
    is_joined = is_trained and is_tied and local.vocabulary > 0  # the sum of both has memory of its own
    return TrainingBytes(
        head=math.ceil(head + of_all + n_in_flight * expanded + beside),
        block=math.ceil(block + of_all + (n_in_flight - 1) * expanded + beside + new + waiting),
        gradients=FLOAT32 * (local.vocabulary * h + sum(matrices(local))),
        last=math.ceil(last + of_block + beside + new + waiting + others),
        embedding=math.ceil(2 * n_tokens * h * b + beside + others + waiting + (is_second + is_joined) * embedding)
        * local.has_embedding,
        rows=rows,
    )


def stage_training_bytes(
    chunks: Sequence[LocalShape], load: Load, states: Sequence[InFlight], *, checkpointing: bool, kernels: Kernels
) -> TrainingBytes:
    """Return the most bytes that a train_step takes on a stage of several chunks at the moments of its passes.

    Args:
        chunks: the chunks of the rank.
        states: what the stage holds in its backward passes.
    """
    settings: Settings = {"checkpointing": checkpointing, "kernels": kernels}
    if len(chunks) == 1:
        return training_bytes(chunks[0], load, n_in_flight=load.at_once(states[0].held[0]), **settings)
    waiting = [_waiting_bytes(chunk, load, **settings) for chunk in chunks]
    n_again = load.repeated(chunks[0].hidden) if kernels.computes_once(chunks[0].model) else 0
    message = _message_bytes(chunks[0], load.n_tokens - n_again)
    moments = []
    for state in states:
        held = [*map(load.at_once, state.held)]
        own = training_bytes(chunks[state.place], load, n_in_flight=held[state.place], **settings)
        others = math.ceil(sum(n * waiting[i] for i, n in enumerate(held) if i != state.place))
        others += state.n_messages * message
        moments.append(
            TrainingBytes(
                own.head + others,
                own.block + others,
                own.gradients,
                own.last + others,
                own.embedding + others if own.embedding else 0,
                own.rows,
            )
        )
    return TrainingBytes(*(max(column) for column in zip(*map(astuple, moments), strict=True)))


def _waiting_bytes(local: LocalShape, load: Load, *, checkpointing: bool, kernels: Kernels) -> int:
    """Return the bytes of a micro-batch between its passes through one chunk, its output included."""
    one, two = (
        training_bytes(local, load, n_in_flight=n, checkpointing=checkpointing, kernels=kernels).last for n in (1, 2)
    )
    return two - one


def training_activations(
    local: LocalShape, load: Load, *, n_tokens: int, n_in_flight: float, checkpointing: bool, kernels: Kernels
) -> tuple[int, int, int]:
    """Return the bytes that a training step keeps for its backward passes, with what passes through head or block.

    The third number is that of one micro-batch, between its passes.

    Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models", section 4) count the
    activations of a block of GPT per token, and their division by tensor and sequence parallelism. Here there is no
    dropout, scores are not kept (Dao et al. 2022, FlashAttention), and norms, gates and grouped heads are those of
    `realrl.model.decoder`. A block keeps, in elements per token,

        2 H of residuals, 2 H of norms' results, 2 Q + 2 K of attention, 4 I of a gated MLP or 2 I of another one.

    Tensor parallelism divides Q, K and I, sequence parallelism the residuals. A pipeline's first stage holds
    `n_in_flight` micro-batches at a time (1F1B). With checkpointing each block keeps its input, H, and one block at a
    time has everything.

    Args:
        n_tokens: tokens of the largest micro-batch that are computed.
        n_in_flight: micro-batches that this stage holds, counted as the largest.
        checkpointing: blocks are computed again in the backward pass.
    """
    padding = padding_of_attention(local, load, kernels)
    kept_scores, _, scores = scores_of_block(local, load, kernels, padding)
    blocks = [(kept_by_block(local, layer, kernels, padding) + kept_scores, n) for layer, n in local.kinds]
    moments = (passing_through_block(local, layer, n_tokens, kernels, scores) for layer, _ in local.kinds)
    passing = max(moments, default=0.0)
    if checkpointing:
        kept = n_tokens * len(local.layers) * local.hidden * local.row_share * local.element_bytes
        again = max((n_bytes for n_bytes, _ in blocks), default=0.0)
    else:
        kept, again = n_tokens * sum(n_bytes * n for n_bytes, n in blocks), 0.0
    kept += n_tokens * local.rotation * local.element_bytes  # the rotation's table
    ends = kept_by_ends(local, load, n_tokens, kernels)
    at_head = ends + backward_of_head(local, load, kernels)
    one, kept = math.ceil(kept + ends), n_in_flight * kept + (n_in_flight - 1) * ends
    at_head = max(at_head, n_tokens * backward_of_last_norm(local, kernels) + _waiting_gradient(local, load))
    return math.ceil(kept + at_head), math.ceil(kept + n_tokens * again + passing), one


def _waiting_gradient(local: LocalShape, load: Load) -> int:
    """Return the bytes of the head's gradient, which waits for that of the embedding where both are one matrix."""
    is_tied = local.model.tied_embeddings and local.has_embedding
    is_summed = load.n_mbs > 1 or local.element_bytes < FLOAT32
    is_waiting = is_tied and is_summed and local.model.lora is None
    return local.vocabulary * local.hidden * local.element_bytes * is_waiting


def inference_activations(local: LocalShape, load: Load, *, n_again: int, kernels: Kernels) -> int:
    """Return the bytes of a forward pass without gradient at its largest: inside of a block, or at the logits.

    Args:
        n_again: tokens of the largest micro-batch that are not computed.
    """
    b, h, n_tokens, n_scored = local.element_bytes, local.hidden, load.n_tokens - n_again, load.n_scored
    product = product_floats(n_tokens * local.inner, kernels)
    padding = padding_of_attention(local, load, kernels)
    n_prompts = n_again / max(1, load.n_sequences - 1)
    attending = n_prompts / max(1, n_tokens) if n_again else 1.0
    _, scores, _ = scores_of_block(local, load, kernels, padding)
    moments = [
        n_tokens * forward_of_block(local, layer, kernels, padding, attending=attending, scores=scores) + product
        for layer, _ in local.kinds
    ]
    if n_again:
        moments.append(n_tokens * forward_of_forks(local, kernels) + _fork_bytes(local, load, kernels))
    shared_masks = fork_masks(local, load, n_again, kernels) + window_masks(local, load, kernels)
    moments = [moment + own_mask(local, load, kernels) for moment in moments]
    if local.has_head:
        head = 2 * n_tokens * h * b + (load.n_tokens * h * b if n_again else 0)
        if local.vocabulary:
            logits = logits_chunk(n_scored, local.vocabulary)
            head += n_scored * h * b + logits * b
            head += max(softmax_floats(logits, kernels, with_entropy=False), product_floats(logits, kernels))
        else:
            head += scalar_floats(local, load)
        moments.append(head)
    return math.ceil(max(moments, default=0.0) + shared_masks)


def _fork_bytes(local: LocalShape, load: Load, kernels: Kernels) -> float:
    """Return the bytes of one sample's attention to a common prompt: copies of its queries, keys and values, and the
    result before and after its order changes, with the padding of its responses."""
    wide = FLOAT32 if kernels.float_attention else local.element_bytes
    whole, tails = load.n_sequences * load.longest_row, load.n_sequences * load.n_tail
    padded = tails * (local.queries + 2 * local.keys) if load.n_padded else 0.0
    _, scores, _ = scores_of_block(local, load, kernels)
    keys = 2 * local.keys + (local.queries if local.model.keeps_scores else 0)  # of all heads, or their values
    return wide * (padded + keys * whole + 3 * local.queries * tails) + tails * scores


def kept_by_forks(local: LocalShape, load: Load, n_again: int, kernels: Kernels) -> float:
    """Return what a block keeps of all sequences with common prompts, beside what it keeps of tokens it computes.

    Each sequence has keys and values of its own, and those of its prompt; behind it queries change their order where
    heads share keys, or are padded. With scores, keys and values are those of all heads.

    Args:
        n_again: tokens of the largest micro-batch that are not computed.
    """
    if not n_again:
        return 0.0
    n, wide = load.n_sequences, FLOAT32 if kernels.float_attention else local.element_bytes
    behind = max(0.0, load.n_tokens - n_again * n / (n - 1))
    padded = max(behind, min(n * behind, load.n_samples * n * load.n_tail)) if load.n_padded else behind
    whole = load.n_tokens - behind + padded
    if local.model.keeps_scores:
        return (whole - behind) * local.queries * (FLOAT32 + wide)
    is_copied = load.n_padded or local.n_heads > local.n_kv_heads
    return (2 * whole * local.keys + (padded * local.queries if is_copied else 0)) * wide


def _message_bytes(local: LocalShape, n_tokens: int) -> int:
    """Return the bytes of a micro-batch on its way between stages."""
    return math.ceil(n_tokens * local.hidden * local.element_bytes * local.row_share)

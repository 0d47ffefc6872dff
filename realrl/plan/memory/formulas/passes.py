"""Bytes of forward and backward passes of a call on one rank: activations, messages between stages, and rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from realrl.plan.memory.buffers import (
    CALL_ROW_BYTES,
    FLOAT32,
    PASS_ROW_BYTES,
    PIPELINE_PENDING,
    ROW_BYTES,
)
from realrl.plan.memory.formulas.blocks import (
    backward_of_block,
    converted_bytes,
    forward_of_block,
    kept_by_block,
    matrices,
)
from realrl.plan.memory.formulas.ends import (
    backward_of_head,
    backward_of_last_norm,
    kept_by_ends,
    logits_chunk,
    product_floats,
    softmax_floats,
)
from realrl.plan.memory.formulas.local import Kernels, LocalShape, own_units
from realrl.plan.memory.load import Load


def forward_bytes(local: LocalShape, load: Load, *, kernels: Kernels) -> int:
    """Return the bytes of a call without gradient, with the rows that it computes on."""
    n_again = load.repeated(local.hidden) if kernels.computes_once(local.model) else 0
    computed = inference_activations(local, n_tokens=load.n_tokens - n_again, n_scored=load.n_scored, kernels=kernels)
    again = unshared_activations(local, n_tokens=load.n_tokens, n_again=n_again, n_blocks=1, kernels=kernels)
    n_received = 0 if local.has_embedding else min(2, load.n_mbs)  # one is computed on while the next one comes
    n_sent = 0 if local.has_head else min(PIPELINE_PENDING if local.has_embedding else 2, load.n_mbs - 1)
    messages = (n_received + n_sent) * _message_bytes(local, load.n_tokens - n_again)
    return computed + again + messages + ROW_BYTES * load.n_held + converted_bytes(local)


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
    local: LocalShape, load: Load, *, n_in_flight: int, checkpointing: bool, kernels: Kernels
) -> TrainingBytes:
    """Return the most bytes that a train_step takes at the moments of its passes."""
    n_again = load.repeated(local.hidden) if kernels.computes_once(local.model) else 0
    n_tokens, h, b = load.n_tokens - n_again, local.hidden, local.element_bytes
    accumulates = load.n_mbs > 1
    rows = CALL_ROW_BYTES * load.n_held + PASS_ROW_BYTES * load.n_tokens + n_in_flight * converted_bytes(local)
    head, block, other = training_activations(
        local, load, n_tokens=n_tokens, n_in_flight=n_in_flight, checkpointing=checkpointing, kernels=kernels
    )
    of_block, of_all = (
        unshared_activations(local, n_tokens=load.n_tokens, n_again=n_again, n_blocks=n, kernels=kernels)
        for n in (1, 1 if checkpointing else n_in_flight * len(local.layers))
    )
    # from each neighbour something comes, to the one before a gradient goes; outputs stay as long as their micro-batch
    n_messages = (0 if local.has_embedding else 2) + (0 if local.has_head else 1 + n_in_flight)
    beside = n_messages * _message_bytes(local, n_tokens) + rows
    others = (n_in_flight - 1) * other  # micro-batches whose backward passes come later
    last = max(
        (kept_by_block(local, layer, kernels) + backward_of_block(local, layer) for layer in local.layers), default=0.0
    )
    is_trained, is_summed = local.model.lora is None, accumulates or b < FLOAT32
    new = max(matrices(local)) * b if is_trained and is_summed else 0  # a matrix's gradient, until it is added
    is_tied = local.model.tied_embeddings and local.has_embedding
    waiting = local.vocabulary * h * b if is_trained and is_summed and is_tied else 0  # the head's gradient
    embedding = own_units(local.model.vocab_size, local.tp_rank, local.tp_size) * h * b
    is_second = is_trained and (is_summed or local.model.tied_embeddings)  # beside the head's, or an earlier one
    return TrainingBytes(
        head=head + of_all + beside,
        block=block + of_all + beside + new + waiting,
        gradients=FLOAT32 * (local.vocabulary * h + sum(matrices(local))),
        last=math.ceil(n_tokens * last) + of_block + beside + new + waiting + others,
        embedding=(2 * n_tokens * h * b + beside + others + waiting + is_second * embedding) * local.has_embedding,
        rows=rows,
    )


def training_activations(
    local: LocalShape, load: Load, *, n_tokens: int, n_in_flight: int, checkpointing: bool, kernels: Kernels
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
        n_in_flight: micro-batches that this stage holds.
        checkpointing: blocks are computed again in the backward pass.
    """
    blocks = [kept_by_block(local, layer, kernels) for layer in local.layers]
    transient = max((backward_of_block(local, layer) for layer in local.layers), default=0.0)
    if checkpointing:
        kept = n_tokens * len(local.layers) * local.hidden * local.row_share * local.element_bytes
        again = max(blocks, default=0.0)
    else:
        kept, again = n_tokens * sum(blocks), 0.0
    kept += n_tokens * 2 * local.model.head_dim * local.element_bytes  # the rotation's table
    ends = kept_by_ends(local, n_tokens, load.n_scored, kernels)
    at_head = ends + backward_of_head(local, load, kernels)
    one, kept = math.ceil(kept + ends), n_in_flight * kept + (n_in_flight - 1) * ends
    at_head = max(at_head, n_tokens * backward_of_last_norm(local, kernels))
    return math.ceil(kept + at_head), math.ceil(kept + n_tokens * (again + transient)), one


def inference_activations(local: LocalShape, *, n_tokens: int, n_scored: int, kernels: Kernels) -> int:
    """Return the bytes of a forward pass without gradient at its largest: inside of a block, or at the logits."""
    b, h = local.element_bytes, local.hidden
    product = product_floats(n_tokens * local.inner, kernels)
    moments = [n_tokens * forward_of_block(local, layer, kernels) + product for layer in local.layers]
    if local.vocabulary:
        logits = logits_chunk(n_scored, local.vocabulary)
        head = 2 * n_tokens * h * b + n_scored * h * b + logits * b
        moments.append(head + max(softmax_floats(logits, kernels, with_entropy=False), product_floats(logits, kernels)))
    return math.ceil(max(moments, default=0.0))


def unshared_activations(local: LocalShape, *, n_tokens: int, n_again: int, n_blocks: int, kernels: Kernels) -> int:
    """Return the bytes of tokens that are not computed: keys and values for each sequence, and rows for the head.

    Args:
        n_tokens: tokens of the largest micro-batch.
        n_again: those of prompts that are not computed for each sequence.
        n_blocks: blocks that keep their keys and values at a time.
    """
    if not n_again:
        return 0
    attention_bytes = FLOAT32 if kernels.float_attention else local.element_bytes
    hidden = n_tokens * local.hidden * local.element_bytes if local.has_head else 0
    return n_blocks * 2 * n_again * 2 * local.keys * attention_bytes + hidden


def _message_bytes(local: LocalShape, n_tokens: int) -> int:
    """Return the bytes of a micro-batch on its way between stages."""
    return math.ceil(n_tokens * local.hidden * local.element_bytes * local.row_share)

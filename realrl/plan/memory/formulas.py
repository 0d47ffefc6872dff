"""Bytes that one rank needs to compute a call: activations, KV cache, weights packed for generation.

Shapes: T tokens of a micro-batch on this rank, H hidden, Q and K the sizes of this rank's queries and of its keys, I
its part of the MLP's inner size, V its part of the vocabulary, L its blocks; b bytes of an element.

The formulas count the tensors that the decoder and the engine of this repository make. They leave out rounding by the
allocator, workspaces of kernels and the program itself.

Invariants:
- no function gives less for more tokens, rows or layers, nor more for a higher degree of sharding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from realrl.plan.memory.buffers import (
    CALL_ROW_BYTES,
    FLOAT32,
    LOGITS_BLOCK,
    LOGITS_CHUNK,
    PASS_ROW_BYTES,
    PIPELINE_PENDING,
    PRODUCT_PIECE,
    ROW_BYTES,
)
from realrl.plan.memory.load import Load
from realrl.plan.parameters.shards import ModelShard
from realrl.plan.parameters.specs import units_of
from realrl.shape import DecoderConfig


@dataclass(frozen=True)
class Kernels:
    """Properties of the machine's kernels that decide memory.

    Attributes:
        fused_norms: a norm keeps its input only; without fusion it keeps the input and the result in float32.
        float_attention: attention is computed in float32 for every input dtype.
        whole_logits: the softmax is computed on all logits at once, and not block by block.
        float_products: matrices of every dtype are multiplied in float32, piece by piece.
        generation_bytes: size of an element of activations, cache and packed weights in generation; None for the
            model's.
        packs_weights: generation copies every matrix into a layout of its own, and not only those that it joins.
        fused_products: generation applies norms and activations while it multiplies.
        fused_heads: in generation, heads whose size is a multiple of this are rotated, cached and attended to in one
            pass, by a kernel that reads only the filled part of the cache; None if there is none.
        fused_sampling: a kernel draws among all tokens from the logits themselves.
        tiles: a packed matrix has a multiple of one of these numbers of outputs.
        on_host: the device's memory is the host's: both count together.
        shares_prompts: prompts that several sequences of a sample begin with are computed once in every dtype, and not
            in float32 alone.
    """

    fused_norms: bool = True
    float_attention: bool = False
    whole_logits: bool = True
    float_products: bool = False
    generation_bytes: int | None = None
    packs_weights: bool = False
    fused_products: bool = False
    fused_heads: int | None = None
    fused_sampling: bool = False
    tiles: tuple[int, ...] = (1,)
    on_host: bool = False
    shares_prompts: bool = False

    def computes_once(self, model: DecoderConfig) -> bool:
        """Return True if a prompt that several sequences begin with is computed once."""
        return model.moe is None and (self.shares_prompts or model.dtype == "float32")

    def joins_attention(self, model: DecoderConfig) -> bool:
        """Return True if sequences of similar length attend together, and the results of all groups are joined."""
        return self.shares_prompts or model.dtype == "float32"

    def fuses_attention(self, model: DecoderConfig) -> bool:
        """Return True if the kernel of `fused_heads` takes this model's heads."""
        return self.fused_heads is not None and model.head_dim % self.fused_heads == 0


@dataclass(frozen=True)
class LocalShape:
    """The sizes of one rank's part of a model.

    Attributes:
        layers: numbers of its blocks.
        hidden: H.
        n_heads, n_kv_heads: heads of this rank.
        queries, keys: Q and K.
        inner: I of a dense block.
        vocabulary: V; 0 where there is no language-model head.
        element_bytes: b.
        row_share: share of the rows that norms and residuals hold: 1, or 1 / tp with sequence parallelism.
        has_embedding, has_head: True if the rank's stage has them.
    """

    model: DecoderConfig
    layers: range
    hidden: int
    n_heads: int
    n_kv_heads: int
    queries: int
    keys: int
    inner: int
    vocabulary: int
    element_bytes: int
    row_share: float
    has_embedding: bool
    has_head: bool
    tp_rank: int
    tp_size: int

    def experts_inner(self, layer: int) -> int:
        """Return the inner size of one expert on this rank; 0 for a dense block."""
        moe = self.model.moe
        if moe is None or layer in moe.dense_layers:
            return 0
        return _part(moe.intermediate_size, self.tp_rank, self.tp_size)


def local_shape(model: DecoderConfig, shard: ModelShard, *, sp: bool, element_bytes: int) -> LocalShape:
    tp_rank, tp_size = shard.tp_rank, shard.tp_size
    n_heads = _part(model.n_heads, tp_rank, tp_size)
    n_kv_heads = _part(model.n_kv_heads, tp_rank, tp_size)
    return LocalShape(
        model=model,
        layers=shard.layers,
        hidden=model.hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        queries=n_heads * model.head_dim,
        keys=n_kv_heads * model.head_dim,
        inner=_part(model.intermediate_size, tp_rank, tp_size),
        vocabulary=_part(model.vocab_size, tp_rank, tp_size) if shard.has_head and model.head == "lm" else 0,
        element_bytes=element_bytes,
        row_share=1 / tp_size if sp else 1.0,
        has_embedding=shard.has_embedding,
        has_head=shard.has_head,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


# ---------------------------------------------------------------- activations


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
    new = max(_matrices(local)) * b if is_trained and is_summed else 0  # a matrix's gradient, until it is added
    is_tied = local.model.tied_embeddings and local.has_embedding
    waiting = local.vocabulary * h * b if is_trained and is_summed and is_tied else 0  # the head's gradient
    embedding = _part(local.model.vocab_size, local.tp_rank, local.tp_size) * h * b
    is_second = is_trained and (is_summed or local.model.tied_embeddings)  # beside the head's, or an earlier one
    return TrainingBytes(
        head=head + of_all + beside,
        block=block + of_all + beside + new + waiting,
        gradients=FLOAT32 * (local.vocabulary * h + sum(_matrices(local))),
        last=math.ceil(n_tokens * last) + of_block + beside + new + waiting + others,
        embedding=(2 * n_tokens * h * b + beside + others + waiting + is_second * embedding) * local.has_embedding,
        rows=rows,
    )


def _matrices(local: LocalShape) -> list[int]:
    """Return the elements of each matrix of the largest MLP of this rank, with those of all experts."""
    moe = local.model.moe
    inner = max(
        (local.inner if moe is None or not n else moe.n_experts * n for n in map(local.experts_inner, local.layers)),
        default=0,
    )
    return [inner * local.hidden] * (3 if local.model.gated_mlp or moe is not None else 2)


def converted_bytes(local: LocalShape) -> int:
    """Return the bytes of small parameters that a pass converts: vectors to float32, and adapters to its dtype."""
    h, model = local.hidden, local.model
    n_bytes = (4 * len(local.layers) + 2) * h * FLOAT32
    if model.lora is None:
        return n_bytes
    widths = {"q": local.queries, "k": local.keys, "v": local.keys, "o": local.queries}
    n_elements = sum(h + widths.get(name, local.inner) for name in model.lora.targets)
    return n_bytes + len(local.layers) * model.lora.rank * n_elements * local.element_bytes


def _message_bytes(local: LocalShape, n_tokens: int) -> int:
    """Return the bytes of a micro-batch on its way between stages."""
    return math.ceil(n_tokens * local.hidden * local.element_bytes * local.row_share)


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
    ends = _kept_by_ends(local, n_tokens, load.n_scored, kernels)
    at_head = ends + _backward_of_head(local, load, kernels)
    one, kept = math.ceil(kept + ends), n_in_flight * kept + (n_in_flight - 1) * ends
    at_head = max(at_head, n_tokens * _backward_of_last_norm(local, kernels))
    return math.ceil(kept + at_head), math.ceil(kept + n_tokens * (again + transient)), one


def inference_activations(local: LocalShape, *, n_tokens: int, n_scored: int, kernels: Kernels) -> int:
    """Return the bytes of a forward pass without gradient at its largest: inside of a block, or at the logits."""
    b, h = local.element_bytes, local.hidden
    product = _product_floats(n_tokens * local.inner, kernels)
    moments = [n_tokens * forward_of_block(local, layer, kernels) + product for layer in local.layers]
    if local.vocabulary:
        logits = _logits_chunk(n_scored, local.vocabulary)
        head = 2 * n_tokens * h * b + n_scored * h * b + logits * b
        moments.append(
            head + max(_softmax_floats(logits, kernels, with_entropy=False), _product_floats(logits, kernels))
        )
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


def kept_by_block(local: LocalShape, layer: int, kernels: Kernels) -> float:
    """Return the bytes per token that a block keeps for its backward pass; see `training_activations`."""
    h, b, model = local.hidden, local.element_bytes, local.model
    is_fused = kernels.fused_norms or model.norm_bias  # LayerNorm has a kernel of its own everywhere
    n_floats = 2 if model.lora is None else 1  # the result before its product with a weight that is trained
    norms = 2 * local.row_share * (h * (b if is_fused else n_floats * FLOAT32) + FLOAT32)
    attention_bytes = FLOAT32 if kernels.float_attention else b
    attention = (2 * local.queries + 2 * local.keys) * attention_bytes + local.n_heads * FLOAT32
    if kernels.joins_attention(model):
        attention += local.queries * b  # the result of all groups, joined or rounded, which the output projection keeps
    if model.qk_norm:
        attention += (local.queries + local.keys) * (b if kernels.fused_norms else b + FLOAT32)
    adapters = 0 if model.lora is None else model.lora.rank * len(model.lora.targets)
    return norms + 2 * h * b + attention + (_kept_by_mlp(local, layer) + adapters) * b


def _kept_by_mlp(local: LocalShape, layer: int) -> float:
    """Return elements per token: the inputs of activation, product and second matrix; with experts, of each slot."""
    moe, inner = local.model.moe, local.experts_inner(layer)
    if moe is None or not inner:
        return 4 * local.inner if local.model.gated_mlp else 2 * local.inner
    # a copy of the token per slot, and the weight of the expert applied to the inner units; the router's are small
    return moe.top_k * (local.hidden + 5 * inner) + 4 * moe.n_experts


def backward_of_block(local: LocalShape, layer: int) -> float:
    """Return the largest bytes per token of tensors on their way through a block, in its MLP, beside those it keeps.

    Gradients of inner units are there with those of their product; slots of experts change their order both ways.
    """
    moe, inner, h = local.model.moe, local.experts_inner(layer), local.hidden
    held = 2 * h + _held_by_collectives(local)
    if moe is None or not inner:
        return (held + (2 if local.model.gated_mlp else 1) * local.inner) * local.element_bytes
    return (held + moe.top_k * max(2 * h, h + inner, 2 * inner)) * local.element_bytes


def _held_by_collectives(local: LocalShape) -> int:
    """Return elements per token of a sum over tensor ranks that a thread may hold until the next one is there."""
    return local.hidden if local.tp_size > 1 else 0


def forward_of_block(local: LocalShape, layer: int, kernels: Kernels) -> float:
    """Return the largest bytes per token inside of a block without gradient: in attention or in the MLP."""
    h, q, k, b = local.hidden, local.queries, local.keys, local.element_bytes
    moe, inner = local.model.moe, local.experts_inner(layer)
    adapted = 0 if local.model.lora is None else local.inner  # the adapter's part, beside the layer's and their sum
    width = 3 * local.inner + adapted
    if moe is not None and inner:
        width = h + moe.top_k * max(2 * h + 3 * inner, 3 * h + inner) + 4 * moe.n_experts
    attention = 2 * h * b + (5 * q + 3 * k) * (FLOAT32 if kernels.float_attention else b)
    gathered = h * b if local.row_share < 1 else 0  # rows come from other ranks, or their sums go there
    beside = 2 * local.model.head_dim * b + gathered + _held_by_collectives(local) * b
    return max(attention, (3 * h + width) * b) + beside


def generation_of_block(local: LocalShape, layer: int, b: int, kernels: Kernels) -> float:
    """Return the largest bytes per token inside of a block of generation: in the MLP, with attention's result."""
    moe, inner = local.model.moe, local.experts_inner(layer)
    width = (1 if kernels.fused_products else 4) * local.inner
    if moe is not None and inner:
        width = local.hidden + moe.top_k * max(2 * local.hidden + 3 * inner, 3 * local.hidden + inner)
        width += 4 * moe.n_experts
    attention = (2 if kernels.fuses_attention(local.model) else 3) * (local.queries + local.keys)
    if local.model.qk_norm:  # before the norms and after them
        attention = max(attention, 2 * (local.queries + 2 * local.keys))
    held = 3 * local.hidden + _held_by_collectives(local) + 2 * local.model.head_dim
    return (held + width + attention) * b


def _kept_by_ends(local: LocalShape, n_tokens: int, n_scored: int, kernels: Kernels) -> float:
    """Return bytes kept by final norm and head: hidden states, the scored ones, and logits that fit into one chunk."""
    if not local.has_head:
        return 0.0
    h, b = local.hidden, local.element_bytes
    norm = 2 * h * b if kernels.fused_norms or local.model.norm_bias else 2 * h * b + h * FLOAT32
    if not local.vocabulary:
        return n_tokens * (norm + (h * FLOAT32 if b < FLOAT32 else 0))
    n_logits = n_scored * local.vocabulary
    return n_tokens * norm + n_scored * h * b + (n_logits * b if n_logits <= LOGITS_CHUNK else 0)


def _backward_of_last_norm(local: LocalShape, kernels: Kernels) -> float:
    """Return the bytes per token of the last norm's backward pass, when logits and their gradients are gone."""
    if not local.has_head:
        return 0.0
    h, b, is_fused = local.hidden, local.element_bytes, kernels.fused_norms or local.model.norm_bias
    return 4 * h * b if is_fused else 2 * h * b + 5 * h * FLOAT32


def _backward_of_head(local: LocalShape, load: Load, kernels: Kernels) -> float:
    """Return bytes of gradients of one chunk's logits, and of the head's weight unless it becomes the parameter's."""
    if not local.vocabulary:
        return 0.0
    n_scored, accumulates = load.n_scored, load.n_mbs > 1  # gradients are added to those of earlier micro-batches
    b, weight = local.element_bytes, local.vocabulary * local.hidden
    chunk = _logits_chunk(n_scored, local.vocabulary)
    is_whole = chunk == n_scored * local.vocabulary
    logits = chunk * b * (1 if is_whole else 2) + _product_floats(chunk, kernels)
    weights = (weight * b if accumulates or b < FLOAT32 else 0) + (0 if is_whole else weight * FLOAT32)
    return (
        logits + weights + n_scored * local.hidden * b + _softmax_floats(chunk, kernels, with_entropy=load.with_entropy)
    )


def _logits_chunk(n_scored: int, vocabulary: int) -> int:
    n_chunks = max(1, math.ceil(n_scored / max(1, LOGITS_CHUNK // vocabulary)))
    return math.ceil(n_scored / n_chunks) * vocabulary


def _softmax_floats(n_logits: int, kernels: Kernels, *, with_entropy: bool) -> int:
    """Return the bytes of float32 copies of logits: shifted, and exponentiated; without entropy one takes the other's
    place. A block lives until the next one is there."""
    n_elements = n_logits if kernels.whole_logits else min(n_logits, 2 * LOGITS_BLOCK)
    return (2 if with_entropy else 1) * FLOAT32 * n_elements


def _product_floats(n_elements: int, kernels: Kernels) -> int:
    """Return the bytes of a product's float32 pieces: at most two at a time, the last and the next."""
    return FLOAT32 * min(n_elements, 2 * PRODUCT_PIECE) if kernels.float_products else 0


# ---------------------------------------------------------------- generation


@dataclass(frozen=True)
class GenerationBytes:
    """Bytes that a generate call takes on one rank, beside the parameters.

    Attributes:
        weights: joined or packed copies of matrices, which live as long as the call.
        cache: keys and values, and where it grows one layer more.
        activations: tensors of a prefill, of a decoding step or of sampling, at the largest moment.
    """

    weights: int
    cache: int
    activations: int


def generation_bytes(local: LocalShape, load: Load, *, kernels: Kernels) -> GenerationBytes:
    """Return the bytes of a generate call; keys and values take 2 L K b bytes for each token of each row."""
    b, n_rows = kernels.generation_bytes or local.element_bytes, load.n_rows
    layer = n_rows * local.keys * load.longest_row * b
    n_decoded = max(load.prefill_tokens, n_rows)
    moments = [n_decoded * generation_of_block(local, i, b, kernels) for i in local.layers]
    waiting = 2 * len(local.layers) * local.keys * load.n_waiting
    if local.vocabulary:
        whole = n_rows * local.model.vocab_size
        # logits after a prefill: each prompt's, and then each row's; those of all ranks are gathered from parts
        moments.append((2 + (2 / local.tp_size if local.tp_size > 1 else 0)) * whole * b)
        if load.is_filtered or not kernels.fused_sampling:
            # logits, and of each run two buffers of the sampler and the copy that is cut into blocks
            moments.append(whole * (b + FLOAT32) + load.n_runs * 2 * whole * FLOAT32)
        waiting += local.model.vocab_size if waiting else 0
    return GenerationBytes(
        weights=_packed_weights(local, b, kernels),
        cache=load.n_runs * (2 * len(local.layers) * layer + waiting * b)
        + (0 if kernels.fuses_attention(local.model) else layer),
        activations=math.ceil(max(moments, default=0.0)),
    )


def _packed_weights(local: LocalShape, b: int, kernels: Kernels) -> int:
    h, is_converted = local.hidden, b != local.element_bytes
    copies_all = kernels.packs_weights or is_converted
    n_elements = 0

    def tiled(n_outputs: int) -> int:
        return max(math.ceil(n_outputs / tile) * tile for tile in kernels.tiles)

    for layer in local.layers:
        n_elements += tiled(local.queries + 2 * local.keys) * h
        inner = local.experts_inner(layer)
        if inner and local.model.moe is not None:
            n_elements += 3 * local.model.moe.n_experts * inner * h if is_converted else 0
        else:
            n_elements += 2 * tiled(local.inner) * h if local.model.gated_mlp else 0
            n_elements += 0 if local.model.gated_mlp or not copies_all else tiled(local.inner) * h
        if copies_all or local.model.lora is not None:
            n_elements += tiled(h) * (local.queries + (0 if inner else local.inner))
    if copies_all:
        n_elements += tiled(local.vocabulary) * h
    if local.model.attention_bias:
        n_elements += len(local.layers) * (local.queries + 2 * local.keys)
    return n_elements * b


def _part(n_units: int, tp_rank: int, tp_size: int) -> int:
    start, stop = units_of(n_units, tp_rank, tp_size)
    return stop - start

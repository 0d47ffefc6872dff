"""Bytes of a decoder block: what it keeps for its backward pass, and what passes through it."""

from __future__ import annotations

import math

from realrl.plan.memory.buffers import BIAS_SUM, BIAS_SUM_TOKENS, FLOAT32
from realrl.plan.memory.formulas.local import Kernels, LocalShape
from realrl.plan.memory.load import Load
from realrl.plan.samples.prefixes import CALL_COST
from realrl.shape import DecoderConfig


def kept_by_block(local: LocalShape, layer: int, kernels: Kernels, padding: float = 0.0) -> float:
    """Return the bytes per token that a block keeps for its backward pass; see `training_activations`.

    Args:
        padding: see `padding_of_attention`.
    """
    h, b, model = local.hidden, local.element_bytes, local.model
    is_fused = kernels.fused_norms or model.norm_bias  # LayerNorm has a kernel of its own everywhere
    n_floats = 2 if model.lora is None else 1  # the result before its product with a weight that is trained
    n_norms = 4 if model.norm_place == "both" else 2
    norm_bytes = local.norm_bytes if is_fused else n_floats * FLOAT32
    norms = n_norms * local.row_share * (h * norm_bytes + FLOAT32)
    wide = FLOAT32 if kernels.float_attention else b
    attended = (2 * local.queries + 2 * kernels.attended_keys(local)) * wide + local.n_heads * FLOAT32
    if model.keeps_scores:  # scaled queries, and keys and values of all heads; the result goes on
        attended = local.queries * (2 * FLOAT32 + wide)
    attention = max(1.0, padding) * attended
    if (kernels.joins_attention(model) or model.keeps_scores) and reads_input(model, "o"):
        attention += local.queries * b  # the result of all groups, joined or rounded, which the output projection keeps
    if model.qk_norm:
        kept = local.norm_bytes if kernels.fused_norms else n_floats * FLOAT32
        if model.qk_norm == "all" and local.tp_size > 1:  # ranks add up squares, of copies in float32
            kept = (n_floats + (b < FLOAT32)) * FLOAT32
        attention += (local.queries + local.keys) * kept
        attention += (local.n_heads + local.n_kv_heads) * FLOAT32
    n_read = sum(reads_input(model, *names) for names in (("q", "k", "v"), ("gate", "up")))
    adapters = 0 if model.lora is None else model.lora.rank * len(model.lora.targets)
    return norms + n_read * h * b + attention + (_kept_by_mlp(local, layer) + adapters) * b


def reads_input(model: DecoderConfig, *names: str) -> bool:
    """Return True if the gradient of some of these layers, or of their adapters, needs their input."""
    return model.lora is None or any(map(model.has_adapter, names))


def scores_of_block(
    local: LocalShape, load: Load, kernels: Kernels, padding: float = 0.0
) -> tuple[float, float, float]:
    """Return the bytes per token of scores: those kept; those while a block attends, without gradient; and with it.

    The last ones are beside those kept, bounds and weights, which the backward pass reads, in the dtype of the values
    too. All are 0 where a kernel holds no more scores than it works on. Without gradient scores are there as they are,
    hidden, joined to sinks if there are any, and as weights, or only as they are and as weights, beside values of all
    heads and the result. With gradient these are beside the bounds, and backward there are two gradients.

    Args:
        padding: see `padding_of_attention`.
    """
    if not local.model.keeps_scores:
        return 0.0, 0.0, 0.0
    rows = max(1.0, padding)
    n_bytes = rows * local.n_heads * load.longest_row * FLOAT32
    a_query, masks = rows * local.queries * FLOAT32, rows * 2 * load.longest_row
    beside = 2 * a_query + masks  # scaled queries, keys of all heads
    n_bounds, n_times = local.model.score_softcap is not None, 4 if local.model.sinks else 3
    passing = max(n_times * n_bytes + beside, 2 * n_bytes + a_query + beside)
    kept = (1 + n_bounds) * n_bytes
    if not kernels.float_attention and local.element_bytes < FLOAT32:
        kept += n_bytes * local.element_bytes / FLOAT32
    keys = rows * 2 * local.keys * FLOAT32
    # the weights are among those kept; gradients of rows and of the result come backward
    forward = max((n_times - 1) * n_bytes, n_bytes + 2 * a_query) + keys
    backward = 2 * n_bytes + a_query
    return kept, passing, max(forward, backward) + 2 * local.hidden * local.element_bytes + masks


def _kept_by_mlp(local: LocalShape, layer: int) -> float:
    """Return elements per token: the inputs of activation, product and second matrix; with experts, of each slot."""
    moe, inner = local.model.moe, local.experts_inner(layer)
    if moe is None or not inner:
        n_inner = (3 if local.model.gated_mlp else 1) + reads_input(local.model, "down")
        return n_inner * local.inner
    # a copy of the token per slot, and the weight of the expert applied to the inner units
    n_inner, chosen = (8, 3 * moe.n_experts) if moe.has_terms else (5, 0)
    slot = n_inner * inner + chosen
    slot += local.hidden if local.model.lora is None else -inner  # the inputs of matrices that are trained
    b = local.element_bytes
    # the router's probabilities and sums, and of a slot its weight before and after, its expert and two places, int64
    routing = FLOAT32 * (moe.n_experts + 1) + moe.top_k * (FLOAT32 + b + 3 * 2 * FLOAT32)
    return moe.top_k * slot + routing / b


def backward_of_block(local: LocalShape, layer: int, kernels: Kernels) -> float:
    """Return the largest bytes per token of tensors on their way through a block, beside those it keeps.

    That is in its MLP, or in a norm behind it. Gradients of inner units are there with those of their product; slots of
    experts change their order both ways.
    """
    moe, inner, h, b = local.model.moe, local.experts_inner(layer), local.hidden, local.element_bytes
    held = 2 * h + _held_by_collectives(local)
    if moe is not None and inner:
        # gradients of weighted units, of the units, and of weights before their sum; the last matrix's input is gone
        n_inner = 2 if local.model.lora is None and not moe.has_terms else 3
        return (held + moe.top_k * max(2 * h, h + inner, n_inner * inner)) * b
    # what the last matrix reads is gone by then, where that is kept
    n_inner = (2 if local.model.gated_mlp else 1) + (not reads_input(local.model, "down"))
    mlp = (held + n_inner * local.inner) * b
    return mlp if local.model.norm_place == "before" else max(mlp, h * b + backward_of_norm(local, kernels))


def passing_through_block(local: LocalShape, layer: int, n_tokens: int, kernels: Kernels, scores: float) -> float:
    """Return the largest bytes of tensors on their way through a block, beside those it keeps.

    While it attends, what its MLP keeps is not there yet, or not any more.

    Args:
        scores: bytes per token while it attends with gradient, see `scores_of_block`.
    """
    attending = scores - _kept_by_mlp(local, layer) * local.element_bytes
    passing = n_tokens * max(backward_of_block(local, layer, kernels), attending)
    return max(passing, backward_of_biases(local, layer, n_tokens, kernels))


def backward_of_biases(local: LocalShape, layer: int, n_tokens: int, kernels: Kernels) -> float:
    """Return the largest bytes of tensors on their way through a block while a bias's gradient is added up.

    On CUDA each thread has a sum of its own for 64 tokens, and so 8 bytes for each number of the gradient. What the MLP
    keeps is gone when those of attention are made, and counts as if it were there otherwise.
    """
    model, h, b = local.model, local.hidden, local.element_bytes
    if not kernels.splits_sums or model.lora is not None:
        return 0.0

    def sums(width: int) -> int:
        return min(BIAS_SUM, 2 * FLOAT32 * width * math.ceil(n_tokens / BIAS_SUM_TOKENS) * BIAS_SUM_TOKENS)

    moments = [0.0]
    if model.mlp_bias and not local.experts_inner(layer):
        moments.append(n_tokens * (2 * h + (2 if model.gated_mlp else 1) * local.inner) * b + sums(max(h, local.inner)))
    freed = _kept_by_mlp(local, layer)
    if model.o_bias:
        moments.append(n_tokens * (3 * h - freed) * b + sums(h))
    if model.attention_bias:
        moments.append(n_tokens * (2 * h + local.queries + 2 * local.keys - freed) * b + sums(local.queries))
    return max(moments)


def backward_of_norm(local: LocalShape, kernels: Kernels) -> float:
    """Return the bytes per token of a norm's gradients, and of what its parts make on their way to them."""
    h, b = local.hidden, local.element_bytes
    if not kernels.fused_norms and not local.model.norm_bias:
        return h * b + 5 * h * FLOAT32
    converted = 2 * h * FLOAT32 if local.norm_bytes > b else 0
    return 3 * h * b + converted


def forward_of_block(
    local: LocalShape,
    layer: int,
    kernels: Kernels,
    padding: float = 0.0,
    *,
    attending: float = 1.0,
    scores: float = 0.0,
) -> float:
    """Return the largest bytes per token inside of a block without gradient: in attention or in the MLP.

    Args:
        padding: see `padding_of_attention`.
        attending: share of the tokens that attend first; the others do in `forward_of_forks`.
        scores: bytes of scores while it attends, see `scores_of_block`.
    """
    h, b, rows = local.hidden, local.element_bytes, local.row_share * local.hidden
    model = local.model
    moe, inner = model.moe, local.experts_inner(layer)
    # an adapter's part, beside the layer's and their sum
    adapted = local.inner if model.lora is not None and reads_input(model, "gate" if model.gated_mlp else "up") else 0
    # sums with rows that make them divisible, their pieces on the way to other ranks, and the rows that come
    scattered = 2 * h + rows if local.row_share < 1 else 0
    biased = h if model.mlp_bias and local.tp_size > 1 else 0  # the sum of all ranks, before and after its bias
    width: float = max((3 if model.gated_mlp else 2) * local.inner + adapted, 2 * local.inner + h + biased + scattered)
    if moe is not None and inner:
        width = h + _experts_forward(local, inner)
    attention = 2 * rows * b + _forward_of_attention(local, kernels, padding, attending, scores)
    # the last norm of the block: the block's input, the sum after attention, and with a norm behind the MLP its input
    # and its result; of the norm's own input there are copies in float32, and two products
    norm = {"before": 2, "after": 3, "both": 4}[model.norm_place] * rows * b
    if not kernels.fused_norms and not model.norm_bias:
        norm += rows * FLOAT32 * (3 if b < FLOAT32 else 2)
    elif local.norm_bytes > b:
        norm += rows * FLOAT32 * 2
    return max(attention, norm, (3 * rows + width) * b) + _beside_block(local)


def forward_of_forks(local: LocalShape, kernels: Kernels) -> float:
    """Return the largest bytes per token of attention to common prompts, beside those of one sample's."""
    q, k, b = local.queries, local.keys, local.element_bytes
    converted = (q + 2 * k) * FLOAT32 if kernels.float_attention and b < FLOAT32 else 0
    return 2 * local.row_share * local.hidden * b + (q + 2 * k) * b + converted + 2 * q * b + _beside_block(local)


def _beside_block(local: LocalShape) -> float:
    """Return bytes per token of the rotation's table, rows that come from other ranks, and sums that are held."""
    gathered = local.hidden if local.row_share < 1 else 0
    return (local.rotation + gathered + _held_by_collectives(local)) * local.element_bytes


def _experts_forward(local: LocalShape, inner: int) -> float:
    """Return the largest elements per token of all slots without gradient: inner units, results, or their sum.

    An expert has one slot of a token at most, whose product is there beside all others.
    """
    moe, h = local.model.moe, local.hidden
    assert moe is not None
    a_slot = max(h + 3 * inner, 2 * h)
    if moe.has_terms:
        a_slot = max(h + 4 * inner, 3 * h) + 2 * moe.n_experts
    places = 7 * FLOAT32 / local.element_bytes  # three int64 of a slot, and its weight
    return moe.top_k * (a_slot + places) + h + 4 * moe.n_experts


def padding_of_attention(local: LocalShape, load: Load, kernels: Kernels) -> float:
    """Return the rows that attention pads sequences to, over their tokens; 0 where it reads tokens in their place.

    A sequence joins a group of shorter ones as long as that wastes less than `CALL_COST`, see
    `realrl.model.layers.attention`.
    """
    if not load.n_padded or not kernels.joins_attention(local.model):
        return 0.0
    wasted = CALL_COST // (14 * max(1, local.queries) * max(1, load.n_prompt))  # by each sequence
    n_sequences = load.n_padded // max(1, load.longest_row)
    return max(1.0, min(load.n_padded, load.n_tokens + n_sequences * wasted) / max(1, load.n_tokens))


def _forward_of_attention(
    local: LocalShape, kernels: Kernels, padding: float, attending: float, scores: float
) -> float:
    """Return the largest bytes per token of queries, keys, values, scores, results: in norms, rotation or attention.

    Results are there when scores are gone, but for their weights.
    """
    q, k, b = local.queries, local.keys, local.element_bytes
    wide = FLOAT32 if kernels.float_attention else b
    copied = q + 2 * k if padding or wide > b else 0  # all three, padded or in another dtype
    rows, keys = max(1.0, padding), kernels.attended_keys(local)
    copied += 2 * keys if keys > k else 0
    sums = 0 if local.model.keeps_scores else local.n_heads * FLOAT32  # of the exponentials, which end with it
    moments = [rows * ((copied + q) * wide + sums), rows * copied * wide + scores]  # attending
    if padding:
        moments += [rows * (copied + 2 * q) * wide, (rows + 1) * q * wide]  # groups joined, and without padding
    if wide > b:
        moments.append(((rows + 1 if padding else 1) * wide + b) * q)
    attends = (q + 2 * k) * b + attending * max(moments)
    # a norm of half precision makes copies of queries in float32, and two products; with an offset a result
    normed = 0
    if local.model.qk_norm and b < FLOAT32:
        normed = 3 * q * FLOAT32 if not kernels.fused_norms else 2 * q * FLOAT32 * (local.norm_bytes > b)
    return max(attends, (q + 2 * k) * b + normed, (4 * q + 2 * k) * b, (2 * q + 5 * k) * b)


def generation_of_block(local: LocalShape, layer: int, b: int, kernels: Kernels, scores: float = 0.0) -> float:
    """Return the largest bytes per token inside of a block of generation: in the MLP, with attention's result.

    Args:
        scores: bytes of scores while it attends, see `scores_of_block`.
    """
    moe, inner = local.model.moe, local.experts_inner(layer)
    width: float = (1 if kernels.fused_products else 4 if local.model.gated_mlp else 2) * local.inner
    if moe is not None and inner:
        width = local.hidden + _experts_forward(local, inner)
    attention = (2 if kernels.fuses_attention(local.model) else 3) * (local.queries + local.keys)
    if local.model.qk_norm:  # before the norms and after them, and the result
        attention = max(attention, 3 * local.queries + 4 * local.keys)
    n_hidden = 3 if local.model.norm_place == "before" else 4  # a sum before its norm and after it
    held = n_hidden * local.hidden + _held_by_collectives(local) + local.rotation
    return (held + attention) * b + max(width * b, scores)


def _held_by_collectives(local: LocalShape) -> int:
    """Return elements per token of a sum over tensor ranks that a thread may hold until the next one is there."""
    return local.hidden if local.tp_size > 1 else 0


def converted_bytes(local: LocalShape) -> int:
    """Return the bytes of small parameters that a pass converts: vectors to float32, and adapters to its dtype."""
    h, model = local.hidden, local.model
    n_bytes = (4 * len(local.layers) + 2) * h * FLOAT32
    if model.lora is None:
        return n_bytes
    widths = {"q": local.queries, "k": local.keys, "v": local.keys, "o": local.queries}
    n_elements = sum(h + widths.get(name, local.inner) for name in model.lora.targets)
    return n_bytes + len(local.layers) * model.lora.rank * n_elements * local.element_bytes


def expert_matrix(local: LocalShape) -> int:
    """Return the elements of a matrix of one expert, whose gradient goes into that of all; 0 without experts."""
    return max((local.experts_inner(layer) for layer, _ in local.kinds), default=0) * local.hidden


def matrices(local: LocalShape) -> list[int]:
    """Return the elements of each matrix of the largest MLP of this rank, with those of all experts."""
    moe = local.model.moe
    of_experts = [local.experts_inner(layer) for layer, _ in local.kinds]
    inner = max((local.inner if moe is None or not n else moe.n_experts * n for n in of_experts), default=0)
    return [inner * local.hidden] * (3 if local.model.gated_mlp or moe is not None else 2)

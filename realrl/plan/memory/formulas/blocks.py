"""Bytes of a decoder block: what it keeps for its backward pass, and what passes through it."""

from __future__ import annotations

from realrl.plan.memory.buffers import (
    FLOAT32,
)
from realrl.plan.memory.formulas.local import Kernels, LocalShape


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


def matrices(local: LocalShape) -> list[int]:
    """Return the elements of each matrix of the largest MLP of this rank, with those of all experts."""
    moe = local.model.moe
    inner = max(
        (local.inner if moe is None or not n else moe.n_experts * n for n in map(local.experts_inner, local.layers)),
        default=0,
    )
    return [inner * local.hidden] * (3 if local.model.gated_mlp or moe is not None else 2)

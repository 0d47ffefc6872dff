"""Bytes of generation on one rank: packed weights, KV cache, and the activations of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from realrl.plan.memory.buffers import CUDA_LARGE, CUDA_SEGMENT, FLOAT32, GRAPH_POOL
from realrl.plan.memory.formulas.blocks import generation_of_block, scores_of_block
from realrl.plan.memory.formulas.local import Kernels, LocalShape
from realrl.plan.memory.formulas.masks import prompt_masks
from realrl.plan.memory.load import Load


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


def generation_bytes(local: LocalShape, load: Load, *, kernels: Kernels, n_chunks: int = 1) -> GenerationBytes:
    """Return the bytes of a generate call; keys and values take 2 L K b bytes for each token of each row.

    Args:
        n_chunks: chunks of the model on this stage of a pipeline.
    """
    b, n_rows = kernels.generation_bytes or local.element_bytes, load.n_rows
    layer = n_rows * local.keys * load.longest_row * b
    n_decoded = max(load.prefill_tokens, n_rows)
    _, scores, _ = scores_of_block(local, load, kernels)
    if scores:  # a decoding step has a mask for every score
        masks = local.n_heads * load.longest_row * FLOAT32
        scores = max(scores, n_rows * (scores + masks) / max(1, n_decoded))
    # what came from another stage stays beside the blocks behind the first one, which reads it
    is_received = not local.has_embedding or n_chunks > 1
    received = n_decoded * local.hidden * b if is_received else 0
    blocks = [generation_of_block(local, number, b, kernels, scores) for number, _ in local.kinds]
    beside = prompt_masks(local, load, b, kernels) + received * (len(local.layers) > n_chunks)
    prefills = [n_decoded * block + beside for block in blocks]
    steps = [n_rows * block for block in blocks]
    waiting = 2 * len(local.layers) * local.keys * load.n_waiting
    whole = n_rows * local.model.vocab_size if local.vocabulary else 0  # elements of the logits of all rows
    # a bound of logits: they, their quotient and its tangent, beside the rows that they are of
    bounded = n_rows * (3 * local.vocabulary + local.hidden) * b * (local.model.logit_softcap is not None)
    if local.vocabulary:
        # logits after a prefill: each prompt's, and then each row's; those of all ranks are gathered from parts
        prefills.append((2 + (2 / local.tp_size if local.tp_size > 1 else 0)) * whole * b + received)
        if load.is_filtered or not kernels.fused_sampling:
            # logits, and of each run two buffers of the sampler and the copy that is cut into blocks
            steps.append(whole * (b + FLOAT32) + load.n_runs * 2 * whole * FLOAT32)
        steps.append(bounded)
        prefills.append(bounded + received)
        waiting += local.model.vocab_size if waiting else 0
    weights, cache = _packed_weights(local, b, kernels), load.n_runs * (2 * len(local.layers) * layer + waiting * b)
    cache += 0 if kernels.fuses_attention(local.model) else layer
    recorded = 0.0
    if kernels.records_steps and local.tp_size == 1 and not (local.model.moe and b == FLOAT32):
        # what records read and write, and what a step computes in, which nothing else may use meanwhile
        recorded = load.n_runs * (2 * n_rows * local.hidden + whole) * b
        largest = max(whole * FLOAT32, 2 * n_rows * local.inner * b)
        recorded += _graph_pool(max([n_rows * block for block in blocks] + [whole * (b + FLOAT32), bounded]), largest)
    moments = [
        max(prefills, default=0.0) + (recorded if load.n_later else 0.0),
        max(steps, default=0.0) + recorded,
        _packing(local, b, kernels) - cache,  # which is not there yet
    ]
    return GenerationBytes(weights, cache, math.ceil(max(moments)))


def _graph_pool(n_bytes: float, largest: int) -> float:
    """Return the bytes of the segments for tensors of so many bytes, of which the largest one has `largest`."""
    if largest > CUDA_LARGE:
        n_bytes = math.ceil(n_bytes / CUDA_SEGMENT) * CUDA_SEGMENT
    return n_bytes + GRAPH_POOL


def _packing(local: LocalShape, b: int, kernels: Kernels) -> int:
    """Return the bytes beside packed weights when the last block's MLP is packed, before the head.

    A matrix with an adapter, or of another dtype, is a copy until it is packed: that of `up` until `down` is, too. It
    is merged in float32, from a copy of the same size in half precision.
    """
    model, layers = local.model, local.layers
    if not layers or local.experts_inner(layers[-1]):
        return 0
    is_converted = b != local.element_bytes

    def copied(name: str) -> int:
        return local.inner * local.hidden * b * (model.has_adapter(name) or is_converted)

    packs = kernels.packs_weights or is_converted
    beside = copied("up") + copied("down") * kernels.packs_weights
    if model.has_adapter("down") and local.element_bytes < FLOAT32:
        beside = max(beside, copied("up") + local.inner * local.hidden * (2 * FLOAT32 - b))
    head = max(math.ceil(local.vocabulary / tile) * tile for tile in kernels.tiles) * local.hidden * b if packs else 0
    return beside - head


def _packed_weights(local: LocalShape, b: int, kernels: Kernels) -> int:
    h, is_converted = local.hidden, b != local.element_bytes
    copies_all = kernels.packs_weights or is_converted
    n_elements = 0

    def tiled(n_outputs: int) -> int:
        return max(math.ceil(n_outputs / tile) * tile for tile in kernels.tiles)

    def copies(name: str) -> bool:
        return copies_all or local.model.has_adapter(name)

    for layer in local.layers:
        n_elements += tiled(local.queries + 2 * local.keys) * h
        inner = local.experts_inner(layer)
        if inner and local.model.moe is not None:
            n_elements += 3 * local.model.moe.n_experts * inner * h if is_converted else 0
        else:
            n_products = 2 if local.model.gated_mlp else copies("up")  # gate and up are joined
            n_elements += n_products * tiled(local.inner) * h
            n_elements += tiled(h) * local.inner * copies("down")
        n_elements += tiled(h) * local.queries * copies("o")
    if copies_all:
        n_elements += tiled(local.vocabulary) * h
    if local.model.attention_bias:
        n_elements += len(local.layers) * (local.queries + 2 * local.keys)
    return n_elements * b

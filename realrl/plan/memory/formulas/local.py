"""Sizes of one rank's part of a model, and the properties of kernels that decide memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from realrl.plan.memory.buffers import FLOAT32
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
        records_steps: decode steps are recorded as a whole, and what they compute in has memory of its own.
        shares_prompts: prompts that several sequences of a sample begin with are computed once in every dtype, and not
            in float32 alone.
        repeats_heads: where sequences are padded to attend, keys and values are repeated for the heads that share them.
        splits_sums: sums over tokens are made of parts, which have memory of their own.
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
    records_steps: bool = False
    repeats_heads: bool = False
    splits_sums: bool = False

    def computes_once(self, model: DecoderConfig) -> bool:
        """Return True if a prompt that several sequences begin with is computed once."""
        return model.moe is None and (self.shares_prompts or model.dtype == "float32")

    def joins_attention(self, model: DecoderConfig) -> bool:
        """Return True if sequences of similar length attend together, and the results of all groups are joined."""
        return self.shares_prompts or model.dtype == "float32"

    def attended_keys(self, local: LocalShape) -> int:
        """Return the size of a token's keys as attention reads them: K, or Q where they are repeated."""
        model = local.model
        is_repeated = self.repeats_heads and self.joins_attention(model) and not model.keeps_scores
        return local.queries if is_repeated else local.keys

    def fuses_attention(self, model: DecoderConfig) -> bool:
        """Return True if the kernel of `fused_heads` takes this model's heads."""
        is_whole = self.fused_heads is not None and model.head_dim % self.fused_heads == 0
        return is_whole and model.has_plain_attention


ON_CUDA = Kernels(records_steps=True, repeats_heads=True, splits_sums=True)
"""The kernels of CUDA; a run that records nothing, by `generation.cuda_graphs=false`, takes less."""


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
    layers: tuple[int, ...]
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

    @property
    def rotation(self) -> int:
        """Elements per token of the rotation's tables: a cosine and a sine for each dimension of a head."""
        return 2 * self.model.rope_dim * (1 if self.model.local_rope_theta is None else 2)

    @property
    def norm_bytes(self) -> int:
        """The size of an element of what a fused norm reads: with an offset it computes in float32."""
        return max(FLOAT32, self.element_bytes) if self.model.norm_offset else self.element_bytes

    @cached_property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """A block of each kind, dense or of experts, and how many there are; their bytes are equal."""
        if self.model.moe is None:
            return tuple((layer, len(self.layers)) for layer in self.layers[-1:])
        last = {self.experts_inner(layer): layer for layer in self.layers}
        numbers = Counter(map(self.experts_inner, self.layers))
        return tuple((layer, numbers[inner]) for inner, layer in last.items())

    def experts_inner(self, layer: int) -> int:
        """Return the inner size of one expert on this rank; 0 for a dense block."""
        moe = self.model.moe
        if moe is None or layer in moe.dense_layers:
            return 0
        return own_units(moe.intermediate_size, self.tp_rank, self.tp_size)


def local_shape(model: DecoderConfig, shard: ModelShard, *, sp: bool, element_bytes: int) -> LocalShape:
    tp_rank, tp_size = shard.tp_rank, shard.tp_size
    n_heads = own_units(model.n_heads, tp_rank, tp_size)
    n_kv_heads = own_units(model.n_kv_heads, tp_rank, tp_size)
    return LocalShape(
        model=model,
        layers=shard.layers,
        hidden=model.hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        queries=n_heads * model.head_dim,
        keys=n_kv_heads * model.head_dim,
        inner=own_units(model.intermediate_size, tp_rank, tp_size),
        vocabulary=own_units(model.vocab_size, tp_rank, tp_size) if shard.has_head and model.head == "lm" else 0,
        element_bytes=element_bytes,
        row_share=1 / tp_size if sp else 1.0,
        has_embedding=shard.has_embedding,
        has_head=shard.has_head,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def own_units(n_units: int, tp_rank: int, tp_size: int) -> int:
    """Return how many units a tensor rank has."""
    start, stop = units_of(n_units, tp_rank, tp_size)
    return stop - start

"""Work of one pipeline stage: FLOPs, bytes and messages, from the shapes of a rank's part of a model.

A pass computes T tokens, of which it scores some with the head. S is the number of pairs of a token and one that it
sees. Products of a matrix of E elements take 2 E FLOPs a token forward, attention of Q query channels 4 Q a pair
(Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", appendix).
Backward, products take twice as much, once for the input's gradient and once for the weight's, which frozen matrices
leave out; attention 2.5 times as much, since scores are computed again (Dao 2023, FlashAttention-2, section 3.1).

Invariants:
    - no function gives less for more tokens, pairs or layers;
    - tensor parallelism divides FLOPs and bytes of matrices and heads, up to rounding, and nothing else but rows that
      sequence parallelism divides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.memory.buffers import LOGITS_CHUNK
from realrl.plan.memory.formulas.local import local_shape
from realrl.plan.parameters.adapters import is_adapter, is_trained
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.shards import ModelShard, shard_of
from realrl.plan.parameters.specs import DTYPE_BYTES
from realrl.plan.parameters.stages import stage_layers
from realrl.shape import DecoderConfig

Array = npt.NDArray[np.float64]
Window = int | None

LOGIT_BYTES = (
    28.0  # read and written for the softmax of one logit: a float32 copy, its maximum, exponentials, their sum
)


@dataclass(frozen=True)
class Experts:
    """The experts of a stage's blocks.

    Attributes:
        stored: bytes of the matrices of all experts.
        n_experts, top_k: experts of a layer, and those that compute a token.
    """

    stored: float
    n_experts: int
    top_k: int

    def bytes_read(self, n_tokens: Array) -> Array:
        """Return the bytes of the experts that some token chooses, if each token's choice is random."""
        share: Array = 1.0 - (1.0 - self.top_k / self.n_experts) ** n_tokens
        return self.stored * share


@dataclass(frozen=True)
class StageWork:
    """Work of one stage on one tensor-parallel rank, the one with the most.

    Attributes:
        dtype: of matrices and activations.
        element_bytes: size of one element of them.
        n_layers: its blocks.
        matrices: elements of the blocks' matrices that a token meets, without adapters.
        adapters: elements of adapters, which a token meets all of.
        matrix_bytes: bytes of the matrices that every pass reads, without experts.
        experts: the experts; None in a dense stage.
        queries: query channels of a block.
        windows: (window, blocks that have it).
        cache_bytes: keys and values of one token in one block.
        row_bytes: bytes that norms, residuals, rotations and gates of all blocks read and write for a token.
        message_bytes: one token's hidden states, as one rank sends them to the next stage.
        head: elements of the head on this rank, 0 on other stages than the last.
        logits: logits of a scored token on this rank.
        n_trained: parameters with an optimizer on this rank.
        is_frozen: only adapters and a scalar head are trained.
        has_embedding, has_head: True on the first and on the last stage.
        is_tied: the head's weight is the embedding's.
    """

    dtype: str
    element_bytes: int
    n_layers: int
    matrices: float
    adapters: float
    matrix_bytes: float
    experts: Experts | None
    queries: int
    windows: tuple[tuple[Window, int], ...]
    cache_bytes: float
    row_bytes: float
    message_bytes: float
    hidden_bytes: float
    head: float
    logits: float
    n_trained: float
    is_frozen: bool
    has_embedding: bool
    has_head: bool
    is_tied: bool

    def bytes_read(self, n_tokens: Array) -> Array:
        """Return the bytes of matrices that a pass over so many tokens reads in the blocks."""
        experts = np.zeros_like(n_tokens) if self.experts is None else self.experts.bytes_read(n_tokens)
        return experts + self.matrix_bytes

    def product_flops(self, n_tokens: float, *, is_backward: bool = False) -> float:
        """Return the FLOPs of the blocks' products."""
        times = (1.0 if self.is_frozen else 2.0) if is_backward else 1.0
        return 2.0 * n_tokens * (times * self.matrices + (2.0 if is_backward else 1.0) * self.adapters)

    def attention_flops(self, n_pairs: float, *, is_backward: bool = False) -> float:
        """Return the FLOPs of attention in all blocks; `n_pairs` adds up over them."""
        return 4.0 * self.queries * n_pairs * (2.5 if is_backward else 1.0)

    def head_flops(self, n_scored: Array, *, is_backward: bool = False) -> Array:
        """Return the FLOPs of the head; backward computes the logits of several chunks again."""
        times = np.ones_like(n_scored)
        if is_backward:
            times = np.where(n_scored * self.logits > LOGITS_CHUNK, 2.0, 1.0) + (0.0 if self.is_frozen else 1.0)
        return 2.0 * self.head * times * n_scored


def stage_work(model: DecoderConfig, strategy: ParallelStrategy, stage: int) -> StageWork:
    """Return the work of one stage of a model under a strategy.

    Raises:
        AllocationError: tp or pp does not fit the model.
    """
    return stage_works(model, strategy)[stage]


def stage_works(model: DecoderConfig, strategy: ParallelStrategy) -> tuple[StageWork, ...]:
    """Return the work of each stage; equal ones are one object.

    Raises:
        AllocationError: tp or pp does not fit the model.
    """
    return _stage_works(model, replace(strategy, dp=1))


def chunk_works(model: DecoderConfig, strategy: ParallelStrategy) -> tuple[StageWork, ...]:
    """Return the work of each chunk, which is that of a stage where there are as many stages as chunks.

    Raises:
        AllocationError: tp or pp does not fit the model.
    """
    return stage_works(model, replace(strategy, pp=strategy.pp * strategy.vpp, vpp=1))


@lru_cache(maxsize=1024)
def _stage_works(model: DecoderConfig, strategy: ParallelStrategy) -> tuple[StageWork, ...]:
    return tuple(_stage_work(model, strategy, first) for first in first_alike(model, strategy.pp, strategy.vpp))


@lru_cache(maxsize=512)
def first_alike(model: DecoderConfig, pp: int, vpp: int = 1) -> tuple[int, ...]:
    """Return for each stage the first one that has equal work."""
    kinds = [
        (
            stage == 0,
            stage == pp - 1,
            [[(model.window_of(layer), model.experts_of(layer) is None) for layer in chunk] for chunk in chunks],
        )
        for stage, chunks in enumerate(stage_layers(model, pp, vpp))
    ]
    return tuple([kinds.index(kind) for kind in kinds])


@lru_cache(maxsize=4096)
def _stage_work(model: DecoderConfig, strategy: ParallelStrategy, stage: int) -> StageWork:
    mesh_rank = strategy.mesh_rank(pp_rank=stage, dp_rank=0, tp_rank=strategy.tp - 1)  # the last rank holds the most
    shard = shard_of(model, strategy, mesh_rank)
    local = local_shape(model, shard, sp=strategy.sp, element_bytes=DTYPE_BYTES[model.dtype])
    b, h, moe = local.element_bytes, model.hidden_size, model.moe
    met, adapters, stored, expert_bytes = _matrices(model, shard)
    rows = 0.0
    windows: dict[Window, int] = {}
    for layer in shard.layers:
        width = 3 * local.inner
        if local.experts_inner(layer) and moe is not None:
            width = moe.top_k * (3 * local.experts_inner(layer) + 2 * h)
        rows += (10 * h * local.row_share + 2 * (local.queries + local.keys) + width) * b
        window = model.window_of(layer)
        windows[window] = windows.get(window, 0) + 1
    is_lm = model.head == "lm"
    return StageWork(
        dtype=model.dtype,
        element_bytes=b,
        n_layers=len(shard.layers),
        matrices=met,
        adapters=adapters,
        matrix_bytes=stored,
        experts=None if moe is None else Experts(expert_bytes, moe.n_experts, moe.top_k),
        queries=local.queries,
        windows=tuple(windows.items()),
        cache_bytes=2.0 * local.keys * b,
        row_bytes=rows,
        message_bytes=h * b * local.row_share,
        hidden_bytes=h * b,
        head=float(h * (local.vocabulary if is_lm else 1)) if shard.has_head else 0.0,
        logits=float(local.vocabulary),
        n_trained=float(sum(shard.n_elements_of(s) for s in parameter_specs(model) if is_trained(model, s.name))),
        is_frozen=model.lora is not None,
        has_embedding=shard.has_embedding,
        has_head=shard.has_head,
        is_tied=model.tied_embeddings and is_lm,
    )


def _matrices(model: DecoderConfig, shard: ModelShard) -> tuple[float, float, float, float]:
    """Return what the blocks' matrices hold on a rank.

    Returns:
        Elements that a token meets, those of adapters, bytes of dense matrices and of experts.
    """
    met = adapters = stored = experts = 0.0
    for spec in parameter_specs(model):
        if not isinstance(spec.layer, int) or len(spec.shape) < 2:
            continue
        n = shard.n_elements_of(spec)
        if is_adapter(spec.name):
            adapters += n
            continue
        met += n / spec.n_experts * spec.top_k
        if spec.n_experts > 1:
            experts += n * DTYPE_BYTES[spec.dtype]
        else:
            stored += n * DTYPE_BYTES[spec.dtype]
    return met, adapters, stored, experts


def attended(lengths: npt.ArrayLike, window: Window) -> Array:
    """Return the pairs of a token and one that it sees, itself included, for sequences of these lengths."""
    n: Array = np.asarray(lengths, dtype=np.float64)
    if window is None:
        return n * (n + 1.0) / 2.0
    inside = np.minimum(n, window)
    return inside * (inside + 1.0) / 2.0 + (n - inside) * window


@lru_cache(maxsize=64)
def windows_of(model: DecoderConfig) -> tuple[Window, ...]:
    """Return the windows that some block of a model has, each once."""
    return tuple(dict.fromkeys(model.window_of(layer) for layer in range(model.n_layers)))

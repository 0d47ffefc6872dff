"""Which slice of which parameter each rank holds.

Parameters have the names of `realrl.model.decoder.Decoder`, in the order of its `named_parameters()`. A strategy splits
the blocks over pipeline stages and most parameters over tensor ranks; data-parallel ranks hold the same.

| parameter | split along | in units of |
|---|---|---|
| embedding, language-model head | dim 0 | vocabulary rows |
| embedding of learned positions | dim 0 | positions |
| q and its bias | dim 0 | attention heads |
| k, v and their biases | dim 0 | KV heads |
| gate, up and their biases | dim 0 | rows |
| o | dim 1 | attention heads |
| down | dim 1 | columns |
| gate, up of all experts | dim 1, of [experts, rows, columns] | rows |
| down of all experts | dim 2 | columns |
| router of the experts | replicated | |
| norms and their biases, biases of o and down, value or reward head | replicated | |

Invariants:
- tp_rank r of tp holds the units [r * n // tp, (r + 1) * n // tp); where tp exceeds the number of KV heads, KV head
  r * n // tp, which tp / n ranks then share;
- the slices of the tensor ranks of a stage cover every parameter of the stage, and overlap in shared KV heads only;
- the stages are contiguous, not empty, cover all blocks, and no other split has a cheaper dearest stage;
- the embedding is on the first stage, the final norm and the head on the last; a tied embedding is on both;
- every rank of a layout has one coordinate (pp, dp, tp), and every coordinate one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import ParallelStrategy, nearest_strategy
from realrl.plan.parameters.adapters import LoRA, is_adapter, with_adapters
from realrl.plan.parameters.stages import split_by_cost

Layer: TypeAlias = int | Literal["embedding", "head"]
"""Index of a block; "embedding"; "head" is the final norm and the head."""

Slice: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) for each dim."""

Unit: TypeAlias = Literal["head", "kv_head", "row"]
"""What a parameter is cut between: heads (evenly), KV heads (evenly, or shared), single rows or columns (any cut)."""

_UNITS: tuple[Unit, ...] = ("head", "kv_head", "row")
_DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


class ExpertsShape(Protocol):
    """What decides the parameters of a mixture of experts; `realrl.shape.MoEConfig` is one."""

    @property
    def n_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def dense_layers(self) -> tuple[int, ...]: ...


class ModelShape(Protocol):
    """What of a model's configuration decides its parameters; `realrl.shape.DecoderConfig` is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def tied_embeddings(self) -> bool: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def gated_mlp(self) -> bool: ...
    @property
    def norm_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def learned_positions(self) -> bool: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def moe(self) -> ExpertsShape | None: ...
    @property
    def head(self) -> str: ...
    @property
    def dtype(self) -> object: ...
    @property
    def lora(self) -> LoRA | None: ...


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model.

    Attributes:
        name: as in `Decoder.named_parameters()`.
        shape: of the whole parameter.
        dtype: like "float32".
        layer: the block, or the end of the model, that it is a part of.
        sharded_dim: the dim that tensor parallelism splits; None for a replicated parameter.
        n_units: units along `sharded_dim` that are never split; 1 for a replicated parameter.
        also_layer: "head" for a tied embedding, which the last stage needs as well.
        unit: what the units are; None for a replicated parameter.
        n_experts: experts whose weights the parameter holds, along dim 0; 1 outside of a mixture.
        top_k: how many of them compute a token.
        is_tp_partial: replicated, but each tensor rank uses it for its own slice of the activations, and so computes a
            part of its gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: Layer
    sharded_dim: int | None = None
    n_units: int = 1
    also_layer: Layer | None = None
    unit: Unit | None = None
    n_experts: int = 1
    top_k: int = 1
    is_tp_partial: bool = False

    @property
    def n_elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def n_elements_per_token(self) -> int:
        """Elements that a token meets: all of them, or those of its experts."""
        return self.n_elements // self.n_experts * self.top_k

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.n_elements * _DTYPE_BYTES[self.dtype]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit; of the whole parameter if it is replicated."""
        return self.num_bytes // self.n_units

    @property
    def unit_length(self) -> int:
        """Extent of one unit along `sharded_dim`; 0 if the parameter is replicated."""
        return 0 if self.sharded_dim is None else self.shape[self.sharded_dim] // self.n_units

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer that needs the parameter."""
        return (self.layer,) if self.also_layer is None else (self.layer, self.also_layer)


@dataclass(frozen=True, kw_only=True)
class ModelShard:
    """The part of a model that one rank builds: its blocks, and its tensor-parallel slice of them."""

    layers: range
    has_embedding: bool
    has_head: bool
    tp_rank: int = 0
    tp_size: int = 1

    def has(self, layer: Layer) -> bool:
        """Whether the shard contains a layer."""
        if layer == "embedding":
            return self.has_embedding
        return self.has_head if layer == "head" else layer in self.layers


def parameter_specs(config: ModelShape) -> tuple[ParameterSpec, ...]:
    """All parameters of a model, in the order of `Decoder.named_parameters()`.

    Raises:
        AllocationError: the dtype is not a floating-point type whose size is known.
    """
    dtype = str(config.dtype).removeprefix("torch.")
    if dtype not in _DTYPE_BYTES:
        raise AllocationError(f"parameters of dtype {dtype}", remedy=f"Use one of {', '.join(_DTYPE_BYTES)}.")
    vocabulary = (config.vocab_size, config.hidden_size)
    is_lm = config.head == "lm"
    tied = is_lm and config.tied_embeddings
    specs = [
        ParameterSpec(
            "embedding.weight", vocabulary, dtype, "embedding", 0, config.vocab_size, "head" if tied else None, "row"
        )
    ]
    if config.learned_positions:
        n, shape = config.max_positions, (config.max_positions, config.hidden_size)
        specs.append(ParameterSpec("position_embedding.weight", shape, dtype, "embedding", 0, n, None, "row"))
    for index in range(config.n_layers):
        specs += _block_specs(config, index, dtype)
    for part in ("weight", "bias") if config.norm_bias else ("weight",):
        specs.append(ParameterSpec(f"norm.{part}", (config.hidden_size,), dtype, "head"))
    if not is_lm:
        specs.append(ParameterSpec("head.weight", (1, config.hidden_size), dtype, "head"))
    elif not tied:
        specs.append(ParameterSpec("head.weight", vocabulary, dtype, "head", 0, config.vocab_size, None, "row"))
    return with_adapters(specs, config.lora)


def _block_specs(config: ModelShape, index: int, dtype: str) -> list[ParameterSpec]:
    specs: list[ParameterSpec] = []
    size, inner = config.hidden_size, config.intermediate_size

    def norm(name: str) -> None:
        for part in ("weight", "bias") if config.norm_bias else ("weight",):
            specs.append(ParameterSpec(f"blocks.{index}.{name}.{part}", (size,), dtype, index))

    def head_norm(name: str) -> None:
        name, shape = f"blocks.{index}.attention.{name}.weight", (config.head_dim,)
        specs.append(ParameterSpec(name, shape, dtype, index, is_tp_partial=True))

    def linear(name: str, shape: tuple[int, int], dim: int, n_units: int, unit: Unit, *, bias: bool) -> None:
        prefix = f"blocks.{index}.{name}"
        specs.append(ParameterSpec(f"{prefix}.weight", shape, dtype, index, dim, n_units, None, unit))
        if bias and dim == 0:
            specs.append(ParameterSpec(f"{prefix}.bias", shape[:1], dtype, index, 0, n_units, None, unit))
        elif bias:
            specs.append(ParameterSpec(f"{prefix}.bias", shape[:1], dtype, index))

    q_size, kv_size = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    norm("attention_norm")
    linear("attention.q", (q_size, size), 0, config.n_heads, "head", bias=config.attention_bias)
    linear("attention.k", (kv_size, size), 0, config.n_kv_heads, "kv_head", bias=config.attention_bias)
    linear("attention.v", (kv_size, size), 0, config.n_kv_heads, "kv_head", bias=config.attention_bias)
    linear("attention.o", (size, q_size), 1, config.n_heads, "head", bias=config.o_bias)
    if config.qk_norm:
        head_norm("q_norm")
        head_norm("k_norm")
    norm("mlp_norm")
    if config.moe is not None and index not in config.moe.dense_layers:
        return specs + _expert_specs(config.moe, index, size, dtype)
    if config.gated_mlp:
        linear("mlp.gate", (inner, size), 0, inner, "row", bias=config.mlp_bias)
    linear("mlp.up", (inner, size), 0, inner, "row", bias=config.mlp_bias)
    linear("mlp.down", (size, inner), 1, inner, "row", bias=config.mlp_bias)
    return specs


def _expert_specs(moe: ExpertsShape, index: int, size: int, dtype: str) -> list[ParameterSpec]:
    n, inner, prefix = moe.n_experts, moe.intermediate_size, f"blocks.{index}.mlp"

    def experts(word: str, shape: tuple[int, int, int], dim: int) -> ParameterSpec:
        return ParameterSpec(
            f"{prefix}.experts.{word}", shape, dtype, index, dim, inner, None, "row", n_experts=n, top_k=moe.top_k
        )

    return [
        ParameterSpec(f"{prefix}.router.weight", (n, size), dtype, index, is_tp_partial=True),
        experts("gate", (n, inner, size), 1),
        experts("up", (n, inner, size), 1),
        experts("down", (n, size, inner), 2),
    ]


# ---------------------------------------------------------------- tensor parallelism


def check_tp(specs: Sequence[ParameterSpec], tp: int) -> None:
    """Refuse a tensor-parallel size that the model's heads, vocabulary or MLP do not allow.

    Raises:
        AllocationError: names the rule and the nearest legal size.
    """
    problem = _tp_problem(specs, tp)
    if problem is not None:
        n_heads = _fewest_units(specs, "head", default=1)
        legal = (size for size in range(1, n_heads + 1) if _tp_problem(specs, size) is None)
        nearest = min(legal, key=lambda size: (abs(size - tp), size))
        raise AllocationError(
            f"tp={tp} does not fit the model: {problem}", remedy=f"The nearest legal tp is {nearest}."
        )


def _tp_problem(specs: Sequence[ParameterSpec], tp: int) -> str | None:
    if tp < 1:
        return "it is at least 1"
    heads, kv_heads, rows = (_fewest_units(specs, unit, default=tp) for unit in _UNITS)
    if heads % tp:
        return f"it must divide the {heads} attention heads"
    if kv_heads % tp and tp % kv_heads:
        return f"it must divide the {kv_heads} KV heads or be a multiple of them"
    if tp > rows:
        return f"it must not exceed the {rows} rows of the vocabulary or the MLP"
    return None


def _fewest_units(specs: Sequence[ParameterSpec], unit: Unit, *, default: int) -> int:
    return min((spec.n_units for spec in specs if spec.unit == unit), default=default)


def units_of(n_units: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """(start, stop) of the units that a tensor rank holds; with fewer units than ranks, ranks share units."""
    start = tp_rank * n_units // tp_size
    return start, max((tp_rank + 1) * n_units // tp_size, start + 1)


def slice_of(spec: ParameterSpec, tp_rank: int, tp_size: int) -> Slice:
    """The part of a parameter that a tensor rank holds, (start, stop) for each dim of the whole parameter."""
    whole = tuple((0, size) for size in spec.shape)
    if spec.sharded_dim is None:
        return whole
    start, stop = (edge * spec.unit_length for edge in units_of(spec.n_units, tp_rank, tp_size))
    return (*whole[: spec.sharded_dim], (start, stop), *whole[spec.sharded_dim + 1 :])


# ---------------------------------------------------------------- pipeline stages


def stage_layers(config: ModelShape, pp: int) -> tuple[range, ...]:
    """The blocks of each pipeline stage; see `stages_of`."""
    return stages_of(parameter_specs(config), pp)


def stages_of(specs: Sequence[ParameterSpec], pp: int) -> tuple[range, ...]:
    """Split the blocks over stages so that the dearest stage is as cheap as possible.

    The cost of a block, and of the head on the last stage, is the size of its matrices, of experts those that compute a
    token: that is what a token costs. Looking up the embedding is free, and so are adapters: a model has the same
    stages with them and without. Among equal splits the one with the most even stages is taken.

    Raises:
        AllocationError: there are more stages than blocks, or none.
    """
    specs = [spec for spec in specs if not is_adapter(spec.name)]
    n_layers = 1 + max(spec.layer for spec in specs if isinstance(spec.layer, int))
    if not 1 <= pp <= n_layers:
        raise AllocationError(
            f"pp={pp} does not fit a model of {n_layers} layer{'s' if n_layers > 1 else ''}: "
            "every pipeline stage needs a layer",
            remedy=f"The nearest legal pp is {min(max(pp, 1), n_layers)}.",
        )
    blocks = [0] * n_layers
    for spec in specs:
        if isinstance(spec.layer, int) and len(spec.shape) > 1:
            blocks[spec.layer] += spec.n_elements_per_token
    head = sum(spec.n_elements for spec in specs if "head" in spec.layers and len(spec.shape) > 1)
    if pp > 1 and len(set(blocks)) > 1:
        return split_by_cost(blocks, head, pp)
    block = blocks[0]

    def sizes(n_last: int) -> list[int]:
        share, extra = divmod(n_layers - n_last, pp - 1)
        return [share + (stage >= pp - 1 - extra) for stage in range(pp - 1)] + [n_last]

    def cost(n_last: int) -> tuple[int, int]:
        costs = [size * block for size in sizes(n_last)]
        costs[-1] += head
        return max(costs), sum(c * c for c in costs)

    best = sizes(min(range(1, n_layers - pp + 2), key=cost)) if pp > 1 else [n_layers]
    ends = [sum(best[:stage]) for stage in range(pp + 1)]
    return tuple(range(ends[stage], ends[stage + 1]) for stage in range(pp))


def shard_of(config: ModelShape, strategy: ParallelStrategy, mesh_rank: int) -> ModelShard:
    """The part of a model that a rank of a mesh builds.

    Raises:
        AllocationError: tp or pp does not fit the model.
    """
    specs = parameter_specs(config)
    check_tp(specs, strategy.tp)
    pp_rank, _, tp_rank = strategy.coordinates(mesh_rank)
    return _shard(stages_of(specs, strategy.pp), strategy, pp_rank, tp_rank)


def whole_shard(config: ModelShape) -> ModelShard:
    """All of a model."""
    return ModelShard(layers=range(config.n_layers), has_embedding=True, has_head=True)


def _shard(stages: Sequence[range], strategy: ParallelStrategy, pp_rank: int, tp_rank: int) -> ModelShard:
    return ModelShard(
        layers=stages[pp_rank],
        has_embedding=pp_rank == 0,
        has_head=pp_rank == strategy.pp - 1,
        tp_rank=tp_rank,
        tp_size=strategy.tp,
    )


# ---------------------------------------------------------------- layouts


def parameter_layout(
    specs: Sequence[ParameterSpec], strategy: ParallelStrategy, ranks: Sequence[int]
) -> ParameterLayout:
    """The layout in which ``ranks[mesh_rank]`` holds what the strategy gives to `mesh_rank`.

    Args:
        specs: from `parameter_specs`.
        strategy: its dp, tp and pp; `sp` changes nothing here.
        ranks: global ranks in mesh order (pp, dp, tp with tp fastest); any different numbers in any order.

    Raises:
        AllocationError: the number of ranks is not the strategy's, a rank occurs twice, or tp or pp does not fit.
    """
    return ParameterLayout(tuple(specs), strategy, tuple(ranks))


@dataclass(frozen=True)
class ParameterLayout:
    """Parameters, how they are split, and the global rank at each coordinate. Made by `parameter_layout`."""

    specs: tuple[ParameterSpec, ...]
    strategy: ParallelStrategy
    ranks: tuple[int, ...]
    stages: tuple[range, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n_ranks, n_needed = len(self.ranks), self.strategy.n_devices
        if n_ranks != n_needed:
            nearest = nearest_strategy(self.strategy, n_ranks) if n_ranks else "none"
            raise AllocationError(
                f"strategy {self.strategy} needs {n_needed} ranks, not {n_ranks}",
                remedy=f"The nearest strategy for {n_ranks} ranks is {nearest}.",
            )
        if len(set(self.ranks)) != n_ranks:
            double = next(rank for rank in self.ranks if self.ranks.count(rank) > 1)
            raise AllocationError(
                f"rank {double} is in a layout of strategy {self.strategy} more than once",
                remedy="Give each coordinate a rank of its own.",
            )
        check_tp(self.specs, self.strategy.tp)
        object.__setattr__(self, "stages", stages_of(self.specs, self.strategy.pp))

    def by_layer(self) -> tuple[ParameterLayout, ...]:
        """The same layout of each layer's parameters alone, in the order of the model."""
        layers: dict[Layer, list[ParameterSpec]] = {}
        for spec in self.specs:
            layers.setdefault(spec.layer, []).append(spec)
        return tuple(self._with_specs(specs) for specs in layers.values())

    def _with_specs(self, specs: Sequence[ParameterSpec]) -> ParameterLayout:
        """The layout of some of the parameters, with the stages of the whole model."""
        part = object.__new__(ParameterLayout)
        part.__dict__.update(specs=tuple(specs), strategy=self.strategy, ranks=self.ranks, stages=self.stages)
        return part

    @cached_property
    def _mesh_rank_of(self) -> dict[int, int]:
        return {rank: mesh_rank for mesh_rank, rank in enumerate(self.ranks)}

    @cached_property
    def _slices(self) -> dict[ModelShard, Mapping[str, Slice]]:
        return {}

    @cached_property
    def _num_bytes(self) -> dict[ModelShard, int]:
        return {}

    def __contains__(self, global_rank: object) -> bool:
        return global_rank in self._mesh_rank_of

    def coordinates_of(self, global_rank: int) -> tuple[int, int, int]:
        """``(pp_rank, dp_rank, tp_rank)`` of a rank.

        Raises:
            KeyError: the rank is not in the layout.
        """
        return self.strategy.coordinates(self._mesh_rank_of[global_rank])

    def rank_at(self, *, pp_rank: int, dp_rank: int, tp_rank: int) -> int:
        """The global rank at a coordinate."""
        return self.ranks[self.strategy.mesh_rank(pp_rank=pp_rank, dp_rank=dp_rank, tp_rank=tp_rank)]

    def shard_of(self, global_rank: int) -> ModelShard:
        """The part of the model that a rank builds.

        Raises:
            KeyError: the rank is not in the layout.
        """
        pp_rank, _, tp_rank = self.coordinates_of(global_rank)
        return _shard(self.stages, self.strategy, pp_rank, tp_rank)

    def slices_of(self, global_rank: int) -> Mapping[str, Slice]:
        """What a rank holds: parameter name -> slice of the whole parameter, in the order of the specs.

        Raises:
            KeyError: the rank is not in the layout.
        """
        shard = self.shard_of(global_rank)
        if shard not in self._slices:
            self._slices[shard] = MappingProxyType(
                {spec.name: slice_of(spec, shard.tp_rank, shard.tp_size) for spec in self.specs if _holds(shard, spec)}
            )
        return self._slices[shard]

    def num_bytes_of(self, global_rank: int) -> int:
        """Bytes of the parameters that a rank holds.

        Raises:
            KeyError: the rank is not in the layout.
        """
        shard = self.shard_of(global_rank)
        if shard not in self._num_bytes:
            total = 0
            for spec in self.specs:
                if _holds(shard, spec):
                    start, stop = (
                        (0, 1) if spec.sharded_dim is None else units_of(spec.n_units, shard.tp_rank, shard.tp_size)
                    )
                    total += (stop - start) * spec.unit_bytes
            self._num_bytes[shard] = total
        return self._num_bytes[shard]

    @property
    def model_bytes(self) -> int:
        """Bytes of the whole model, every parameter once."""
        return sum(spec.num_bytes for spec in self.specs)

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks that share a layer's slices: same pp_rank and dp_rank."""
        s = self.strategy
        return tuple(self.ranks[first : first + s.tp] for first in range(0, s.n_devices, s.tp))

    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks that hold the same: same pp_rank and tp_rank."""
        s = self.strategy
        return tuple(
            tuple(self.rank_at(pp_rank=pp, dp_rank=dp, tp_rank=tp) for dp in range(s.dp))
            for pp in range(s.pp)
            for tp in range(s.tp)
        )

    def pp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks of the stages of one pipeline: same dp_rank and tp_rank."""
        s = self.strategy
        return tuple(
            tuple(self.rank_at(pp_rank=pp, dp_rank=dp, tp_rank=tp) for pp in range(s.pp))
            for dp in range(s.dp)
            for tp in range(s.tp)
        )

    def __str__(self) -> str:
        return f"{self.strategy} on ranks {','.join(map(str, self.ranks))}"


def micro_dp_groups(source: ParameterLayout, target: ParameterLayout) -> tuple[tuple[int, ...], ...]:
    """Ranks that hold the same slices in the target layout and are of one replica of the source layout.

    For training 1-4-2 (p-t-d) and generation 1-2-2-2 (p_g-t_g-d_g-d) these are the micro data-parallel groups, of d_g
    ranks each. Ranks in the order of the target's dp_rank; ranks that the source layout lacks are in no group.
    """
    groups: dict[tuple[int, int, int], list[int]] = {}
    for members in target.dp_groups():
        for rank in members:
            if rank in source:
                pp_rank, _, tp_rank = target.coordinates_of(rank)
                groups.setdefault((source.coordinates_of(rank)[1], pp_rank, tp_rank), []).append(rank)
    return tuple(tuple(groups[key]) for key in sorted(groups))


def _holds(shard: ModelShard, spec: ParameterSpec) -> bool:
    return shard.has(spec.layer) or (spec.also_layer is not None and shard.has(spec.also_layer))

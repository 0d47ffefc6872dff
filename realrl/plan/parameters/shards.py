"""The part of a model that a rank holds: chunks of blocks of a pipeline stage, and a tensor-parallel slice of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.specs import Layer, ParameterSpec, Unit, units_of
from realrl.plan.parameters.stages import Stages, stage_layers
from realrl.shape import DecoderConfig

_UNITS: tuple[Unit, ...] = ("head", "kv_head", "row")


@dataclass(frozen=True, kw_only=True)
class ModelShard:
    """The part of a model that one rank builds: its blocks, and its tensor-parallel slice of them.

    Attributes:
        chunks: its blocks, in runs of neighbours; one run unless its stage has virtual stages.
        has_embedding: True if the embedding comes before the first chunk.
        has_head: True if final norm and head come after the last chunk.
        tp_rank, tp_size: which of how many slices.
    """

    chunks: tuple[range, ...]
    has_embedding: bool
    has_head: bool
    tp_rank: int = 0
    tp_size: int = 1

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of its blocks, ascending."""
        return tuple(chain.from_iterable(self.chunks))

    @property
    def by_chunk(self) -> tuple[ModelShard, ...]:
        """Each chunk as a shard of its own."""
        last = len(self.chunks) - 1
        return tuple(
            replace(
                self,
                chunks=(chunk,),
                has_embedding=self.has_embedding and i == 0,
                has_head=self.has_head and i == last,
            )
            for i, chunk in enumerate(self.chunks)
        )

    def has(self, layer: Layer) -> bool:
        """Return True if the shard contains a layer."""
        return layer in self._all_layers

    @cached_property
    def _all_layers(self) -> frozenset[Layer]:
        ends: list[tuple[Layer, bool]] = [("embedding", self.has_embedding), ("head", self.has_head)]
        return frozenset((*self.layers, *(layer for layer, is_held in ends if is_held)))

    def holds(self, spec: ParameterSpec) -> bool:
        """Return True if the shard contains a parameter, or a slice of it."""
        return self.has(spec.layer) or (spec.also_layer is not None and self.has(spec.also_layer))

    def n_units_of(self, spec: ParameterSpec) -> int:
        """Return the number of units of a parameter that the shard holds."""
        if not self.holds(spec):
            return 0
        if spec.sharded_dim is None:
            return 1
        start, stop = units_of(spec.n_units, self.tp_rank, self.tp_size)
        return stop - start

    def n_elements_of(self, spec: ParameterSpec) -> int:
        """Return the number of elements of a parameter that the shard holds."""
        return self.n_units_of(spec) * spec.n_elements // spec.n_units


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


def shard_of(config: DecoderConfig, strategy: ParallelStrategy, mesh_rank: int) -> ModelShard:
    """Return the part of a model that a rank of a mesh builds.

    Raises:
        AllocationError: tp or pp does not fit the model.
    """
    check_tp(parameter_specs(config), strategy.tp)
    pp_rank, _, tp_rank = strategy.coordinates(mesh_rank)
    return shard_at(stage_layers(config, strategy.pp, strategy.vpp), strategy, pp_rank, tp_rank)


def whole_shard(config: DecoderConfig) -> ModelShard:
    """Return the shard of a single rank that holds a whole model."""
    return ModelShard(chunks=(range(config.n_layers),), has_embedding=True, has_head=True)


def shard_at(stages: Stages, strategy: ParallelStrategy, pp_rank: int, tp_rank: int) -> ModelShard:
    """Return the part of a model that belongs to a coordinate, given the chunks of each stage."""
    return ModelShard(
        chunks=stages[pp_rank],
        has_embedding=pp_rank == 0,
        has_head=pp_rank == strategy.pp - 1,
        tp_rank=tp_rank,
        tp_size=strategy.tp,
    )

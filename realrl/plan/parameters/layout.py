"""Layouts: the slices of parameters that each rank holds.

A strategy splits the blocks over pipeline stages and most parameters over tensor ranks; data-parallel ranks hold the
same. With vpp virtual stages, a stage holds vpp chunks of neighbouring blocks, which are no neighbours of each other.

Invariants:
- tp_rank r of tp holds the units [r * n // tp, (r + 1) * n // tp); where tp exceeds the number of KV heads, KV head
  r * n // tp, which tp / n ranks then share;
- the slices of the tensor ranks of a stage cover every parameter of the stage, and overlap in shared KV heads only;
- the pp * vpp chunks are contiguous, not empty, cover all blocks, and no other split has a cheaper dearest chunk; chunk
  k is on stage k mod pp, so that with vpp = 1 the stages are the chunks;
- the embedding is on the first stage, the final norm and the head on the last; a tied embedding is on both;
- every rank of a layout has one coordinate (pp, dp, tp), and every coordinate one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import ParallelStrategy, nearest_strategy
from realrl.plan.parameters.shards import ModelShard, check_tp, shard_at
from realrl.plan.parameters.specs import Layer, ParameterSpec, Slice, slice_of, units_of
from realrl.plan.parameters.stages import Stages, stage_of_layers, stages_of


def parameter_layout(
    specs: Sequence[ParameterSpec], strategy: ParallelStrategy, ranks: Sequence[int]
) -> ParameterLayout:
    """Return the layout in which ``ranks[mesh_rank]`` holds the strategy's part for `mesh_rank`.

    Args:
        specs: from `parameter_specs`.
        strategy: dp, tp, pp and vpp; `sp` changes nothing here.
        ranks: global ranks in mesh order (pp, dp, tp with tp fastest); any distinct numbers in any order.

    Raises:
        AllocationError: the number of ranks is not the strategy's, a rank occurs twice, or tp or pp does not fit.
    """
    return ParameterLayout(tuple(specs), strategy, tuple(ranks))


@dataclass(frozen=True)
class ParameterLayout:
    """Parameters, their split, and the global rank at each coordinate. Made by `parameter_layout`."""

    specs: tuple[ParameterSpec, ...]
    strategy: ParallelStrategy
    ranks: tuple[int, ...]
    stages: Stages = field(init=False, repr=False, compare=False)

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
        object.__setattr__(self, "stages", stages_of(self.specs, self.strategy.pp, self.strategy.vpp))

    def by_layer(self) -> tuple[ParameterLayout, ...]:
        """Return the same layout of each layer's parameters alone, in the order of the model."""
        layers: dict[Layer, list[ParameterSpec]] = {}
        for spec in self.specs:
            layers.setdefault(spec.layer, []).append(spec)
        return tuple(self._with_specs(specs) for specs in layers.values())

    def _with_specs(self, specs: Sequence[ParameterSpec]) -> ParameterLayout:
        """Return the layout of some of the parameters, with the stages of the whole model."""
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
    def _num_bytes(self) -> dict[tuple[int, int], int]:
        return {}

    @cached_property
    def stage_of(self) -> Mapping[Layer, int]:
        """Layer -> pp_rank that holds it."""
        return stage_of_layers(self.stages)

    @cached_property
    def _unit_bytes(self) -> tuple[dict[int, int], ...]:
        """For each stage, number of units -> bytes of one unit of each parameter that has so many."""
        found: tuple[dict[int, int], ...] = tuple({} for _ in self.stages)
        for spec in self.specs:
            for stage in {self.stage_of[layer] for layer in spec.layers}:
                found[stage][spec.n_units] = found[stage].get(spec.n_units, 0) + spec.unit_bytes
        return found

    def __contains__(self, global_rank: object) -> bool:
        return global_rank in self._mesh_rank_of

    def coordinates_of(self, global_rank: int) -> tuple[int, int, int]:
        """Return ``(pp_rank, dp_rank, tp_rank)`` of a rank.

        Raises:
            KeyError: the rank is not in the layout.
        """
        return self.strategy.coordinates(self._mesh_rank_of[global_rank])

    def rank_at(self, *, pp_rank: int, dp_rank: int, tp_rank: int) -> int:
        """Return the global rank at a coordinate."""
        return self.ranks[self.strategy.mesh_rank(pp_rank=pp_rank, dp_rank=dp_rank, tp_rank=tp_rank)]

    def shard_of(self, global_rank: int) -> ModelShard:
        """Return the part of the model that a rank builds.

        Raises:
            KeyError: the rank is not in the layout.
        """
        pp_rank, _, tp_rank = self.coordinates_of(global_rank)
        return shard_at(self.stages, self.strategy, pp_rank, tp_rank)

    def slices_of(self, global_rank: int) -> Mapping[str, Slice]:
        """Return parameter name -> slice of the whole parameter that a rank holds, in the order of the specs.

        Raises:
            KeyError: the rank is not in the layout.
        """
        shard = self.shard_of(global_rank)
        if shard not in self._slices:
            self._slices[shard] = MappingProxyType(
                {spec.name: slice_of(spec, shard.tp_rank, shard.tp_size) for spec in self.specs if shard.holds(spec)}
            )
        return self._slices[shard]

    def num_bytes_of(self, global_rank: int) -> int:
        """Return the bytes of the parameters that a rank holds.

        Raises:
            KeyError: the rank is not in the layout.
        """
        pp_rank, _, tp_rank = self.coordinates_of(global_rank)
        if (pp_rank, tp_rank) not in self._num_bytes:
            spans = ((units_of(n, tp_rank, self.strategy.tp), size) for n, size in self._unit_bytes[pp_rank].items())
            self._num_bytes[pp_rank, tp_rank] = sum((stop - start) * size for (start, stop), size in spans)
        return self._num_bytes[pp_rank, tp_rank]

    @property
    def model_bytes(self) -> int:
        """Bytes of the whole model, every parameter once."""
        return sum(spec.num_bytes for spec in self.specs)

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return groups of global ranks that share a layer's slices: same pp_rank and dp_rank."""
        s = self.strategy
        return tuple(self.ranks[first : first + s.tp] for first in range(0, s.n_devices, s.tp))

    def __str__(self) -> str:
        return f"{self.strategy} on ranks {','.join(map(str, self.ranks))}"

"""The parts into which strategies cut a model, each kind of them counted once.

Most parts of a cut are alike: middle stages with equally many blocks, tensor ranks with equally many units. Whatever
memory depends on is equal for parts of one kind, under any strategy and number of replicas.

Invariants:
- every part has one kind, and parts of one kind have equal bytes of everything;
- only parts with tensor rank 0, which write checkpoints, are of a kind with others of tensor rank 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.memory.buffers import FLOAT32, REALLOC_LARGE
from realrl.plan.memory.formulas.local import LocalShape, local_shape
from realrl.plan.memory.saving import gathered_model, made_copies, model_copies
from realrl.plan.parameters.adapters import is_trained
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.realloc_overlap import Overlap, overlap_of, unit_sizes
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.plan.parameters.shards import ModelShard, check_tp, shard_at
from realrl.plan.parameters.specs import DTYPE_BYTES, Layer, ParameterSpec, units_of
from realrl.plan.parameters.stages import Stages, stages_of
from realrl.shape import DecoderConfig


class PartKind:
    """Sizes of all parts of one kind, taken from one of them, `shard`.

    Kinds of one `shape` compute alike, and differ in who writes checkpoints.
    """

    def __init__(
        self, model: DecoderConfig, specs: tuple[ParameterSpec, ...], shard: ModelShard, shape: object
    ) -> None:
        self.shard, self.shape = shard, shape
        self._model, self._all = model, specs
        self._specs = tuple(spec for spec in specs if shard.holds(spec))
        self._gathered: dict[tuple[bool, bool], int] = {}
        self._made: dict[bool, int] = {}
        self._partial: dict[bool, int] = {}
        self._packed: dict[int, int] = {}
        self._local: dict[bool, tuple[LocalShape, ...]] = {}

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Bytes of each parameter."""
        return tuple(self.shard.n_units_of(spec) * spec.unit_bytes for spec in self._specs)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(self._sizes)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest parameter."""
        return max(self._sizes, default=0)

    @cached_property
    def followed(self) -> tuple[int, int]:
        """Bytes of the largest layer, and of the largest parameter's copy in float32 where its dtype is another.

        Masters follow what arrives layer by layer, and take each parameter in float32.
        """
        layers: Counter[Layer] = Counter()
        copy = 0
        for spec, n_bytes in zip(self._specs, self._sizes, strict=True):
            layers[spec.layer] += n_bytes
            if (width := DTYPE_BYTES[spec.dtype]) < FLOAT32:
                copy = max(copy, n_bytes * FLOAT32 // width)
        return max(layers.values(), default=0), copy

    @cached_property
    def trained_sizes(self) -> tuple[tuple[int, int], ...]:
        """(bytes of an element, elements) of each parameter that a trained role trains."""
        return tuple(
            (spec.num_bytes // spec.n_elements, n_elements)
            for spec in self._specs
            if is_trained(self._model, spec.name) and (n_elements := self.shard.n_elements_of(spec))
        )

    @cached_property
    def copies(self) -> int:
        """Bytes of the model in a checkpoint that the rank of the part writes."""
        return model_copies(self._model, self._all, self.shard)

    def packed_bytes(self, source_tp: int) -> int:
        """Return the bytes that come in shared messages, in one round of a reallocation from `source_tp` ranks.

        A large slice goes into its place if it has its whole length there but for dim 0.
        """
        if source_tp not in self._packed:
            pairs = zip(self._specs, self._sizes, strict=True)
            self._packed[source_tp] = sum(size for spec, size in pairs if self._is_packed(spec, size, source_tp))
        return self._packed[source_tp]

    def _is_packed(self, spec: ParameterSpec, size: int, source_tp: int) -> bool:
        tp = self.shard.tp_size
        if spec.sharded_dim is None or (tp % source_tp == 0 and (spec.n_units % tp == 0 or tp == source_tp)):
            return size < REALLOC_LARGE
        smallest = spec.n_units // source_tp * spec.unit_bytes
        return source_tp % tp > 0 or spec.sharded_dim > 0 or smallest < REALLOC_LARGE

    def made_copies(self, zero_stage: int) -> int:
        """Return those bytes of `copies` that are gathered or merged for it."""
        if (zero_stage == 3) not in self._made:
            self._made[zero_stage == 3] = made_copies(self._model, self._all, self.shard, zero_stage=zero_stage)
        return self._made[zero_stage == 3]

    def partial(self, *, sp: bool) -> int:
        """Return the elements, in whole, of trained parameters whose gradients tensor ranks add up.

        See `realrl.model.decoder.Decoder.tp_partial_gradients`.
        """
        if sp not in self._partial:
            trained = (spec for spec in self._specs if is_trained(self._model, spec.name))
            tp = self.shard.tp_size
            self._partial[sp] = sum(spec.n_elements for spec in trained if _is_partial(spec, tp, sp=sp))
        return self._partial[sp]

    def local(self, *, sp: bool) -> tuple[LocalShape, ...]:
        """Return the part as the formulas of memory take it, and then each of its chunks."""
        if sp not in self._local:
            shards, width = (self.shard, *self.shard.by_chunk), DTYPE_BYTES[self._model.dtype]
            self._local[sp] = tuple(local_shape(self._model, shard, sp=sp, element_bytes=width) for shard in shards)
        return self._local[sp]

    def gathered(self, zero_stage: int, *, is_copied: bool) -> int:
        """Return the bytes that a save of the model gathers; see `gathered_model`."""
        key = zero_stage == 3, is_copied
        if key not in self._gathered:
            self._gathered[key] = gathered_model(self._all, self.shard, zero_stage=zero_stage, is_copied=is_copied)
        return self._gathered[key]


def _is_partial(spec: ParameterSpec, tp: int, *, sp: bool) -> bool:
    if spec.unit == "kv_head" and spec.n_units < tp:
        return True
    return tp > 1 and (spec.is_tp_partial or (sp and spec.sharded_dim is None and spec.name != "head.weight"))


@dataclass(frozen=True)
class Cut:
    """A model cut by a strategy.

    Attributes:
        stages: chunks of each stage.
        kinds: kind of each part; the part of pp_rank and tp_rank has the number ``pp_rank * tp + tp_rank``.
    """

    stages: Stages
    kinds: tuple[PartKind, ...]


class CutModel:
    """A model, and its cuts so far.

    Attributes:
        kept: settings of a role -> what it keeps on parts, for `realrl.plan.memory.roles`.
    """

    def __init__(self, model: DecoderConfig) -> None:
        self.model, self.specs = model, parameter_specs(model)
        self._sizes = unit_sizes(self.specs, model.n_layers)
        own = {model.n_heads, model.n_kv_heads, model.intermediate_size, model.vocab_size}
        self._n_units = sorted(own | {*self._sizes.n_units.tolist()})
        self._dense = set(range(model.n_layers) if model.moe is None else model.moe.dense_layers)
        self._kinds: dict[tuple[object, ...], PartKind] = {}
        self._shapes: dict[object, object] = {}
        self._cuts: dict[tuple[int, int, int], Cut] = {}
        self._overlaps: dict[tuple[int, ...], Overlap] = {}
        self.kept: dict[object, dict[Any, Any]] = {}

    def cut(self, strategy: ParallelStrategy) -> Cut:
        """Return the parts of a strategy.

        Raises:
            AllocationError: tp or pp does not fit the model.
        """
        key = strategy.tp, strategy.pp, strategy.vpp
        if key not in self._cuts:
            check_tp(self.specs, strategy.tp)
            stages = stages_of(self.specs, strategy.pp, strategy.vpp)
            self._cuts[key] = Cut(stages, tuple(self._kinds_of(stages, strategy)))
        return self._cuts[key]

    def overlap(self, source: ParallelStrategy, target: ParallelStrategy) -> Overlap:
        """Return the bytes that parts of two strategies have in common."""
        key = source.tp, source.pp, source.vpp, target.tp, target.pp, target.vpp
        if key not in self._overlaps:
            cuts = ((self.cut(strategy).stages, strategy.tp) for strategy in (source, target))
            self._overlaps[key] = overlap_of(self._sizes, *cuts)
        return self._overlaps[key]

    def _kinds_of(self, stages: Stages, strategy: ParallelStrategy) -> Iterator[PartKind]:
        for pp_rank, chunks in enumerate(stages):
            blocks = tuple(tuple(layer in self._dense for layer in chunk) for chunk in chunks)
            for tp_rank in range(strategy.tp):
                shard = shard_at(stages, strategy, pp_rank, tp_rank)
                spans = (units_of(n_units, tp_rank, strategy.tp) for n_units in self._n_units)
                sizes = tuple(stop - start for start, stop in spans)
                shape = blocks, shard.has_embedding, shard.has_head, strategy.tp, sizes
                key = shape, tp_rank == 0
                if key not in self._kinds:
                    self._kinds[key] = PartKind(self.model, self.specs, shard, self._shapes.setdefault(shape, object()))
                yield self._kinds[key]


@lru_cache(maxsize=4096)
def parts_of(strategy: ParallelStrategy) -> Matrix:
    """Return int64 [devices], the number of each mesh rank's part; do not write to it."""
    mesh_ranks = np.arange(strategy.n_devices)
    return mesh_ranks // (strategy.dp * strategy.tp) * strategy.tp + mesh_ranks % strategy.tp


@lru_cache(maxsize=4096)
def first_replica(strategy: ParallelStrategy) -> npt.NDArray[np.bool_]:
    """Return bool [devices], True for mesh ranks of the first replica; do not write to it."""
    is_first: npt.NDArray[np.bool_] = np.arange(strategy.n_devices) // strategy.tp % strategy.dp == 0
    return is_first

"""Bytes of a role on each part of its model: what it keeps, what a checkpoint copies, what its calls take.

All are counted once for each kind of part, and kept: the same role under the same strategy has the same bytes on any
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.backends import BACKENDS
from realrl.plan.memory.buffers import FLOAT32, RESPONSE_ROW_BYTES, ROW_BYTES
from realrl.plan.memory.cuts import CutModel, PartKind, first_replica, parts_of
from realrl.plan.memory.formulas.blocks import converted_bytes
from realrl.plan.memory.formulas.generation import generation_bytes
from realrl.plan.memory.formulas.local import Kernels
from realrl.plan.memory.formulas.passes import TrainingBytes, forward_bytes, stage_training_bytes
from realrl.plan.memory.load import Load
from realrl.plan.memory.optimizer import OptimizerSharing, optimizer_bytes, reduction_bytes
from realrl.plan.memory.plan import RoleState, Usage
from realrl.plan.memory.saving import Saves, averaging_masters, gathered_state, state_copies
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.plan.parameters.specs import DTYPE_BYTES
from realrl.plan.pipeline import InFlight, in_flight, most_received

_fields_of = attrgetter(*(part.name for part in fields(Usage)))
_NO_SAVES = Saves(is_staged=False, is_repeated=False)


@dataclass(frozen=True)
class Kept:
    """Bytes of one role on one rank of its home.

    `gathered` counts parameters that the rank gets from others while it computes, where the backend divides them;
    `published` and `host_gradients` are those of `OptimizerBytes`; `partial` counts gradients that tensor ranks add up;
    `saving` those that a save gathers at a time, and `merging` those of them that it gathers or merges if its dp_rank
    is 0; `copied` what the rank copies for a checkpoint, if its dp_rank is 0, and `model_copied` those of it that come
    when the optimizer's state is copied; `block` counts the largest tensor among parameters, which is in host memory
    before it leaves the device.
    """

    parameters: int
    optimizer: int
    gradients: int
    holds_gradients: bool
    buffers: int
    host: int
    largest: int
    gathered: int
    published: int
    host_gradients: int
    partial: int
    saving: int
    merging: int
    copied: int
    model_copied: int
    block: int

    @property
    def resident(self) -> Usage:
        """Usage during all calls while the role is on the device."""
        held = self.gradients + self.buffers if self.holds_gradients else 0
        return Usage(self.parameters, self.optimizer, held, host=self.host)

    @property
    def away(self) -> Usage:
        """Usage during all calls while the parameters are in host memory."""
        held = self.gradients + self.buffers if self.holds_gradients else 0
        return Usage(optimizer=self.optimizer, gradients=held, host=self.host + self.parameters)


@dataclass(frozen=True)
class _Pipeline:
    """Micro-batches that a stage holds beside the one that it computes.

    Attributes:
        states: of a train_step, see `in_flight`.
        n_waiting: messages for later computations, with several chunks on each stage.
    """

    states: tuple[InFlight, ...] = ()
    n_waiting: int = 0


@dataclass(frozen=True)
class KeptParts:
    """Memory that a role keeps on each part; `resident` and `away` are columns of usages, see `columns`."""

    parts: tuple[Kept, ...]
    parameters: Matrix
    resident: Matrix
    away: Matrix
    saving: Matrix
    merging: Matrix
    copied: Matrix
    model_copied: Matrix
    block: Matrix


class Ends(NamedTuple):
    """Memory that a role keeps, and that a call takes beside it, on each part; int64 [parts]."""

    kept: KeptParts
    used: Matrix


def columns(usages: Iterable[Usage]) -> Matrix:
    """Return int64 [10, usages]: the fields of `Usage` in their order, `host` next to last, and the total."""
    alike: dict[int, int] = {}  # usages are shared by many parts
    found = list(usages)
    places = [alike.setdefault(id(usage), len(alike)) for usage in found]
    distinct = [found[places.index(place)] for place in range(len(alike))]
    rows = [(*_fields_of(usage), usage.total) for usage in distinct]
    return np.array(rows, dtype=np.int64).T.take(places, axis=1)


class RoleBytes:
    """A role wherever it lives: its model, and the settings of its training."""

    def __init__(self, role: RoleState, model: CutModel, kernels: Kernels, saves: Saves | None) -> None:
        self.role, self.model = role, model
        self._kernels, self._saves = kernels, saves or _NO_SAVES
        self._kept: dict[ParallelStrategy, KeptParts] = {}
        settings = (role.is_trained, role.is_changed, role.is_averaged, role.backend, role.zero_stage,
                    role.offloads_optimizer, self._saves)  # fmt: skip
        self._kept_kinds: dict[tuple[PartKind, int, bool, bool], Kept] = model.kept.setdefault(settings, {})
        self._computed: dict[tuple[ParallelStrategy, InterfaceType, Load, tuple[int, ...] | None], Matrix] = {}

    @property
    def on_host(self) -> bool:
        """True if the device's memory is the host's, so that both count together."""
        return self._kernels.on_host

    @property
    def has_own_memory(self) -> bool:
        """True if parameters do not lie in buffers of a training backend."""
        return not (self.role.is_trained and BACKENDS[self.role.backend].has_own_buffers)

    def kept(self, strategy: ParallelStrategy) -> KeptParts:
        """Return what the role keeps on each part if its home has this strategy.

        Raises:
            AllocationError: the strategy does not fit the model.
        """
        if strategy not in self._kept:
            kinds = self.model.cut(strategy).kinds
            of_kind = {kind: self._kept_of(kind, strategy) for kind in set(kinds)}
            parts = tuple(of_kind[kind] for kind in kinds)
            names = ("parameters", "saving", "merging", "copied", "model_copied", "block")
            numbers = [[getattr(part, name) for name in names] for part in parts]
            columns_of = dict(zip(names, np.array(numbers, dtype=np.int64).T, strict=True))
            resident = {kind: part.resident for kind, part in of_kind.items()}
            away = {kind: part.away for kind, part in of_kind.items()}
            held, gone = (columns([usages[kind] for kind in kinds]) for usages in (resident, away))
            self._kept[strategy] = KeptParts(parts, resident=held, away=gone, **columns_of)
        return self._kept[strategy]

    def gathered(self, strategy: ParallelStrategy) -> Matrix:
        """Return what a save of the role gathers on each device of its home at a time, int64 [devices]."""
        kept, parts, is_first = self.kept(strategy), parts_of(strategy), first_replica(strategy)
        saving = kept.saving[parts]
        if self.on_host and not self._saves.is_repeated:  # later ones find the copies of earlier ones
            saving = saving - is_first * kept.model_copied[parts]
        found: Matrix = np.maximum(saving, is_first * kept.merging[parts])
        return found

    def copied(self, strategy: ParallelStrategy) -> Matrix:
        """Return what a save copies from each device of the role's home into host memory, int64 [devices]."""
        found: Matrix = first_replica(strategy) * self.kept(strategy).copied[parts_of(strategy)]
        return found

    def computed(
        self, strategy: ParallelStrategy, kind: InterfaceType, load: Load, in_flight: tuple[int, ...] | None = None
    ) -> Matrix:
        """Return the usage of a call on each part, as columns: beside what roles keep, and what its hooks bring.

        Args:
            in_flight: micro-batches that each stage keeps; None: those of `one_f_one_b`.

        Raises:
            AllocationError: the strategy does not fit the model.
        """
        key = strategy, kind, load, in_flight
        if key not in self._computed:
            found: dict[tuple[object, object], Usage] = {}
            parts = []
            for number, part in enumerate(self.model.cut(strategy).kinds):
                pipeline = self._pipeline_of(number // strategy.tp, strategy, kind, load, in_flight)
                if (part.shape, pipeline) not in found:
                    kept = self.kept(strategy).parts[number] if kind is InterfaceType.TRAIN_STEP else None
                    found[part.shape, pipeline] = self._computed_by(part, strategy, kind, load, (pipeline, kept))
                parts.append(found[part.shape, pipeline])
            self._computed[key] = columns(parts)
        return self._computed[key]

    def ends(self, strategy: ParallelStrategy, kind: InterfaceType, load: Load) -> Ends:
        """Return what a call takes on each part, quickly: in the midst of a pipeline, less than it is.

        Host memory counts where it is the device's.

        The first of several parts of one kind has the most micro-batches in flight, and the last the fewest, which
        are taken for those between them.

        Raises:
            AllocationError: the strategy does not fit the model.
        """
        kinds, kept = self.model.cut(strategy).kinds, self.kept(strategy)
        alike: dict[object, list[int]] = {}
        for number, part in enumerate(kinds):
            alike.setdefault(part.shape, []).append(number)
        used = np.empty(len(kinds), dtype=np.int64)
        for numbers in alike.values():
            last = numbers[-1] // strategy.tp
            for stage in dict.fromkeys((last, numbers[0] // strategy.tp)):
                here = [number for number in numbers if stage in (last, number // strategy.tp)]
                pipeline = self._pipeline_of(stage, strategy, kind, load)
                usage = self._computed_by(kinds[here[-1]], strategy, kind, load, (pipeline, kept.parts[here[-1]]))
                used[here] = usage.total + usage.host * self.on_host
        return Ends(kept, used)

    def _pipeline_of(
        self,
        stage: int,
        strategy: ParallelStrategy,
        kind: InterfaceType,
        load: Load,
        kept: tuple[int, ...] | None = None,
    ) -> _Pipeline:
        """Return what a stage holds of other micro-batches while it computes one.

        Args:
            kept: micro-batches that each stage keeps, where another schedule than `interleaved` decides it.
        """
        if kept is not None:
            return _Pipeline((InFlight((min(kept[stage], load.n_mbs),), 0),))
        sizes = strategy.pp, load.n_mbs, strategy.vpp, stage
        if kind is InterfaceType.TRAIN_STEP:
            return _Pipeline(in_flight(*sizes))
        waits = kind is InterfaceType.INFERENCE and strategy.vpp > 1
        return _Pipeline(n_waiting=most_received(*sizes) if waits else 0)

    def _kept_of(self, kind: PartKind, strategy: ParallelStrategy) -> Kept:
        key = kind, strategy.dp, strategy.tp > 1 or strategy.pp > 1, strategy.sp
        if key not in self._kept_kinds:
            self._kept_kinds[key] = self._kept_by(kind, strategy)
        return self._kept_kinds[key]

    def _kept_by(self, kind: PartKind, strategy: ParallelStrategy) -> Kept:
        """Count one part's bytes; adapters, float32 and their own masters, apart from parameters in half precision."""
        role, n_bytes = self.role, kind.num_bytes
        masters = averaging_masters(role.model, n_bytes) if role.is_averaged else 0
        merging = kind.gathered(role.zero_stage, is_copied=self._saves.copies_all) if role.is_changed else 0
        trained = kind.trained_sizes if role.is_trained else ()
        sharing = OptimizerSharing(
            role.backend,
            role.zero_stage,
            dp=strategy.dp,
            on_host=role.offloads_optimizer,
            whole_gradients=strategy.tp > 1 or strategy.pp > 1,
        )
        sizes: dict[int, list[int]] = {}
        for width, n_elements in trained:
            sizes.setdefault(width, []).append(n_elements)
        largest = max((n_elements for _, n_elements in trained), default=0)
        parts = [
            optimizer_bytes(n, element_bytes=width, sharing=sharing, largest=largest) for width, n in sizes.items()
        ]
        state = sum(part.masters + part.moments for part in parts)
        share = min((part.parameters for part in parts), default=1.0)
        parameters = math.ceil(n_bytes * share)
        elements = [n_elements for _, n_elements in trained]
        gathers_state = gathered_state(elements, sharing) if role.is_trained else 0
        # what the last save finds in host memory stays where it is
        is_copied = self._saves.copies_all or not self.has_own_memory
        copied = state_copies(role.model, elements) if is_copied or gathers_state else 0
        copied += masters if is_copied else 0
        model_copied = 0
        if role.is_changed:
            model_copied = kind.copies if is_copied else kind.made_copies(role.zero_stage)
        return Kept(
            parameters=parameters if role.is_trained else n_bytes + masters,
            optimizer=0 if role.offloads_optimizer else state,
            gradients=sum(part.gradients for part in parts),
            holds_gradients=any(part.holds_gradients for part in parts),
            buffers=max((part.buffers for part in parts), default=0),
            host=state + sum(part.host for part in parts) if role.offloads_optimizer else 0,
            largest=FLOAT32 * largest,
            gathered=n_bytes - parameters,
            published=sum(part.published for part in parts),
            host_gradients=sum(part.host_gradients for part in parts),
            partial=FLOAT32 * kind.partial(sp=strategy.sp) if role.is_trained else 0,
            saving=max(gathers_state, merging if role.zero_stage == 3 else 0),
            merging=merging,
            copied=copied + model_copied,
            model_copied=model_copied,
            block=kind.largest * (FLOAT32 if masters else 1) // (DTYPE_BYTES[role.model.dtype] if masters else 1),
        )

    def _computed_by(
        self,
        part: PartKind,
        strategy: ParallelStrategy,
        kind: InterfaceType,
        load: Load,
        held: tuple[_Pipeline, Kept | None],
    ) -> Usage:
        """Return the usage of a call on one part, which holds other micro-batches and, in training, the state."""
        model, kernels = self.role.model, self._kernels
        pipeline, kept = held
        local, *chunks = part.local(sp=strategy.sp)
        if kind is InterfaceType.GENERATE:
            made = generation_bytes(local, load, kernels=kernels, n_chunks=strategy.vpp)
            n_new = load.n_held - load.n_given
            during = made.activations + ROW_BYTES * load.n_given + RESPONSE_ROW_BYTES * n_new
            activations = max(during, ROW_BYTES * load.n_held) + converted_bytes(local)
            return Usage(copies=made.weights, cache=made.cache, activations=activations)
        if kind is InterfaceType.INFERENCE:
            return Usage(activations=forward_bytes(local, load, kernels=kernels, n_waiting=pipeline.n_waiting))
        assert kept is not None
        checkpointing = self.role.checkpoints_activations
        taken = stage_training_bytes(chunks, load, pipeline.states, checkpointing=checkpointing, kernels=kernels)
        is_last = local.has_embedding and not model.tied_embeddings  # the embedding's gradient comes after all others
        without = kept.largest if is_last else 0
        adds_up = load.n_mbs > 1 or len(chunks) > 1  # an earlier chunk begins when a later one has its gradients
        moments = _moments(kept, taken, adds_up=adds_up, dp=strategy.dp, without=without)
        if kernels.on_host:
            return max(moments, key=lambda usage: usage.total + usage.host)
        return replace(max(moments, key=lambda usage: usage.total), host=kept.host_gradients)


def _moments(kept: Kept, taken: TrainingBytes, *, adds_up: bool, dp: int, without: int) -> tuple[Usage, ...]:
    """Return the usages of a train_step at the moments of which one takes the most.

    With one micro-batch, gradients come as activations go, and the first moment has those of one parameter only.

    Args:
        adds_up: gradients of other passes are there already.
        without: bytes of gradients that are not there in the block which the backward pass reaches last.
    """
    gathered, buffers = kept.gathered, kept.buffers
    all_gradients = 0 if kept.holds_gradients else kept.gradients + buffers
    early, first = kept.largest + buffers, taken.gradients + buffers
    if adds_up:
        early = first = all_gradients
    flat = reduction_bytes(kept.gradients, kept.largest, dp=dp, partial=kept.partial)
    early = min(early, all_gradients)
    return (
        Usage(gradients=early, copies=gathered, activations=taken.head),
        Usage(gradients=min(first, all_gradients), copies=gathered, activations=taken.block),
        Usage(gradients=max(early, all_gradients - without), copies=gathered, activations=taken.last),
        Usage(gradients=all_gradients, copies=gathered, activations=taken.embedding),
        # a thread of the collectives may hold its buffer until gradients are in host memory
        Usage(gradients=all_gradients + flat, copies=gathered, activations=taken.rows, host=kept.host_gradients),
        Usage(
            gradients=all_gradients, copies=gathered + kept.published, activations=taken.rows, host=kept.host_gradients
        ),
    )

"""The data of a plan of memory: what roles and calls are, and the bytes that every device needs, call by call.

`realrl.plan.memory.model` computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation
from realrl.plan.hooks import CallHooks
from realrl.plan.memory.load import Load
from realrl.plan.memory.saving import averaging_masters, model_copies, state_copies
from realrl.plan.parameters.adapters import is_trained
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.shards import whole_shard
from realrl.shape import DecoderConfig

SAVE = "a save"  # the name of what happens when a checkpoint is copied, among calls, whose names have no blanks


@dataclass(frozen=True)
class RoleState:
    """One role's parameters, and the settings of their training.

    Attributes:
        model: shapes; its dtype is that of computation.
        home: layout in which the parameters live.
        is_trained: True if it has an optimizer.
        is_changed: True if a call or hook changes it; an unchanged role keeps its copy in host memory.
        is_averaged: a frozen role that keeps float32 masters beside parameters in half precision.
        backend, zero_stage: see `optimizer_bytes`.
        offloads_optimizer: masters and moments are in host memory.
        checkpoints_activations: blocks are computed again in the backward pass.
    """

    model: DecoderConfig
    home: Allocation
    is_trained: bool
    is_changed: bool = False
    is_averaged: bool = False
    backend: str = "native"
    zero_stage: int = 0
    offloads_optimizer: bool = False
    checkpoints_activations: bool = False


@dataclass(frozen=True)
class Beside:
    """A call that trains at the same time as another one.

    Attributes:
        role, allocation, load: of this call.
        in_flight: for each stage of the other call, the largest numbers of micro-batches that the other call and this
            one keep there at once.
    """

    role: str
    allocation: Allocation
    load: Load
    in_flight: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class CallState:
    """One call: its allocation, its hooks and its load, and the call that trains at the same time, if one does."""

    name: str
    role: str
    kind: InterfaceType
    allocation: Allocation
    hooks: CallHooks
    load: Load
    beside: Beside | None = None


@dataclass(frozen=True)
class Usage:
    """Bytes on one device while a call runs.

    Attributes:
        parameters: parameters of all roles that live there and are not offloaded, with the masters of averaged roles.
        optimizer: master weights and moments of all roles that live there.
        gradients: gradients of the role that is trained, and buffers that backends hold.
        copies: the call's parameters in another layout, weights packed for generation, messages under way; what a save
            gathers.
        cache: keys and values.
        activations: tensors kept for the backward pass, or passing through.
        rows: outputs of calls that later calls read.
        runtime: the CUDA context and NCCL's connections, at all times.
        host: host memory for parameters and optimizer state that is not on the device, and for checkpoints' copies.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    copies: int = 0
    cache: int = 0
    activations: int = 0
    rows: int = 0
    runtime: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device, without `host`."""
        on_device = self.parameters + self.optimizer + self.gradients + self.copies
        return on_device + self.cache + self.activations + self.rows + self.runtime

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


@dataclass(frozen=True)
class MemoryPlan:
    """Result of `plan_memory`.

    Attributes:
        calls: call -> rank -> usage, the larger of the first step's and a later one's; that of a save under `SAVE`.
        roles: role -> rank -> bytes that it keeps there; its gradients are those of its train_step.
        loads: call -> load of its ranks.
    """

    calls: Mapping[str, Mapping[int, Usage]]
    roles: Mapping[str, Mapping[int, Usage]]
    loads: Mapping[str, Load] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that some call runs on, ascending."""
        return tuple(sorted({rank for by_rank in self.calls.values() for rank in by_rank}))

    def peak(self, rank: int) -> tuple[str, Usage]:
        """Return the call in which a rank needs the most, and its usage; the first of several such calls.

        Raises:
            KeyError: no call runs on the rank.
        """
        usages = {call: by_rank[rank] for call, by_rank in self.calls.items() if rank in by_rank}
        if not usages:
            raise KeyError(rank)
        call = max(usages, key=lambda name: usages[name].total)
        return call, usages[call]


def checkpoint_bytes(role: RoleState) -> int:
    """Return the bytes of a role's checkpoint on disk: the model, its masters, and moments of trained parameters."""
    specs = parameter_specs(role.model)
    trained = [spec.n_elements for spec in specs if role.is_trained and is_trained(role.model, spec.name)]
    masters = averaging_masters(role.model, sum(spec.num_bytes for spec in specs)) if role.is_averaged else 0
    return model_copies(role.model, specs, whole_shard(role.model)) + masters + state_copies(role.model, trained)


def layout_of(model: DecoderConfig, allocation: Allocation) -> ParameterLayout:
    return parameter_layout(parameter_specs(model), allocation.strategy, allocation.ranks)


def show_bytes(number: int) -> str:
    """Return a size with the unit that fits it: "12.3 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"

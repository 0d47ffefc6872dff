"""Memory that every device of a plan needs, call by call, computed before anything starts.

    roles, their homes ──► parameters, optimizer state, gradients          there between calls, unless offloaded
    calls, their loads ──► copies, KV cache, activations                   there while the call runs
    checkpoints       ──► what is gathered for one, copies                 there while one is copied; copies may stay

A device runs one call at a time. Meanwhile it holds the state that its roles keep there, and the call's own memory.

Invariants of `plan_memory`:
- every rank of a call has a `Usage` for it, and no other rank has;
- a usage's total is the sum of its parts, and no part is negative;
- the parameters that the ranks of one data-parallel replica hold add up to the model, shared KV heads and a tied
  embedding's second copy on top;
- the state that a role keeps on a rank is counted in every call on that rank, except while it is offloaded;
- a save is planned on the ranks that keep state of a role, and nowhere else;
- equal input gives an equal plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation
from realrl.plan.backends import BACKENDS
from realrl.plan.hooks import CallHooks, Offload, Realloc
from realrl.plan.memory.buffers import FLOAT32, REALLOC_BUCKET, REALLOC_ROUNDS, SAVE_STAGE
from realrl.plan.memory.formulas import (
    Kernels,
    LocalShape,
    generation_bytes,
    inference_activations,
    local_shape,
    training_activations,
)
from realrl.plan.memory.load import Load
from realrl.plan.memory.optimizer import OptimizerSharing, optimizer_bytes, reduction_bytes
from realrl.plan.memory.saving import Saves, gathered_model, gathered_state, model_copies, state_copies
from realrl.plan.parameters.adapters import is_trained
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.realloc import plan_realloc
from realrl.plan.parameters.shards import whole_shard
from realrl.plan.parameters.specs import DTYPE_BYTES
from realrl.shape import DecoderConfig

SAVE = "a save"  # the name of what happens when a checkpoint is copied, among calls, whose names have no blanks
_MESSAGES = REALLOC_ROUNDS * REALLOC_BUCKET  # bytes a direction that a reallocation has under way


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
class CallState:
    """One call: its allocation, its hooks and its load."""

    name: str
    role: str
    kind: InterfaceType
    allocation: Allocation
    hooks: CallHooks
    load: Load


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
        return sum(getattr(self, part.name) for part in fields(self) if part.name != "host")

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


def plan_memory(
    roles: Mapping[str, RoleState],
    calls: Sequence[CallState],
    *,
    kernels: Kernels | None = None,
    rows_bytes: int = 0,
    runtime_bytes: Mapping[int, int] | None = None,
    saves: Saves | None = None,
) -> MemoryPlan:
    """Add up the bytes that every device holds during every call that runs on it, and while a checkpoint is copied.

    Args:
        roles: roles that have parameters.
        calls: calls in the order of a step; those of roles without parameters take nothing of their own.
        kernels: the machine's kernels; those of CUDA by default.
        rows_bytes: most bytes that rows of samples may take on a device.
        runtime_bytes: rank -> bytes that its process takes on the device before any call; none by default.
        saves: the run's checkpoints; None if it writes none.

    Raises:
        AllocationError: a strategy does not fit a model.
    """
    kernels = kernels or Kernels()
    keeps = {name: _keeps(role) for name, role in roles.items()}
    away = _offloaded(calls, roles)
    runtime = runtime_bytes or {}
    copied = {} if saves is None else _copied(roles, keeps, saves)
    stays = copied if saves is not None and saves.is_repeated else {}
    found: dict[str, dict[int, Usage]] = {}
    for call in calls:
        own = _own_usage(call, roles, keeps, kernels)
        found[call.name] = {}
        for rank in call.allocation.ranks:
            besides = own.get(rank, Usage())
            besides += Usage(rows=rows_bytes, runtime=runtime.get(rank, 0), host=stays.get(rank, 0))
            steps = [_resident(rank, absent, keeps) + besides for absent in away[call.name]]
            found[call.name][rank] = max(steps, key=lambda usage: usage.total)
    loads = {call.name: call.load for call in calls}
    if saves is not None:
        stage = 2 * SAVE_STAGE if saves.is_staged else 0
        found[SAVE] = {
            rank: _saving(rank, away[SAVE], roles, keeps)
            + Usage(rows=rows_bytes, runtime=runtime.get(rank, 0), host=n_bytes + stage)
            for rank, n_bytes in sorted(copied.items())
        }
        loads[SAVE] = Load(0)
    kept = {
        name: {rank: Usage(k.parameters, k.optimizer, k.gradients, host=k.host) for rank, k in by_rank.items()}
        for name, by_rank in keeps.items()
    }
    return MemoryPlan(found, kept, loads)


# ---------------------------------------------------------------- state of roles


@dataclass(frozen=True)
class _Kept:
    """Bytes of one role on one rank of its home.

    `gathered` counts parameters that the rank gets from others while it computes, where the backend divides them;
    `saving` those that a save gathers at a time.
    """

    parameters: int
    optimizer: int
    gradients: int
    holds_gradients: bool
    buffers: int
    host: int
    largest: int
    gathered: int
    saving: int


def _keeps(role: RoleState) -> dict[int, _Kept]:
    layout = layout_of(role.model, role.home)
    found: dict[tuple[int, int], _Kept] = {}
    by_rank = {}
    for rank in role.home.ranks:
        pp_rank, _, tp_rank = layout.coordinates_of(rank)
        if (pp_rank, tp_rank) not in found:
            found[pp_rank, tp_rank] = _kept(role, layout, rank)
        by_rank[rank] = found[pp_rank, tp_rank]
    return by_rank


def _kept(role: RoleState, layout: ParameterLayout, rank: int) -> _Kept:
    """Count one role's bytes; adapters, float32 and their own masters, apart from parameters in half precision."""
    n_bytes, shard = layout.num_bytes_of(rank), layout.shard_of(rank)
    saving = gathered_model(layout.specs, shard, zero_stage=role.zero_stage) if role.is_changed else 0
    if not role.is_trained:
        return _Kept(n_bytes + _averaging_masters(role, n_bytes), 0, 0, False, 0, 0, 0, 0, saving)
    sizes: dict[int, int] = {}
    trained = _trained_sizes(role, layout, rank)
    for width, n_elements in trained:
        sizes[width] = sizes.get(width, 0) + n_elements
    largest = FLOAT32 * max((n_elements for _, n_elements in trained), default=0)
    strategy = role.home.strategy
    sharing = OptimizerSharing(
        role.backend,
        role.zero_stage,
        dp=strategy.dp,
        on_host=role.offloads_optimizer,
        whole_gradients=strategy.tp > 1 or strategy.pp > 1,
    )
    parts = [
        optimizer_bytes(
            n,
            element_bytes=width,
            sharing=sharing,
            largest=largest // 4,
        )
        for width, n in sizes.items()
    ]
    state = sum(part.masters + part.moments for part in parts)
    share = min((part.parameters for part in parts), default=1.0)
    parameters = math.ceil(n_bytes * share)
    return _Kept(
        parameters=parameters,
        optimizer=0 if role.offloads_optimizer else state,
        gradients=sum(part.gradients for part in parts),
        holds_gradients=any(part.holds_gradients for part in parts),
        buffers=max((part.buffers for part in parts), default=0),
        host=state + sum(part.host for part in parts) if role.offloads_optimizer else 0,
        largest=largest,
        gathered=n_bytes - parameters,
        saving=max(saving, gathered_state([n_elements for _, n_elements in trained], sharing)),
    )


def _trained_sizes(role: RoleState, layout: ParameterLayout, rank: int) -> list[tuple[int, int]]:
    """Return (bytes of an element, elements) of each parameter that a rank trains."""
    shard = layout.shard_of(rank)
    return [
        (spec.num_bytes // spec.n_elements, n_elements)
        for spec in layout.specs
        if role.is_trained and is_trained(role.model, spec.name) and (n_elements := shard.n_elements_of(spec))
    ]


def _copied(roles: Mapping[str, RoleState], keeps: Mapping[str, Mapping[int, _Kept]], saves: Saves) -> dict[int, int]:
    """Return rank -> bytes of the copies that it makes for a checkpoint, all roles together."""
    found = {rank: 0 for by_rank in keeps.values() for rank in by_rank}
    for name, role in roles.items():
        layout = layout_of(role.model, role.home)
        has_own_memory = not (role.is_trained and BACKENDS[role.backend].has_own_buffers)
        for rank in role.home.ranks:
            if not saves.is_staged and not saves.is_repeated and has_own_memory and not keeps[name][rank].saving:
                continue  # the files are written from the tensors themselves
            if layout.coordinates_of(rank)[1] == 0:
                sizes = [n_elements for _, n_elements in _trained_sizes(role, layout, rank)]
                found[rank] += state_copies(role.model, sizes) + _averaging_masters(role, layout.num_bytes_of(rank))
                if role.is_changed:
                    found[rank] += model_copies(role.model, layout.specs, layout.shard_of(rank))
    return found


def _saving(
    rank: int,
    away: tuple[frozenset[str], frozenset[str]],
    roles: Mapping[str, RoleState],
    keeps: Mapping[str, Mapping[int, _Kept]],
) -> Usage:
    """Return a rank's usage while the role that needs the most is copied, for which changed parameters come back."""
    moments = [
        _resident(rank, absent - {name} if roles[name].is_changed else absent, keeps)
        + Usage(copies=by_rank[rank].saving)
        for absent in away
        for name, by_rank in keeps.items()
        if rank in by_rank
    ]
    return max(moments, key=lambda usage: usage.total)


def _averaging_masters(role: RoleState, n_bytes: int) -> int:
    """Return the bytes of the float32 masters of a frozen role's parameters, which take `n_bytes` themselves."""
    return FLOAT32 * (n_bytes // DTYPE_BYTES[role.model.dtype]) if role.is_averaged else 0


def _resident(rank: int, absent: Collection[str], keeps: Mapping[str, Mapping[int, _Kept]]) -> Usage:
    """Return the usage that is independent of the call, with the gradients that backends hold."""
    total = Usage()
    for name, by_rank in keeps.items():
        kept = by_rank.get(rank)
        if kept is None:
            continue
        held = kept.gradients + kept.buffers if kept.holds_gradients else 0
        if name in absent:
            total += Usage(optimizer=kept.optimizer, gradients=held, host=kept.host + kept.parameters)
        else:
            total += Usage(kept.parameters, kept.optimizer, held, host=kept.host)
    return total


def _offloaded(
    calls: Sequence[CallState], roles: Mapping[str, RoleState]
) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Return call or `SAVE` -> the roles that are in host memory then, in the first step and in any later one.

    All parameters begin on the device. A call brings back those of its role if it runs where they live, and those that
    move; they stay until a call offloads them again.
    """
    away: set[str] = set()
    steps: list[dict[str, frozenset[str]]] = []
    for _ in range(2):
        step = {}
        for call in calls:
            hooks = (*call.hooks.before, *call.hooks.after)
            used = {role for hook in hooks if isinstance(hook, Realloc) for role in (hook.source, hook.target)}
            if call.role in roles and roles[call.role].home == call.allocation:
                used.add(call.role)
            away -= used
            step[call.name] = frozenset(away)
            away |= {hook.role for hook in call.hooks.after if isinstance(hook, Offload)}
        steps.append({**step, SAVE: frozenset(away)})
    return {name: (first, steps[1][name]) for name, first in steps[0].items()}


# ---------------------------------------------------------------- memory of calls


def _own_usage(
    call: CallState, roles: Mapping[str, RoleState], keeps: Mapping[str, Mapping[int, _Kept]], kernels: Kernels
) -> dict[int, Usage]:
    """Return the usage of a call on its ranks, beside the state of roles."""
    usages = _moved(call, roles)
    role = roles.get(call.role)
    if role is None:
        return usages
    layout = layout_of(role.model, call.allocation)
    found: dict[tuple[int, int], Usage] = {}
    for rank in call.allocation.ranks:
        pp_rank, _, tp_rank = layout.coordinates_of(rank)
        if (pp_rank, tp_rank) not in found:
            width = DTYPE_BYTES[role.model.dtype]
            local = local_shape(role.model, layout.shard_of(rank), sp=call.allocation.strategy.sp, element_bytes=width)
            found[pp_rank, tp_rank] = _computed(call, role, local, keeps[call.role].get(rank), pp_rank, kernels)
        usages[rank] = usages.get(rank, Usage()) + found[pp_rank, tp_rank]
    return usages


def _computed(
    call: CallState, role: RoleState, local: LocalShape, kept: _Kept | None, pp_rank: int, kernels: Kernels
) -> Usage:
    load = call.load
    if call.kind is InterfaceType.GENERATE:
        made = generation_bytes(
            local,
            n_runs=load.n_runs,
            n_rows=load.n_rows,
            longest_row=load.longest_row,
            prefill_tokens=load.prefill_tokens,
            kernels=kernels,
        )
        return Usage(copies=made.weights, cache=made.cache, activations=made.activations)
    if call.kind is InterfaceType.INFERENCE:
        n_bytes = inference_activations(local, n_tokens=load.n_tokens, n_scored=load.n_scored, kernels=kernels)
        return Usage(activations=n_bytes)
    assert kept is not None, "a role is trained where it lives"
    return _trained(call, role, local, kept, pp_rank, kernels)


def _trained(call: CallState, role: RoleState, local: LocalShape, kept: _Kept, pp_rank: int, kernels: Kernels) -> Usage:
    """Return the largest usage of a train_step: when the backward passes begin, or when all gradients are there.

    With one micro-batch, gradients come as activations go, and the first moment has those of one parameter only.
    """
    load, strategy = call.load, call.allocation.strategy
    activations = training_activations(
        local,
        n_tokens=load.n_tokens,
        n_scored=load.n_scored,
        n_in_flight=min(strategy.pp - pp_rank, load.n_mbs),
        accumulates=load.n_mbs > 1,
        checkpointing=role.checkpoints_activations,
        kernels=kernels,
    )
    all_gradients = 0 if kept.holds_gradients else kept.gradients + kept.buffers
    early = all_gradients if load.n_mbs > 1 else min(all_gradients, kept.largest + kept.buffers)
    flat = reduction_bytes(kept.gradients, kept.largest, dp=strategy.dp)
    moments = (
        Usage(gradients=early, copies=kept.gathered, activations=activations),
        Usage(gradients=all_gradients + flat, copies=kept.gathered),
    )
    return max(moments, key=lambda usage: usage.total)


def _moved(call: CallState, roles: Mapping[str, RoleState]) -> dict[int, Usage]:
    """Return the usage of parameters that come for the time of the call, and of messages of its hooks."""
    usages: dict[int, Usage] = {}
    for hook in (*call.hooks.before, *call.hooks.after):
        if not isinstance(hook, Realloc):
            continue
        role = roles[hook.source]
        model = role.model
        source, target = layout_of(model, hook.source_allocation), layout_of(model, hook.target_allocation)
        is_gathered = role.is_trained and role.zero_stage == 3
        may_move = not (role.is_trained and BACKENDS[role.backend].has_own_buffers)
        moved = plan_realloc(source, target, node_of=call.allocation.mesh.cluster.node_of)
        for rank in call.allocation.ranks:
            messages = sum(min(n, _MESSAGES) for n in (moved.bytes_received(rank), moved.bytes_sent(rank)))
            if hook.eta != 1.0:  # a relay keeps a round that it averages until it has passed it on
                messages += min(moved.bytes_from_other_nodes(rank), REALLOC_BUCKET)
            new = 0
            if hook.is_implied and rank in target:
                # of parameters that are gathered for the moment, home and call share nothing
                new = target.num_bytes_of(rank) if is_gathered else moved.new_bytes(rank, moves_source=may_move)
            usages[rank] = usages.get(rank, Usage()) + Usage(copies=new + messages)
    return usages


def checkpoint_bytes(role: RoleState) -> int:
    """Return the bytes of a role's checkpoint on disk: the model, its masters, and moments of trained parameters."""
    specs = parameter_specs(role.model)
    trained = [spec.n_elements for spec in specs if role.is_trained and is_trained(role.model, spec.name)]
    masters = _averaging_masters(role, sum(spec.num_bytes for spec in specs))
    return model_copies(role.model, specs, whole_shard(role.model)) + masters + state_copies(role.model, trained)


def layout_of(model: DecoderConfig, allocation: Allocation) -> ParameterLayout:
    return parameter_layout(parameter_specs(model), allocation.strategy, allocation.ranks)


def show_bytes(number: int) -> str:
    """Return a size with the unit that fits it: "12.3 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"

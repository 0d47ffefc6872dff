"""Memory that devices lack for a run of which no plan fits, and the least that would do.

The plan that takes the least memory has every role on all devices, its calls in the layout that it lives in, and all
settings that are open at what takes the least. A cluster has room for some plan if it has room for this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from realrl.config.schema import RunConfig
from realrl.errors import AllocationError, UsageError
from realrl.experiment.planning import check_models_fit, plan_run
from realrl.experiment.states import call_states, role_states, runtime_bytes
from realrl.graph.build import home_calls
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, ParallelStrategy
from realrl.plan.backends import BACKENDS, zero_stage_of
from realrl.plan.memory.assignment import AssignedMemory
from realrl.plan.memory.load import Load, load_of
from realrl.plan.memory.plan import MemoryPlan, Usage, show_bytes
from realrl.planner.request import Request
from realrl.planner.settings import PlanSettings
from realrl.search.space import choices_of, mesh_at, supported_stages
from realrl.sim.hardware import Hardware

MOST_DEVICES = 1024  # of clusters that are tried
_WORTH_DOUBLING = 0.97
_TURNS = 2  # over the roles, of which each takes the strategy that is best beside the others'


@dataclass(frozen=True)
class Need:
    """Bytes that a role's fullest call takes of the fullest device, in the plan that takes the least."""

    role: str
    call: str
    usage: Usage
    n_bytes: int

    def __str__(self) -> str:
        parts = {part.name: getattr(self.usage, part.name) for part in fields(Usage) if part.name != "host"}
        largest = sorted((n_bytes, name) for name, n_bytes in parts.items() if n_bytes)[::-1][:3]
        made_of = ", ".join(f"{name} {show_bytes(n_bytes)}" for n_bytes, name in largest)
        return f"{self.role} {show_bytes(self.n_bytes)} in {self.call} ({made_of})"


@dataclass(frozen=True)
class Shortage:
    """The least memory that any plan takes, where that is more than the devices have.

    Attributes:
        capacity: bytes of a device that a plan may use.
        needs: by role, the largest first.
        n_nodes: nodes of the same kind that have room for a plan; None if no cluster of `MOST_DEVICES` has.
        machine: name of the machine with the least memory that has room, in a cluster as large as this one.
        change: settings of the run that make room in this cluster, as a user types them; () if no single one does.
    """

    capacity: int
    needs: tuple[Need, ...]
    n_nodes: int | None
    machine: str | None
    change: tuple[str, ...]

    @property
    def error(self) -> AllocationError:
        """The refusal of the run."""
        ways = []
        if self.change:
            ways.append(" ".join(self.change))
        if self.n_nodes is not None:
            ways.append(f"cluster.n_nodes={self.n_nodes}, the smallest cluster of such nodes with room")
        if self.machine is not None:
            ways.append(f"devices with the memory of {self.machine}")
        remedy = f"Use {', or '.join(ways)}." if ways else "Use smaller models or shorter texts."
        needs = "; ".join(map(str, self.needs))
        return AllocationError(
            f"no plan fits: it may use {show_bytes(self.capacity)} of a device, and of the fullest one the roles take "
            f"at least: {needs}",
            remedy=remedy,
            call=self.needs[0].call if self.needs else None,
        )


def find_shortage(request: Request, machines: Mapping[str, Hardware]) -> Shortage | None:
    """Return what devices lack for any plan of a run; None if there is one that fits.

    Args:
        machines: others to suggest, by name.

    Raises:
        UsageError: the run is refused wherever its calls run.
    """
    tight = _tight(request)
    settings, memory = _least(tight)
    needs = _needs(tight, settings, memory)
    if needs and needs[0].n_bytes <= request.capacity:
        return None
    larger = sorted(
        (machine.device.memory_bytes, name)
        for name, machine in machines.items()
        if machine.device.kind == request.hardware.device.kind
        and machine.device.memory_bytes > (request.memory_bytes or request.hardware.device.memory_bytes)
    )
    with_room = (name for n_bytes, name in larger if _has_room(replace(tight, memory_bytes=int(n_bytes))))
    changes = (words for words, change in _changes(request) if _makes_room(change, request, tight))
    return Shortage(request.capacity, needs, _fewest_nodes(tight, needs), next(with_room, None), next(changes, ()))


# ---------------------------------------------------------------- the plan that takes the least


def least_plan(request: Request) -> PlanSettings:
    """Return the plan that takes the least memory, whether it fits or not.

    Raises:
        UsageError: a call has no legal strategy, or a pin breaks a rule.
    """
    tight = _tight(request)
    settings, _ = _least(tight)
    own = {name: tight.config.models[name] for name in tight.models if tight.base.roles[name].trainable}
    return replace(
        settings,
        zero_stage={name: zero_stage_of(one.backend, one.optimizer.zero_stage) for name, one in own.items()},
        checkpointing={name: one.activation_checkpointing for name, one in own.items()},
        offload_optimizer={name: one.optimizer.offload for name, one in own.items()},
    )


def _tight(request: Request) -> Request:
    """Return the request with all open settings at what takes the least memory of a device."""
    config, offload = request.config, list(request.config.allocation.offload)
    models, may_offload = dict(config.models), not request.on_cpu  # what is offloaded on a CPU takes the same memory
    for name, space in request.spaces.items():
        if space.model is None:
            continue
        if not request.base.roles[name].trainable:
            if True in space.offloads and may_offload and name not in offload and not config.allocation.offload_frozen:
                offload.append(name)
            continue
        section = models[name]
        may_change = may_offload and BACKENDS[space.backend].offloads
        changes = _smallest_optimizer(request, name, space.offloads if may_change else (section.optimizer.offload,))
        models[name] = section.model_copy(
            update={
                "optimizer": section.optimizer.model_copy(update=changes),
                "activation_checkpointing": max(space.checkpoints),
            }
        )
    places = config.allocation.model_copy(update={"offload": tuple(offload)})
    return replace(request, config=config.model_copy(update={"models": models, "allocation": places}))


def _smallest_optimizer(request: Request, name: str, offloads: Sequence[bool]) -> dict[str, object]:
    """Return the settings of a trained role's optimizer that take the least memory, of those that its backend has."""
    pin = request.pins.get(home_calls(request.base.graph)[name])
    strategy = ParallelStrategy() if pin is None else pin.strategy
    for is_away in sorted(offloads, reverse=True):
        stages = supported_stages(name, request.spaces[name], strategy, offloads=is_away)
        if stages:
            return {"offload": is_away, "zero_stage": stages[-1]}
    return {}


def _least(request: Request) -> tuple[PlanSettings, MemoryPlan]:
    """Return the plan that takes the least memory, and its memory without connections.

    Raises:
        AllocationError: a call has no legal strategy, or a pin breaks a rule.
    """
    base, on_cpu = request.base, request.on_cpu
    memory = AssignedMemory(
        request.memory_model(request.kernels_alone),
        base.graph,
        role_states(base, request.models),
        load_of=partial(_load, request),
        weightless=[role for role in base.roles if role not in request.models],
        offload_frozen=request.config.allocation.offload_frozen,
    )
    options = {role: _layouts(request, role) for role in base.roles}
    chosen = {role: found[-1] for role, found in options.items()}

    def needs(role: str, layout: Mapping[str, Allocation]) -> int:
        places = {call: place for other in (*chosen.values(), layout) for call, place in other.items()}
        return memory.peaks(places, is_host_memory=on_cpu).fullest[2]

    for _ in range(_TURNS):
        for role in request.models:
            chosen[role] = min(options[role], key=partial(needs, role))
    places = {call: place for layout in chosen.values() for call, place in layout.items()}
    cut = [mfc for mfc in base.mfcs if mfc.role in request.models]
    n_mbs = {mfc.name: number for mfc in cut if (number := _n_mbs(mfc, places[mfc.name])) is not None}
    texts = {mfc.name: str(places[mfc.name]) for mfc in base.mfcs}
    settings = PlanSettings(texts, n_mbs, offload=request.config.allocation.offload)
    return settings, memory.model.plan(*memory.states(places))


def _layouts(request: Request, role: str) -> list[dict[str, Allocation]]:
    """Return the allocations of a role's calls to choose from: on the largest mesh, all in the layout of the home.

    Raises:
        AllocationError: there are none; a pin breaks a rule.
    """
    base, cluster, pins = request.base, request.cluster, request.pins
    own = [mfc for mfc in base.mfcs if mfc.role == role]
    home = home_calls(base.graph)[role]
    legal = {
        mfc.name: [
            choice.strategy
            for choice in choices_of(base.graph, mfc.name, request.spaces, cluster, pin=pins.get(mfc.name))
        ]
        for mfc in own
    }
    found = []
    if not all(legal.values()):
        name = next(name for name, some in legal.items() if not some)
        raise AllocationError(f"call '{name}' has no legal strategy on a cluster with {cluster}", call=name)
    for strategy in dict.fromkeys(sorted(legal[home], key=lambda one: (one.n_devices, one.tp * one.pp))):
        layout = {}
        for mfc in own:
            pin = pins.get(mfc.name)
            own_strategy = strategy if strategy in legal[mfc.name] else legal[mfc.name][-1]
            mesh = mesh_at(cluster, 0, own_strategy.n_devices) if pin is None or pin.mesh is None else pin.mesh
            layout[mfc.name] = Allocation(mesh, own_strategy)
        found.append(layout)
    most = max(layout[home].mesh.n_devices for layout in found)
    return [layout for layout in found if layout[home].mesh.n_devices == most]


def _n_mbs(mfc: MFCDef, place: Allocation) -> int | None:
    """Return the most micro-batches of a call whose number is open; None for others."""
    is_open = mfc.n_mbs is None and mfc.max_tokens_per_mb is None
    if not is_open or mfc.interface_type is InterfaceType.GENERATE:
        return None
    return max(1, mfc.n_seqs // mfc.n_minibatches // place.strategy.dp)


def _load(request: Request, mfc: MFCDef, place: Allocation) -> Load:
    number = _n_mbs(mfc, place)
    return load_of(
        mfc if number is None else replace(mfc, n_mbs=number),
        place,
        request.rows,
        generation=request.config.generation,
        n_responses=request.workload.n_responses[mfc.name],
        algorithm=request.config.algorithm,
    )


def _needs(request: Request, settings: PlanSettings, memory: MemoryPlan) -> tuple[Need, ...]:
    """Return what the roles need of the fullest device, the largest first; with the connections of the plan."""
    runtime: dict[int, int] = {}
    if not request.on_cpu:
        plan = plan_run(settings.applied(request.config), request.experiment)
        runtime = runtime_bytes(plan, role_states(plan, request.models), call_states(plan, request.rows))
    role_of = {mfc.name: mfc.role for mfc in request.base.mfcs}
    found: dict[str, Need] = {}
    for call, by_rank in memory.calls.items():
        for rank, usage in by_rank.items():
            whole = usage + Usage(runtime=runtime.get(rank, 0))
            role = role_of.get(call, "checkpoints")
            need = Need(role, call, whole, whole.total + (whole.host if request.on_cpu else 0))
            if role not in found or need.n_bytes > found[role].n_bytes:
                found[role] = need
    return tuple(sorted(found.values(), key=lambda need: -need.n_bytes))


def _has_room(request: Request) -> bool:
    """Return True if the plan that takes the least fits."""
    return _most(request) <= request.capacity


def _makes_room(change: Callable[[RunConfig], RunConfig], request: Request, tight: Request) -> bool:
    """Return True if a plan fits with a change of the configuration, which need not be possible."""
    try:
        other = _tight(replace(request, config=change(request.config)))
    except UsageError:
        return False
    return other.config != tight.config and _has_room(other)


def _most(request: Request) -> float:
    """Return the bytes that the plan that takes the least needs of the fullest device; infinity if there is no plan."""
    try:
        settings, memory = _least(request)
        check_models_fit(plan_run(settings.applied(request.config), request.experiment))
        needs = _needs(request, settings, memory)
    except UsageError:
        return math.inf
    return max((need.n_bytes for need in needs), default=0)


# ---------------------------------------------------------------- what would do


def _fewest_nodes(request: Request, needs: Sequence[Need]) -> int | None:
    """Return the fewest nodes, found by doubling and halving, as if more nodes never had less room.

    Twice the nodes that save next to nothing end the doubling: what is left then is of single samples, or pinned.
    """
    now, size = request.config.cluster.n_nodes, request.config.cluster.n_devices_per_node

    def most(n_nodes: int) -> float:
        cluster = request.config.cluster.model_copy(update={"n_nodes": n_nodes})
        return _most(replace(request, config=request.config.model_copy(update={"cluster": cluster})))

    low, high, before = now, 2 * now, float(needs[0].n_bytes)
    while high * size <= MOST_DEVICES and (found := most(high)) > request.capacity:
        if found > _WORTH_DOUBLING * before:
            return None
        low, high, before = high, 2 * high, found
    if high * size > MOST_DEVICES:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if most(middle) <= request.capacity else (middle, high)
    return high


def _changes(request: Request) -> Iterator[tuple[tuple[str, ...], Callable[[RunConfig], RunConfig]]]:
    """Yield settings that the user has fixed, or that no plan decides, with a value that takes less; cheap ones first.

    Each comes as the user types it, and as a change of the configuration.
    """
    config = request.config
    trained = [name for name, role in request.base.roles.items() if role.trainable]
    rules = {name: BACKENDS[config.models[name].backend] for name in trained}
    for words, key, value, names in (
        ("activation_checkpointing=true", "activation_checkpointing", True, trained),
        ("optimizer.zero_stage=1", "zero_stage", 1, trained),
        ("optimizer.offload=true", "offload", True, [name for name in trained if rules[name].offloads]),
    ):
        texts = tuple(f"models.{name}.{words}" for name in names)
        yield texts, partial(_with_models, names=names, key=key, value=value)
    pinned = [*config.allocation.calls]
    for some in dict.fromkeys((*((name,) for name in pinned), tuple(pinned))):
        if some:
            yield tuple(f"no allocation.calls.{name}" for name in some), partial(_without_pins, names=some)
    generation = config.generation
    if request.base.generating_roles and generation.max_batch_size > 1:
        fewer = max(1, generation.max_batch_size // 4)
        change = generation.model_copy(update={"max_batch_size": fewer})
        yield (f"generation.max_batch_size={fewer}",), _setting("generation", change)
    if config.precision == "fp32":
        yield ("precision=bf16",), _setting("precision", "bf16")
    if any(mfc.n_mbs is not None or mfc.max_tokens_per_mb is not None for mfc in request.base.mfcs):
        fewer = max(1, config.n_seqs // 2)
        yield (f"n_seqs={fewer}",), _setting("n_seqs", fewer)


def _setting(key: str, value: Any) -> Callable[[RunConfig], RunConfig]:
    return lambda config: config.model_copy(update={key: value})


def _without_pins(config: RunConfig, names: Sequence[str]) -> RunConfig:
    places = {name: place for name, place in config.allocation.calls.items() if name not in names}
    return config.model_copy(update={"allocation": config.allocation.model_copy(update={"calls": places})})


def _with_models(config: RunConfig, names: Sequence[str], key: str, value: Any) -> RunConfig:
    """Return a configuration with one setting of some roles, of the model or of its optimizer."""
    models = dict(config.models)
    for name in names:
        section = models[name]
        if key in type(section).model_fields:
            models[name] = section.model_copy(update={key: value})
        else:
            models[name] = section.model_copy(update={"optimizer": section.optimizer.model_copy(update={key: value})})
    return config.model_copy(update={"models": models})

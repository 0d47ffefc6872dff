"""A plan that is asked for: a run whose calls have no place yet, a machine, and lengths of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from realrl.config.schema import RunConfig
from realrl.errors import AllocationError, ConfigError, did_you_mean
from realrl.experiment.declaration import Experiment
from realrl.experiment.models import role_configs
from realrl.experiment.planning import check_models_fit, first_steps, plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import (
    MARGIN,
    call_states,
    longest_rows,
    memory_model,
    responses_of,
    role_states,
)
from realrl.graph.build import home_calls, topological_calls
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy
from realrl.mesh.notation import parse_allocation, parse_strategy
from realrl.plan.backends import zero_stage_of
from realrl.plan.memory.formulas.local import Kernels
from realrl.plan.memory.load import RowLengths
from realrl.plan.memory.model import MemoryModel
from realrl.planner.modelled import Draw, KernelsOf, default_kernels, draw_of
from realrl.planner.settings import PlanSettings
from realrl.sched.track.track_plan import TrackPlan, plan_track
from realrl.search.fast import Model
from realrl.search.flow import flow_of
from realrl.search.prices import CostPrices, Workload
from realrl.search.space import Choice, Pin, Placed, RoleSpace, mesh_at, pin_from
from realrl.shape import DecoderConfig
from realrl.sim.durations import SampleSizes
from realrl.sim.hardware import Hardware
from realrl.sim.replies import row_ids

N_STEPS = 4  # the period is that of steps 2 to 4, in a run that goes on
_MOST_SAMPLES = 768  # that calls are priced for, if these have several steps


def first_track(plan: RunPlan, n_steps: int = N_STEPS) -> TrackPlan:
    """Return the first steps of a run: so many, and those whose calls compete with those of the last one."""
    config = first_steps(plan.config, n_steps + 1 + max(mfc.max_staleness for mfc in plan.mfcs))
    return plan_track(plan.graph, plan.allocations, config, dataset_rank=plan.dataset_rank, hooks=plan.hooks)


def with_pinned_stages(config: RunConfig) -> RunConfig:
    """Return a configuration whose virtual stages are part of the strategies that the user has pinned.

    A plan chooses no virtual stages, since the strategies that it compares have one chunk a stage.

    Raises:
        ConfigError: a call has virtual stages, and no pinned pipeline.
    """
    calls, pins = dict(config.calls), dict(config.allocation.calls)
    for name, own in config.calls.items():
        v, (text, at, mesh) = own.virtual_stages, pins.get(name, "").partition("@")
        if v is None:
            continue
        calls[name] = own.model_copy(update={"virtual_stages": None})
        strategy = parse_strategy(text) if text else ParallelStrategy()
        if v == strategy.vpp:
            continue
        if strategy.pp == 1 or strategy.vpp > 1:
            raise ConfigError(
                f"calls.{name}.virtual_stages={v}: a plan chooses no virtual stages",
                remedy=f"Leave it out, or give the call a pipeline: allocation.calls.{name}=d1p2v{v}.",
            )
        pins[name] = f"{replace(strategy, vpp=v)}{at}{mesh}"
    allocation = config.allocation.model_copy(update={"calls": pins})
    return config.model_copy(update={"calls": calls, "allocation": allocation})


@dataclass(frozen=True, eq=False)
class Request:
    """A plan that is asked for.

    Attributes:
        experiment, config: the run; device and precision are settled. Of its allocation, `allocation.calls` are pins.
        hardware: the machine.
        lengths: as for `draw_of`.
        given: paths of keys that the user has set, as far as a plan decides about them.
        kernels: use of memory by the machine's kernels.
        memory_bytes: size of a device, where it is not the hardware's.
    """

    experiment: Experiment
    config: RunConfig
    hardware: Hardware
    lengths: str | None = None
    given: frozenset[str] = frozenset()
    kernels: KernelsOf = default_kernels
    memory_bytes: int | None = None
    _memory: dict[Kernels, MemoryModel] = field(default_factory=dict)

    @cached_property
    def base(self) -> RunPlan:
        """The run with all calls on the first device; its graph, roles and models are those of every plan.

        Raises:
            UsageError: the run is refused wherever its calls run.
        """
        if self.config.allocation.fuse:
            raise ConfigError(
                f"allocation.fuse=[{','.join(self.config.allocation.fuse)}]: plans are searched with every call by "
                "itself",
                remedy="Leave it out, or allocation=auto; a plan's file takes it, as settings.allocation.fuse.",
            )
        alone = self.config.allocation.model_copy(update={"mode": "d1@0:0", "calls": {}})
        plan = plan_run(self.config.model_copy(update={"allocation": alone}), self.experiment)
        check_models_fit(plan)
        return plan

    @property
    def cluster(self) -> Cluster:
        return self.base.cluster

    @cached_property
    def models(self) -> dict[str, DecoderConfig]:
        """Role -> its model, for roles that have one."""
        return role_configs(self.base)

    @cached_property
    def drawn(self) -> tuple[Draw, tuple[str, ...]]:
        """Lengths of samples, and assumptions about them that the user did not choose."""
        return draw_of(self.base, self.lengths)

    @cached_property
    def rows(self) -> RowLengths:
        """The longest rows, for memory."""
        return longest_rows(self.config, self.experiment.dataset)

    @property
    def on_cpu(self) -> bool:
        return self.hardware.device.kind == "cpu"

    @property
    def capacity(self) -> int:
        """Bytes of a device that a plan may use."""
        return int(MARGIN * (self.memory_bytes or self.hardware.device.memory_bytes))

    def memory_model(self, kernels: Kernels) -> MemoryModel:
        """Return what counts memory; it remembers what it has counted."""
        if kernels not in self._memory:
            self._memory[kernels] = memory_model(self.base, kernels, on_cpu=self.on_cpu)
        return self._memory[kernels]

    # ------------------------------------------------------------ for the search

    @cached_property
    def workload(self) -> Workload:
        """The work of one step."""
        base, generation = self.base, self.config.generation
        return Workload(
            graph=base.graph,
            roles=role_states(base, self.models),
            cluster=base.cluster,
            generation=generation,
            steps=self._steps,
            rows=self.rows,
            n_responses={mfc.name: responses_of(base, mfc, generation.n_responses) for mfc in base.mfcs},
            seed=self.config.seed,
            connects=not (self.on_cpu or self.config.cluster.shares_devices),
            any_rows=self.config.cluster.data_plane == "collective",
            algorithm=self.config.algorithm,
            saves=self.memory_model(self.kernels_alone).saves,
        )

    @property
    def _steps(self) -> dict[int, dict[str, SampleSizes]]:
        """The samples of simulated steps, from the second one on: one step that stands for all, or several.

        Few samples of unequal lengths have means far from each other, of which every plan makes something else.
        """
        draw, track = self.drawn[0], first_track(self.base)
        n = track.step_size
        cursor = track.cursor(row_ids(track.config, track.steps * n))
        numbers = range(2, N_STEPS + 1)[: max(1, _MOST_SAMPLES // n)]
        steps = {number: {ref.id: draw(ref.id) for ref in cursor.take((number - 1) * n, n)} for number in numbers}
        is_alike = len({size for sizes in steps.values() for size in sizes.values()}) == 1
        return {2: steps[2]} if is_alike else steps

    @cached_property
    def kernels_alone(self) -> Kernels:
        """The kernels of a run on one device, for the search."""
        states = role_states(self.base, self.models), call_states(self.base, self.rows)
        return self.kernels(*states, self.hardware.device.kind)

    @cached_property
    def model(self) -> Model:
        """The fast model, without limits on memory."""
        weightless = [role for role in self.base.roles if role not in self.models]
        prices = CostPrices(self.workload, self.hardware, self.kernels_alone)
        flow = flow_of(self.base.graph, weightless=weightless)
        return Model(flow, prices, self.cluster, alone=self.hardware.device.alone)

    @cached_property
    def pins(self) -> Mapping[str, Pin]:
        """Call -> what the user has decided about its allocation.

        Raises:
            AllocationError: a pin names no call, or is no allocation of the cluster.
        """
        names = [mfc.name for mfc in self.base.mfcs]
        found = {}
        for name, text in self.config.allocation.calls.items():
            if name not in names:
                raise AllocationError(
                    f"allocation.calls.{name}: there is no call '{name}'",
                    remedy=f"Calls: {', '.join(names)}.{did_you_mean(name, names)}",
                )
            try:
                found[name] = pin_from(text, self.cluster)
            except AllocationError as error:
                raise AllocationError(f"allocation.calls.{name}: {error.message}", remedy=error.remedy) from None
        return found

    @cached_property
    def spaces(self) -> Mapping[str, RoleSpace]:
        """Role -> the settings that a plan may choose for it: those that the configuration leaves open."""
        return {name: self._space(name) for name in self.base.roles}

    def _space(self, name: str) -> RoleSpace:
        section, places = self.config.models[name], self.config.allocation
        stage = section.optimizer.zero_stage
        has_own_memory = not self.on_cpu  # a CPU's is the host's: nothing becomes free, and copies take time

        def options(key: str, value: bool, *, is_open: bool = True) -> tuple[bool, ...]:
            return (False, True) if is_open and not value and key not in self.given else (value,)

        if self.base.roles[name].trainable:
            offloads = options(f"models.{name}.optimizer.offload", section.optimizer.offload, is_open=has_own_memory)
        else:
            is_offloaded = name in places.offload or places.offload_frozen
            offloads = options("allocation.offload", is_offloaded, is_open=has_own_memory and not places.offload)
        return RoleSpace(
            self.models.get(name),
            section.backend,
            zero_stages=() if stage is None else (stage,),
            checkpoints=options(f"models.{name}.activation_checkpointing", section.activation_checkpointing),
            offloads=offloads,
        )

    # ------------------------------------------------------------ plans of the search and settings

    def settings_of(self, plan: tuple[Placed, ...]) -> PlanSettings:
        """Return the settings of a plan that the search has found."""
        calls = topological_calls(self.base.graph)
        homes, roles = home_calls(self.base.graph), self.base.roles
        allocations, n_mbs = {}, {}
        stage, checkpointing, offload_optimizer = dict[str, int](), dict[str, bool](), dict[str, bool]()
        offload = [role for role in self.config.allocation.offload if roles[role].trainable]
        for mfc, placed in zip(calls, plan, strict=True):
            start, end = placed.span
            choice = placed.choice
            allocations[mfc.name] = str(Allocation(mesh_at(self.cluster, start, end - start), choice.strategy))
            if choice.n_mbs is not None:
                n_mbs[mfc.name] = choice.n_mbs
            if homes[mfc.role] != mfc.name or mfc.role not in self.models:
                continue
            if mfc.is_train:
                stage[mfc.role] = choice.zero_stage
                checkpointing[mfc.role] = choice.checkpoints
                offload_optimizer[mfc.role] = choice.offloads
            elif choice.offloads and not self.config.allocation.offload_frozen:
                offload.append(mfc.role)
        allocations = {mfc.name: allocations[mfc.name] for mfc in self.base.mfcs}
        return PlanSettings(allocations, n_mbs, stage, checkpointing, offload_optimizer, tuple(offload))

    def placed(self, settings: PlanSettings) -> tuple[Placed, ...]:
        """Return settings as a plan of the search, for its fast model.

        Raises:
            AllocationError: an allocation cannot be read.
        """
        homes, found = home_calls(self.base.graph), []
        for mfc in topological_calls(self.base.graph):
            allocation = parse_allocation(settings.allocations[mfc.name], self.cluster)
            role, ranks = mfc.role, allocation.mesh.ranks
            choice = Choice(allocation.strategy, settings.n_mbs.get(mfc.name))
            if homes[role] == mfc.name and role in self.models:
                section = self.config.models[role]
                default = zero_stage_of(section.backend, section.optimizer.zero_stage)
                is_offloaded = role in settings.offload or self.config.allocation.offload_frozen
                choice = Choice(
                    allocation.strategy,
                    settings.n_mbs.get(mfc.name),
                    settings.zero_stage.get(role, default) if mfc.is_train else 0,
                    mfc.is_train and settings.checkpointing.get(role, section.activation_checkpointing),
                    settings.offload_optimizer.get(role, section.optimizer.offload) if mfc.is_train else is_offloaded,
                )
            found.append(Placed((ranks[0], ranks[-1] + 1), choice))
        return tuple(found)

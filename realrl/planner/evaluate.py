"""A plan under the real scheduler: checked as for a run, its memory counted, its steps simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from realrl.errors import UsageError
from realrl.experiment.planning import check_models_fit, first_steps, plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import call_states, role_states, runtime_bytes
from realrl.plan.hooks import NO_OVERLAP, Overlap
from realrl.plan.memory.model import MemoryModel, Peaks
from realrl.plan.memory.overlap import plan_overlap
from realrl.plan.memory.plan import CallState, MemoryPlan, RoleState, show_bytes
from realrl.planner.request import Request
from realrl.planner.settings import PlanSettings
from realrl.sched.master.master_plan import plan_master
from realrl.sched.track.track_plan import plan_track
from realrl.search.fast import Placed
from realrl.sim.cluster import SimulatedRun, simulate
from realrl.sim.contention import simulate_sharing
from realrl.sim.costs.calls import CostModel
from realrl.sim.durations import Durations
from realrl.sim.report import Figures, figures_of

N_STEPS = 4  # that are simulated; the period is that of steps 2 to 4


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A plan that was checked as for a run, simulated by the real scheduler, its memory counted.

    Attributes:
        name: where it comes from: "search", the name of a method or of a file.
        run: its first steps.
        memory: of every rank and call.
        period_s: seconds of a step by the real scheduler.
        fast_s: seconds of a step by the fast model of the search.
        capacity: bytes of a device that a plan may use.
        on_cpu: True if host memory and the devices' memory are the same.
    """

    name: str
    settings: PlanSettings
    plan: RunPlan
    run: SimulatedRun
    memory: MemoryPlan
    period_s: float
    fast_s: float
    capacity: int
    on_cpu: bool

    @cached_property
    def figures(self) -> Figures:
        """Parts of the period, and the chain that bounds it."""
        return figures_of(self.run)

    @cached_property
    def fullest(self) -> tuple[int, str, int]:
        """The rank that needs the most, the call in which it does, and its bytes."""
        found = [
            (usage.total + (usage.host if self.on_cpu else 0), -rank, call)
            for call, by_rank in self.memory.calls.items()
            for rank, usage in by_rank.items()
        ]
        needs, rank, call = max(found, key=lambda one: one[:2])
        return -rank, call, needs

    @property
    def fits(self) -> bool:
        """True if every device has the memory that it needs."""
        return self.fullest[2] <= self.capacity


@dataclass(frozen=True, eq=False)
class _Checked:
    """A plan that `realrl run` would take, and what counts its memory."""

    plan: RunPlan
    roles: dict[str, RoleState]
    calls: list[CallState]
    model: MemoryModel
    runtime: dict[int, int] | None


def _unheard(durations: CostModel) -> Durations:
    return durations


def evaluate(
    request: Request,
    settings: PlanSettings,
    *,
    name: str = "plan",
    listen: Callable[[CostModel], Durations] = _unheard,
) -> Evaluated:
    """Check a plan, count its memory and simulate its first steps.

    Memory that is too small is no error: see `Evaluated.fits`.

    Args:
        listen: puts something between the scheduler and the durations that it asks for.

    Raises:
        UsageError: `realrl run` would refuse the plan.
    """
    checked = _check(request, settings)
    plan, roles, calls = checked.plan, checked.roles, checked.calls
    memory = checked.model.plan(roles, calls, runtime_bytes=checked.runtime)
    durations = CostModel(
        roles,
        request.hardware,
        generation=plan.config.generation,
        kernels=request.kernels(roles, calls, request.hardware.device.kind),
    )
    main = plan_track(
        plan.graph,
        plan.allocations,
        first_steps(plan.config, N_STEPS),
        dataset_rank=plan.dataset_rank,
        hooks=plan.hooks,
    )
    main = replace(main, overlap=_overlap(request, checked, memory))
    run = simulate_sharing(
        lambda some: simulate(plan_master(main, None, ""), some, request.drawn[0]),
        listen(durations),
        alone=request.hardware.device.alone,
        node_of=plan.cluster.node_of,
    )[-1]
    return Evaluated(
        name=name,
        settings=settings,
        plan=plan,
        run=run,
        memory=memory,
        period_s=figures_of(run).period_s,
        fast_s=request.model.period(request.placed(settings)),
        capacity=request.capacity,
        on_cpu=request.on_cpu,
    )


def is_possible(request: Request, placed: tuple[Placed, ...]) -> bool:
    """Return True if `realrl run` would take a plan of the search, and every device has the memory for it."""
    try:
        return _peaks(_check(request, request.settings_of(placed)), request).fits(request.capacity)
    except UsageError:
        return False


def why_not(request: Request, settings: PlanSettings) -> str:
    """Return the reason why a plan cannot run on the machine, in a sentence; "" if it can."""
    try:
        peaks = _peaks(_check(request, settings), request)
    except UsageError as error:
        return error.message
    if peaks.fits(request.capacity):
        return ""
    rank, call, needs = peaks.fullest
    return f"device {rank} needs {show_bytes(needs)} in {call}, and has {show_bytes(request.capacity)}"


def _check(request: Request, settings: PlanSettings) -> _Checked:
    """Plan a run with these settings.

    Raises:
        UsageError: `realrl run` would refuse the plan.
    """
    plan = plan_run(settings.applied(request.config), request.experiment)
    check_models_fit(plan)
    roles, calls = role_states(plan, request.models), call_states(plan, request.rows)
    model = request.memory_model(request.kernels(roles, calls, request.hardware.device.kind))
    return _Checked(plan, roles, calls, model, None if request.on_cpu else runtime_bytes(plan, roles, calls))


def _peaks(checked: _Checked, request: Request) -> Peaks:
    return checked.model.peaks(
        checked.roles, checked.calls, runtime_bytes=checked.runtime, is_host_memory=request.on_cpu
    )


def _overlap(request: Request, checked: _Checked, memory: MemoryPlan) -> Overlap:
    """Decide which parameters come early and which stay, as a run would."""
    plan = checked.plan
    if not plan.may_overlap:
        return NO_OVERLAP
    return plan_overlap(
        checked.roles,
        checked.calls,
        memory,
        capacity=request.capacity,
        is_host_memory=request.on_cpu,
        evaluating=[call.name for call in checked.calls if plan.is_evaluating(call.name)],
        batches={mfc.name: plan.samples_per_step // (mfc.min_n_seqs or mfc.n_seqs) for mfc in plan.mfcs},
    )

"""A plan under the real scheduler: checked as for a run, its memory counted, its steps simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from realrl.errors import UsageError
from realrl.experiment.planning import check_models_fit, plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import call_states, role_states, runtime_bytes
from realrl.graph.build import topological_calls
from realrl.plan.hooks import NO_OVERLAP, Overlap, Realloc
from realrl.plan.memory.connections import moving_pairs
from realrl.plan.memory.cuts import parts_of
from realrl.plan.memory.model import MemoryModel, Peaks
from realrl.plan.memory.overlap import plan_overlap
from realrl.plan.memory.plan import CallState, MemoryPlan, RoleState, show_bytes
from realrl.planner.request import N_STEPS, Request, first_track
from realrl.planner.settings import PlanSettings
from realrl.sched.master.master_plan import plan_master
from realrl.search.memory.devices import Ordered, Shown
from realrl.search.memory.links import ordered_links
from realrl.search.space import Placed
from realrl.sim.cluster import SimulatedCluster, SimulatedRun
from realrl.sim.contention import simulate_sharing
from realrl.sim.costs.calls import CostModel
from realrl.sim.durations import Durations
from realrl.sim.report import Figures, figures_of


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A plan that was checked as for a run and simulated by the real scheduler.

    What is large, such as its run on a thousand devices, is made when it is asked for: of most plans nobody asks.

    Attributes:
        name: where it comes from: "search", the name of a method or of a file.
        figures: parts of the period, and the chain that bounds it.
        fast_s: seconds of a step by the fast model of the search.
        simulated: returns its first steps.
    """

    name: str
    request: Request
    settings: PlanSettings
    figures: Figures
    fast_s: float
    simulated: Callable[[], SimulatedRun]

    @property
    def period_s(self) -> float:
        """Seconds of a step by the real scheduler."""
        return self.figures.period_s

    @property
    def capacity(self) -> int:
        """Bytes of a device that a plan may use."""
        return self.request.capacity

    @property
    def on_cpu(self) -> bool:
        """True if host memory and the devices' memory are the same."""
        return self.request.on_cpu

    @cached_property
    def _checked(self) -> _Checked:
        return _check(self.request, self.settings)

    @property
    def plan(self) -> RunPlan:
        """The run with these settings."""
        return self._checked.plan

    @cached_property
    def run(self) -> SimulatedRun:
        """Its first steps."""
        return self.simulated()

    @cached_property
    def memory(self) -> MemoryPlan:
        """Memory of every rank and call."""
        return self._checked.memory

    @cached_property
    def fullest(self) -> tuple[int, str, int]:
        """The rank that needs the most, the call in which it does, and its bytes."""
        return _peaks(self._checked, self.request).fullest

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

    @property
    def memory(self) -> MemoryPlan:
        """Memory of every rank and call."""
        return self.model.plan(self.roles, self.calls, runtime_bytes=self.runtime)


def _unheard(durations: CostModel) -> Durations:
    return durations


def evaluate(
    request: Request,
    settings: PlanSettings,
    *,
    name: str = "plan",
    listen: Callable[[CostModel], Durations] = _unheard,
    n_steps: int = N_STEPS,
) -> Evaluated:
    """Check a plan, count its memory and simulate its first steps.

    Memory that is too small is no error: see `Evaluated.fits`.

    Args:
        listen: puts something between the scheduler and the durations that it asks for.
        n_steps: last step of the period, which begins with step 2.

    Raises:
        UsageError: `realrl run` would refuse the plan.
    """
    run = _simulated(request, _check(request, settings), listen, n_steps=n_steps)
    figures = figures_of(replace(run, steps=run.steps[:n_steps]))
    return confirmed(request, settings, figures, name=name, simulated=lambda: run)


def judge(request: Request, settings: PlanSettings) -> Figures | str:
    """Return the figures of a plan under the real scheduler; or the reason why it cannot run on the machine."""
    try:
        checked = _check(request, settings)
        return _lack(request, checked) or figures_of(_simulated(request, checked, goes_on=False))
    except UsageError as error:
        return error.message


def confirmed(
    request: Request,
    settings: PlanSettings,
    figures: Figures,
    *,
    name: str,
    simulated: Callable[[], SimulatedRun] | None = None,
) -> Evaluated:
    """Return a plan that was judged.

    Args:
        simulated: as for `Evaluated`; by default the plan is simulated again.
    """
    fast_s = request.model.period(request.placed(settings))
    again = simulated or (lambda: _simulated(request, _check(request, settings)))
    return Evaluated(name, request, settings, figures, fast_s, again)


def _simulated(
    request: Request,
    checked: _Checked,
    listen: Callable[[CostModel], Durations] = _unheard,
    *,
    n_steps: int = N_STEPS,
    goes_on: bool = True,
) -> SimulatedRun:
    """Return the first steps of a plan under the real scheduler, and those that begin beside them.

    Args:
        goes_on: False to end with the report of step `n_steps`.
    """
    plan, roles = checked.plan, checked.roles
    kernels = request.kernels(roles, checked.calls, request.hardware.device.kind)
    durations = CostModel(roles, request.hardware, generation=plan.config.generation, kernels=kernels)
    main = replace(first_track(plan, n_steps), overlap=_overlap(request, checked))
    last = None if goes_on else n_steps
    return simulate_sharing(
        lambda some: [SimulatedCluster(plan_master(main, None, ""), some, request.drawn[0]).run(last)],
        listen(durations),
        alone=request.hardware.device.alone,
        scatter=request.hardware.device.scatter,
        node_of=plan.cluster.node_of,
        n_steps=n_steps,
    )[-1]


class PlanChecks:
    """Checks of a search's plans as for a run. A search that hears no asks why at once: the last check is kept."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._last = lru_cache(maxsize=1)(self._check)
        self._known = lru_cache(maxsize=4096)(self._fits)

    def accepts(self, placed: tuple[Placed, ...]) -> bool:
        """Return True if `realrl run` would take a plan, and every device has the memory for it."""
        return self._known(placed)

    def shows(self, placed: tuple[Placed, ...]) -> Shown | None:
        """Return what the count of a plan's memory shows that the search does not know; None if a run refuses it."""
        found = self._last(placed)
        if found is None:
            return None
        checked, peaks = found
        request, ordered = self._request, dict[int, Ordered]()
        numbers = {mfc.name: i for i, mfc in enumerate(topological_calls(request.base.graph))}
        for call in checked.calls:
            if call.name not in numbers:  # it is an evaluation's, which has the place of another one
                continue
            for hook in call.hooks.before:
                if isinstance(hook, Realloc) and hook.is_implied and call.role in checked.roles:
                    there = call.allocation
                    pairs = moving_pairs(checked.roles[call.role].model, hook.source_allocation, there)
                    links = ordered_links(there.strategy, there.ranks, pairs, request.cluster)
                    parts = dict(zip(there.ranks, parts_of(there.strategy).tolist(), strict=True))
                    ordered[numbers[call.name]] = Ordered(links, tuple(parts[rank] for rank in sorted(parts)))
        device, _, n_bytes = peaks.known
        return Shown(n_bytes, device, ordered)

    def _fits(self, placed: tuple[Placed, ...]) -> bool:
        found = self._last(placed)
        return found is not None and found[1].fits(self._request.capacity)

    def _check(self, placed: tuple[Placed, ...]) -> tuple[_Checked, Peaks] | None:
        request = self._request
        try:
            checked = _check(request, request.settings_of(placed))
        except UsageError:
            return None
        return checked, _peaks(checked, request)


def why_not(request: Request, settings: PlanSettings) -> str:
    """Return the reason why a plan cannot run on the machine, in a sentence; "" if it can."""
    try:
        return _lack(request, _check(request, settings))
    except UsageError as error:
        return error.message


def _lack(request: Request, checked: _Checked) -> str:
    """Return a sentence about the device that lacks the most memory; "" if none does."""
    peaks = _peaks(checked, request)
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


def _overlap(request: Request, checked: _Checked) -> Overlap:
    """Decide which parameters come early and which stay, as a run would."""
    plan = checked.plan
    if not plan.may_overlap:
        return NO_OVERLAP
    return plan_overlap(
        checked.roles,
        checked.calls,
        checked.memory,
        capacity=request.capacity,
        is_host_memory=request.on_cpu,
        evaluating=[call.name for call in checked.calls if plan.is_evaluating(call.name)],
        batches={mfc.name: plan.samples_per_step // (mfc.min_n_seqs or mfc.n_seqs) for mfc in plan.mfcs},
    )

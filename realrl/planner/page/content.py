"""Contents of pages: about the plans that were found, and the memory of a plan on a machine."""

from __future__ import annotations

from realrl.experiment.models import role_configs
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import MARGIN, call_states, longest_rows, memory_model, role_states, runtime_bytes
from realrl.planner.evaluate import Evaluated
from realrl.planner.modelled import KernelsOf
from realrl.planner.page.memory import DeviceMemory
from realrl.planner.page.pictures import Rival
from realrl.planner.page.render import PageContent
from realrl.planner.planner import Planned
from realrl.sim.hardware import Hardware

_MOST_RIVALS = 16


def content_of(planned: Planned) -> PageContent:
    """Return what a page tells of the best plan, and of those beside it."""
    best, request = planned.best, planned.request
    rivals = [
        Rival(one.name, one.period_s, "" if one is best else _differs(best, one), one is best)
        for one in planned.candidates[:_MOST_RIVALS]
    ]
    rivals += [Rival(name, None, reason) for name, reason in planned.refused.items()]
    return PageContent(
        plan=best.plan,
        run=best.run,
        notes=(f"on {request.hardware.name}", *([request.lengths] if request.lengths else request.drawn[1])),
        memory=DeviceMemory(best.memory, best.capacity, best.on_cpu),
        rivals=rivals,
        bound_s=planned.bound_s or None,
        gap=planned.gap,
    )


def memory_of(plan: RunPlan, machine: Hardware, kernels: KernelsOf) -> DeviceMemory:
    """Return the memory that a plan needs of the devices of a machine.

    Args:
        kernels: use of memory by the machine's kernels.
    """
    on_cpu = machine.device.kind == "cpu"
    roles = role_states(plan, role_configs(plan))
    calls = call_states(plan, longest_rows(plan.config, plan.experiment.dataset))
    model = memory_model(plan, kernels(roles, calls, machine.device.kind), on_cpu=on_cpu)
    runtime = None if on_cpu else runtime_bytes(plan, roles, calls)
    capacity = int(MARGIN * machine.device.memory_bytes)
    return DeviceMemory(model.plan(roles, calls, runtime_bytes=runtime), capacity, on_cpu)


def _differs(best: Evaluated, other: Evaluated) -> str:
    """Return the calls that run elsewhere, in a few words."""
    places, ours = other.settings.allocations, best.settings.allocations
    moved = [f"{name} {place}" for name, place in places.items() if ours[name] != place]
    if not moved:
        return "other settings"
    more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    return moved[0] + more

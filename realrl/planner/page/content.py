"""Pages about the plans that were found."""

from __future__ import annotations

from realrl.planner.evaluate import Evaluated
from realrl.planner.page.memory import DeviceMemory
from realrl.planner.page.pictures import Rival
from realrl.planner.page.render import PageContent
from realrl.planner.planner import Planned

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
    )


def _differs(best: Evaluated, other: Evaluated) -> str:
    """Return the calls that run elsewhere, in a few words."""
    places = {name: str(place) for name, place in other.plan.allocations.items()}
    moved = [f"{name} {place}" for name, place in places.items() if str(best.plan.allocations[name]) != place]
    if not moved:
        return "other settings"
    more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    return moved[0] + more

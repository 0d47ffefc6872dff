"""Reasons against another place for a call: the rule that it breaks, the memory that it lacks, or what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from realrl.errors import AllocationError, UsageError
from realrl.mesh.notation import parse_allocation, parse_strategy
from realrl.plan.memory.plan import Usage, show_bytes
from realrl.planner.evaluate import Evaluated, evaluate
from realrl.planner.explain import check_call, lacking_text, placed_text, with_place
from realrl.planner.request import Request
from realrl.planner.times import CallTimes, call_times
from realrl.planner.words import Block, Table, change_text, seconds_text, sentence
from realrl.sim.report import MESSAGES

_WORTH_SAYING = 0.01  # change of a call's seconds, as a share of itself
_SHOWN_BOUNDS = 5

Search = Callable[[Request], Evaluated]
"""The best plan for a request; AllocationError if there is none."""


def why(request: Request, best: Evaluated, wanted: str, *, search: Search | None = None) -> list[Block]:
    """Return what another place of a call would change, alone and with the rest searched again.

    Args:
        best: the plan that is compared with.
        wanted: ``call=strategy@mesh``, or ``call=strategy`` on the mesh that the call has.
        search: finds the best plan with the call in that place.

    Raises:
        UsageError: there is no such call, or the text is no allocation.
    """
    call, _, text = wanted.partition("=")
    check_call(best, call)
    strategy, at, _ = text.partition("@")
    parse_strategy(strategy)
    text = text if at else f"{strategy}@{best.plan.allocations[call].mesh}"
    try:
        place = parse_allocation(text, best.plan.cluster)
    except AllocationError as error:
        if error.mesh is None:  # it cannot be read
            raise
        return [sentence(f"{call} cannot have {text}: {error.message}"), *([error.remedy] if error.remedy else [])]
    if str(place) == str(best.plan.allocations[call]):
        return [f"{call} has {place} in this plan; a step takes {seconds_text(best.period_s)}."]
    blocks = _alone(request, best, call, str(place))
    if search is None:
        return blocks
    return [*blocks, *_searched(request, best, (call, str(place)), search)]


def _alone(request: Request, best: Evaluated, call: str, place: str) -> list[Block]:
    """Return what changes if nothing else does."""
    now = placed_text(best, call)
    try:
        other = evaluate(request, with_place(best.settings, call, place), name=place)
    except UsageError as error:
        blocks: list[Block] = [sentence(f"With {place} in the place of {now}, {call} breaks a rule: {error.message}")]
        return [*blocks, error.remedy] if error.remedy else blocks
    took = f"a step would take {change_text(other.period_s, best.period_s)}"
    if not other.fits:
        return [
            f"With {place} in the place of {now}, memory is too small: {lacking_text(other)}, which may use "
            f"{show_bytes(other.capacity)}. With the room, {took}.",
            _memory_table(best, other),
        ]
    return [
        f"With {place} in the place of {now} and everything else as it is, {took}; "
        f"the fullest device would need {show_bytes(other.fullest[2])}, and needs {show_bytes(best.fullest[2])} now.",
        *changes(best, other),
    ]


def _searched(request: Request, best: Evaluated, pin: tuple[str, str], search: Search) -> list[Block]:
    """Return what changes if all other calls may change, too."""
    call, place = pin
    places = request.config.allocation
    pinned = places.model_copy(update={"calls": {**places.calls, call: place}})
    try:
        other = search(replace(request, config=request.config.model_copy(update={"allocation": pinned})))
    except UsageError as error:
        return [sentence(f"With {call} there, no plan is found: {error.message}")]
    moved = [
        f"{name} to {placed_text(other, name)}"
        for name in best.settings.allocations
        if name != call and placed_text(other, name) != placed_text(best, name)
    ]
    rest = f"moving {', '.join(moved)}" if moved else "leaving all other calls where they are"
    took = change_text(other.period_s, best.period_s)
    return [f"The best plan with {call}={place} takes {took} a step, {rest}.", *changes(best, other)]


def changes(before: Evaluated, after: Evaluated) -> list[Block]:
    """Return the calls that take longer or shorter, and what bounds a step before and after."""
    times, others = call_times(before.run), call_times(after.run)
    rows = []
    for name, own in times.items():
        other = others.get(name, CallTimes())
        for what, a, b in (("", own.run, other.run), ("parameters for ", own.before, other.before),
                           ("rows for ", own.rows, other.rows)):  # fmt: skip
            if abs(a - b) > _WORTH_SAYING * max(a, b) and max(a, b) > 1e-3 * before.period_s:
                rows.append((what + name, seconds_text(a), change_text(b, a) if a else seconds_text(b)))
    blocks: list[Block] = []
    if rows:
        blocks.append(Table(("what changes", "now", "then"), tuple(rows)))
    return [*blocks, f"A step is bound now by {_bounds(before)}; then by {_bounds(after)}."]


def _bounds(found: Evaluated) -> str:
    links = [(name, s) for name, s in found.figures.bounds.items() if s > _WORTH_SAYING * found.period_s]
    return ", ".join(f"{name} ({seconds_text(s)})" for name, s in links[:_SHOWN_BOUNDS]) or MESSAGES


def _memory_table(best: Evaluated, other: Evaluated) -> Table:
    """Return what the memory of the fullest device is made of, and that of the same call and device now."""
    rank, call, _ = other.fullest
    then, now = other.memory.calls[call][rank], best.memory.calls.get(call, {}).get(rank, Usage())
    names = [part.name for part in fields(Usage) if part.name != "host" or other.on_cpu]
    rows = [
        (name, show_bytes(getattr(now, name)), show_bytes(getattr(then, name)))
        for name in names
        if getattr(now, name) or getattr(then, name)
    ]
    columns = (f"memory of device {rank} in {call}", "now", "then")
    return Table(columns, (*rows, ("together", *(show_bytes(_needs(u, other)) for u in (now, then)))))


def _needs(usage: Usage, found: Evaluated) -> int:
    return usage.total + (usage.host if found.on_cpu else 0)

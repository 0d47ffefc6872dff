"""Parameters that come to calls: early, while other calls compute, and for how long they stay.

A call in another layout than its role's home gets parameters by a hook before it. A role may also be in host memory.
In both cases the part AHEAD lets the parameters set out before the call's samples are there; the call then waits only
for what is still on its way.

Invariants:
    - parameters set out when every call that they depend on was sent to all ranks, hooks included; ranks execute in
      order, so the version exists then;
    - a call that changes a role is not sent between a journey of the role's parameters and the call that it is for;
    - of two journeys under way, no rank takes part in both;
    - between them, only calls beside which the plan has room run on the ranks of a journey;
    - the call of a journey waits for no call that is not under way, so that nobody waits for the journey in a circle;
    - parameters that stay are as new as those that a hook would bring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from realrl.sched.samples.buffer import SampleBuffer
from realrl.sched.samples.in_flight import FlightLog
from realrl.sched.track.dispatch import Dispatch, Part, PartKind
from realrl.sched.track.track_plan import TrackPlan
from realrl.sched.track.waits import Waits


@dataclass(frozen=True)
class Journey:
    """Parameters on their way to a call that is not dispatched yet.

    Attributes:
        id: number of the dispatch that they are for.
        position: the call.
        part: the part AHEAD.
    """

    id: int
    position: int
    step: int
    part: Part


class Visits:
    """Journeys under way, and parameters that wait for the next batch of their call; calls by their position."""

    def __init__(self, plan: TrackPlan, *, buffer: SampleBuffer, waits: Waits, flight: FlightLog) -> None:
        self.journeys: dict[int, Journey] = {}  # by position
        self._plan = plan
        self._calls = plan.calls
        self._buffer = buffer
        self._waits = waits
        self._flight = flight
        self._extents = [frozenset(call.extent) for call in plan.calls]
        self._staying: set[int] = set()

    def add_started(self, dispatch: Dispatch, position: int) -> None:
        """Note a dispatch whose parts are still to be sent, and decide what becomes of its parameters."""
        self._forget_older(dispatch)  # calls that start at the same moment are sent after it
        overlap, name = self._plan.overlap, dispatch.call.name
        journey = self.journeys.pop(position, None)
        if journey is not None:
            dispatch.parts[PartKind.AHEAD] = journey.part
        dispatch.has_parameters = position in self._staying
        # what is left of the step comes for sure, unless a call that may drop it has the first say
        may_shrink = dispatch.call.feeds_drop and not set(dispatch.call.mfc.input_keys) <= {*self._plan.dataset_keys}
        is_last = self._waits.begun_step(position) >= dispatch.step or may_shrink or bool(dispatch.call.gates)
        dispatch.keeps_parameters = name in overlap.resident or (name in overlap.stays and not is_last)
        if dispatch.keeps_parameters:
            self._staying.add(position)
        else:
            self._staying.discard(position)

    def add_sent(self, dispatch: Dispatch) -> None:
        """Note that a part was sent."""
        self._forget_older(dispatch)

    def _forget_older(self, dispatch: Dispatch) -> None:
        """Let no parameters stay of roles that a call changes: they are of no use behind it."""
        for position in [p for p in self._staying if self._calls[p].mfc.role in dispatch.call.mfc.changed_roles]:
            self._staying.discard(position)

    def blocked(self, position: int) -> str | None:
        """Return the call whose parameters are on their way and keep another one from starting, or None."""
        call = self._calls[position]
        for other in self.journeys:
            traveller = self._calls[other]
            if other == position:
                continue
            is_crowded = call.name not in self._plan.overlap.early[traveller.name] and not self._extents[
                other
            ].isdisjoint(call.ranks)
            if is_crowded or traveller.mfc.role in call.mfc.changed_roles:
                return traveller.name
        return None

    def setting_out(self, dispatch: Dispatch, under_way: Mapping[int, Dispatch]) -> Iterator[int]:
        """Yield the calls whose parameters can set out just before a call is sent; each must set out at once."""
        early = self._plan.overlap.early
        beside = {dispatch.call.name, dispatch.call.partner} - {""}
        promised: dict[str, set[str]] = {}
        for other in under_way.values() if early else ():
            for key in () if other.call.mfc.may_drop else other.call.mfc.output_keys:
                promised.setdefault(key, set()).update(other.ids)
        running = {other.call.name for other in under_way.values()}
        for position, call in enumerate(self._calls):
            if (
                beside <= set(early.get(call.name, ()))
                and call.name not in running
                and not self._extents[position].isdisjoint(dispatch.call.ranks)
                and position not in self._staying
                and self._is_free(position, under_way)
                and not self._flight.knows(call.name)
                and self._waits.has_version(position)
                and not any(_may_still_change(other, call.mfc.role) for other in under_way.values())
                and self._buffer.will_be_ready(position, promised)
                and self._has_room(position, dispatch, under_way)
            ):
                yield position

    def _is_free(self, position: int, under_way: Mapping[int, Dispatch]) -> bool:
        """Return True if no rank of the call has parameters on the way that no call has taken in yet."""
        extent = self._extents[position]
        if not all(extent.isdisjoint(self._extents[other]) for other in self.journeys):
            return False
        for other in under_way.values():
            taken_in = PartKind.BEFORE if other.call.hooks.before else PartKind.CALL
            is_waiting = PartKind.AHEAD in other.parts and taken_in not in other.parts
            if is_waiting and not extent.isdisjoint(other.call.extent):
                return False
        return True

    def _has_room(self, position: int, dispatch: Dispatch, under_way: Mapping[int, Dispatch]) -> bool:
        """Return True if no call that is started, but not sent, runs on a rank that would be too full then."""
        beside = self._plan.overlap.early[self._calls[position].name]
        return all(
            other.call.name in beside or PartKind.CALL in other.parts
            for other in under_way.values()
            if other is not dispatch and not self._extents[position].isdisjoint(other.call.ranks)
        )


def _may_still_change(dispatch: Dispatch, role: str) -> bool:
    """Return True if a part of the dispatch that is still to be sent changes a role."""
    is_sent = {PartKind.CALL, *dispatch.last_parts} <= dispatch.parts.keys()
    return role in dispatch.call.mfc.changed_roles and not is_sent

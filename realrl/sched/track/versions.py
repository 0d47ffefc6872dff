"""Versions of parameters that calls read; ranks execute in the order of sending, which decides them."""

from __future__ import annotations

from collections.abc import Iterable

from realrl.sched.samples.buffer import SampleBuffer
from realrl.sched.track.dispatch import Dispatch, PartKind
from realrl.sched.track.step_log import StepLog
from realrl.sched.track.track_plan import TrackPlan


class Versions:
    """The versions of trained roles, as calls that are sent from now on read them.

    Args:
        buffer: records the version that produced a sample's keys.
        log: records the staleness of samples that a role is trained on.
    """

    def __init__(self, plan: TrackPlan, *, buffer: SampleBuffer, log: StepLog) -> None:
        self.trained_step = 0  # the last step of a started call that changes parameters
        self._plan = plan
        self._buffer = buffer
        self._log = log
        self._position = {call.name: position for position, call in enumerate(plan.calls)}
        self._versions = plan.versions_after(plan.first_step - 1)
        self._is_stale_allowed = any(call.mfc.max_staleness for call in plan.calls)

    def add_started(self, dispatch: Dispatch) -> None:
        """Note a dispatch that is about to be sent."""
        if dispatch.call.changes_parameters:
            self.trained_step = max(self.trained_step, dispatch.step)

    def add_sent(self, dispatch: Dispatch, kind: PartKind) -> None:
        """Note a part that is sent; the part that brings the parameters, or else the call, fixes their version."""
        call, role = dispatch.call, dispatch.call.mfc.role
        if role not in self._versions or kind not in (PartKind.BEFORE, PartKind.CALL):
            return
        is_brought = call.hooks.home not in (None, call.allocation) and not dispatch.has_parameters  # by a hook
        if kind is (PartKind.BEFORE if is_brought else PartKind.CALL):
            dispatch.version = version = self._versions[role]
            if call.mfc.output_keys:
                self._buffer.set_version(self._position[call.name], dispatch.ids, version)
            if call.mfc.is_train:
                self._versions[role] += 1
                if self._is_stale_allowed:
                    self._log.add_staleness(dispatch.step, self._buffer.n_behind(role, dispatch.ids, version))

    def reading_before(self, step: int, dispatches: Iterable[Dispatch]) -> frozenset[int]:
        """Return the dispatches of later steps that read older parameters than those after `step`."""
        versions, written = self._plan.versions_after(step), self._plan.written_roles
        found = []
        for dispatch in dispatches:
            role, version = dispatch.call.mfc.role, dispatch.version
            is_older = version is not None and version < versions.get(role, 0)
            is_unknown = version is None and role in written and dispatch.call.mfc.max_staleness > 0
            if dispatch.step > step and (is_older or is_unknown):
                found.append(dispatch.id)
        return frozenset(found)

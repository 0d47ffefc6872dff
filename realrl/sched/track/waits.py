"""Waits of calls for all but devices: samples, other calls, replacements, checkpoints and evaluations.

A call that may be stale runs a fixed number of steps ahead of the training of its role, never more and never less:
training waits until it was sent. At step i it reads the parameters after step ``i - 1 - max_staleness``; in the first
steps, also of a resumed run, those that the run began with. There are two exceptions: other waits of the call may hold
it back (see `lead_waits`), and replacements of dropped samples may read later parameters, up to those of step i - 1.

Invariants:
    - a call that changes parameters at step i starts when every reader with a lead of n has all samples of step i + n
      that it gets before replacements, and, where a hook reads the parameters after it, is done with them;
    - it waits for no call that waits for it at step i or later: replacements of step i + n count only where the
      dropping calls before them need older parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from realrl.sched.samples.buffer import SampleBuffer
from realrl.sched.track.loader import SampleLoader
from realrl.sched.track.track_plan import TrackPlan


class Hold(Protocol):
    """A user of old parameters outside of the track."""

    def blocks_training(self, step: int) -> bool:
        """Return True if no call of `step` may change parameters yet."""

    def explain(self, step: int) -> str:
        """Return the reason why a call that would change parameters at `step` waits."""


class Waits:
    """Progress of each call in steps, and its reason to wait; calls are named by their position.

    Args:
        buffer: knows which samples calls have taken.
        loader: knows which steps have all their samples.
        holds: keep calls from changing parameters.
    """

    def __init__(
        self, plan: TrackPlan, *, buffer: SampleBuffer, loader: SampleLoader, holds: Sequence[Hold] = ()
    ) -> None:
        self._calls = plan.calls
        self._before = plan.first_step - 1
        self._queues = buffer.queues
        self._loader = loader
        self._holds = tuple(holds)
        self._position = {call.name: position for position, call in enumerate(plan.calls)}

    def next_step(self, position: int) -> int:
        """The step that the call takes samples of next."""
        return self._before + 1 + self._queues[position].steps_taken

    def begun_step(self, position: int) -> int:
        """Return the last step whose samples, apart from replacements, were all sent to the call."""
        return self._before + self._queues[position].steps_begun

    def read_step(self, position: int) -> int:
        """Return the last step whose samples, apart from replacements, the call is done with, hooks included."""
        return self._before + self._queues[position].steps_read

    def finished_step(self, position: int) -> int:
        """The last step that the call is done with."""
        return self._before + self._queues[position].steps_finished

    def has_version(self, position: int) -> bool:
        """Return True if calls that were started make the parameters that a call, which changes none, reads next."""
        call, step = self._calls[position], self.next_step(position)
        for wait in call.waits_for:
            trainer = self._position[wait.before]
            mfc = self._calls[trainer].mfc
            is_sent_enough = mfc.changed_roles == {mfc.role} and not self._calls[trainer].feeds_drop
            if (self.begun_step if is_sent_enough else self.finished_step)(trainer) < step - wait.lag:
                return False
        return not call.changes_parameters

    def lack(self, position: int) -> str | None:
        """Return the reason, other than devices, why a call waits, or None."""
        call, step = self._calls[position], self.next_step(position)
        if not self._queues[position].batch_size():
            return f"samples of step {step}"
        for wait in call.waits_for:
            if self.finished_step(self._position[wait.before]) < step - wait.lag:
                return f"'{wait.before}' to finish step {step - wait.lag}"
        for lead in call.leads:
            ahead, reader = min(step + lead.lead, self._loader.last_step), self._position[lead.reader]
            progress = {"sent": self.begun_step, "read": self.read_step, "finished": self.finished_step}[lead.until]
            if progress(reader) < ahead:
                return f"'{lead.reader}' to read the same parameters at step {ahead}"
        if not call.changes_parameters:
            return None
        if not self._loader.is_settled(step):
            return f"replacements of dropped samples of step {step}"
        return next((hold.explain(step) for hold in self._holds if hold.blocks_training(step)), None)

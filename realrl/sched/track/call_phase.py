"""What one call is doing, and what leads from one phase to the next; numbers of what is sent."""

from __future__ import annotations

from enum import Enum


class CallPhase(Enum):
    """What one call is doing."""

    WAITING = "waiting"  # for samples, a version or devices
    RUNNING = "running"  # one dispatch is under way, its hooks included
    DONE = "done"


NEXT_CALL_PHASES = {
    CallPhase.WAITING: {
        CallPhase.RUNNING,  # a batch had its inputs, version and devices: requests went to every rank it needs
        CallPhase.DONE,  # the last step has no replacements that it must see, or was done before the run was resumed
    },
    CallPhase.RUNNING: {
        CallPhase.WAITING,  # every rank is done, hooks included, and the run needs the call again
        CallPhase.DONE,  # every rank is done with the last batch of the last step
    },
    CallPhase.DONE: set[CallPhase](),
}


class Counters:
    """Numbers of dispatches and of their parts; schedulers that feed the same workers share them."""

    def __init__(self) -> None:
        self._n_dispatches = self._n_parts = 0

    def next_dispatch(self) -> int:
        """A number that no other dispatch has."""
        self._n_dispatches += 1
        return self._n_dispatches - 1

    def next_part(self) -> int:
        """The position of the part that is sent now, in the order of all parts."""
        self._n_parts += 1
        return self._n_parts - 1

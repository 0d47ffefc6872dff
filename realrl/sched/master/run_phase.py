"""How far a run is, and what leads from one phase to the next.

CONNECTING ──► INITIALIZING ──► RUNNING ──► CLOSING ──► FINISHED
    │               │              │           │
    └───────────────┴──────────────┴───────────┴──► ABORTED
"""

from __future__ import annotations

from enum import Enum


class RunPhase(Enum):
    """How far the run is."""

    CONNECTING = "connecting"  # workers start and say Hello
    INITIALIZING = "initializing"  # workers build groups, models and the dataset
    RUNNING = "running"
    CLOSING = "closing"  # workers were told to shut down
    FINISHED = "finished"
    ABORTED = "aborted"


NEXT_RUN_PHASES = {
    RunPhase.CONNECTING: {
        RunPhase.INITIALIZING,  # Start came and every rank said Hello: Initialize goes to all of them
        RunPhase.CLOSING,  # interrupted before all were there
        RunPhase.ABORTED,  # a worker was lost, or is of another version
    },
    RunPhase.INITIALIZING: {
        RunPhase.RUNNING,  # every rank is ready, and the dataset is large enough for a step
        RunPhase.CLOSING,  # interrupted
        RunPhase.ABORTED,  # a worker failed, was lost or fell silent; or the dataset is too small
    },
    RunPhase.RUNNING: {
        RunPhase.CLOSING,  # the last step is complete and every checkpoint in place; or interrupted
        RunPhase.ABORTED,  # a worker failed, was lost or fell silent; or a checkpoint could not be written
    },
    RunPhase.CLOSING: {
        RunPhase.FINISHED,  # every worker said Goodbye (when interrupted: or was lost)
        RunPhase.ABORTED,  # a worker failed while the run was ending on its own; or interrupted a second time
    },
    RunPhase.FINISHED: set[RunPhase](),
    RunPhase.ABORTED: set[RunPhase](),
}

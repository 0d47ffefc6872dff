"""Restarts of a run: the failure file of the master, and the supervisor's view of an ended attempt."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from realrl.errors import Error
from realrl.files import read_input, write_output
from realrl.runtime.checkpoints.store import Resume, load_manifest
from realrl.runtime.output.json_lines import last_step
from realrl.runtime.output.metrics import FILE_NAME as METRICS_FILE
from realrl.sched.events import Failure
from realrl.sched.master.recovery import AttemptEnded, Restart

FAILURE_FILE = "logs/failure.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recover:
    """Restart policy of a run.

    Attributes:
        retries: largest number of restarts.
        find_checkpoint: returns the starting point of a restart.
        master_timeout_s: a master that is silent for so long is killed.
    """

    retries: int = 0
    find_checkpoint: Callable[[], Resume] = Resume
    master_timeout_s: float = math.inf


def write_failure(run_dir: Path, failure: Failure) -> None:
    """Write the cause of the end, by which the supervisor decides on a restart."""
    path = run_dir / FAILURE_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, msgspec.json.encode(failure))
    except OSError as err:
        _log.warning("cannot write %s: %s", path, err)


def forget_failure(run_dir: Path) -> None:
    """Remove the failure file of an earlier attempt."""
    with contextlib.suppress(OSError):
        (run_dir / FAILURE_FILE).unlink()


def describe_end(run_dir: Path, exit_code: int, *, is_interrupted: bool, silent_s: float = 0.0) -> AttemptEnded:
    """Describe an ended attempt from its exit code, failure file and metrics; for `silent_s` see `AttemptEnded`."""
    try:
        failure = msgspec.json.decode(read_input(run_dir / FAILURE_FILE), type=Failure)
    except (OSError, msgspec.MsgspecError):
        failure = None
    try:
        step = last_step(run_dir / METRICS_FILE)
    except (OSError, Error):
        step = 0
    return AttemptEnded(exit_code, failure, step, is_interrupted, silent_s)


def describe_restart(restart: Restart, retries: int, resume: Resume, done: int) -> str:
    """Message about a restart: the loss, the place where the run continues, and the steps that it repeats.

    Args:
        done: the last complete step.
    """
    begin, where = _origin(resume)
    again = f"; steps {begin + 1} to {done} are done again" if done > begin + 1 else ""
    again = f"; step {done} is done again" if done == begin + 1 else again
    return f"restart {restart.number} of {retries}: {restart.lost}; going on from {where}{again}"


def describe_again(restart: Restart, retries: int, resume: Resume) -> str:
    """End of the report of a loss after which the run goes on."""
    return f"it starts again by itself ({restart.number} of {retries}), from {_origin(resume)[1]}"


def _origin(resume: Resume) -> tuple[int, str]:
    """Return the step of a checkpoint, and the place in words; 0 without one."""
    if resume.folder is None:
        return 0, "the beginning"
    step = load_manifest(resume.folder).step
    return step, f"the checkpoint of step {step}"

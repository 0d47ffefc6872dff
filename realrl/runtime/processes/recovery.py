"""Restarts of a run: what the master leaves behind when it fails, and what the supervisor makes of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from realrl.errors import Error
from realrl.runtime.checkpoints.store import Resume, load_manifest
from realrl.runtime.output.json_lines import last_step
from realrl.runtime.output.metrics import FILE_NAME as METRICS_FILE
from realrl.sched.events import Failure
from realrl.sched.master.recovery import AttemptEnded, Restart

FAILURE_FILE = "logs/failure.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recover:
    """How a run is restarted.

    Attributes:
        retries: restarts at most.
        find_checkpoint: where a restarted run begins.
    """

    retries: int = 0
    find_checkpoint: Callable[[], Resume] = Resume


def write_failure(run_dir: Path, failure: Failure) -> None:
    """Leave word of why the run ends; without it, the supervisor starts nothing again."""
    path = run_dir / FAILURE_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(failure))
    except OSError as err:
        _log.warning("cannot write %s: %s", path, err)


def forget_failure(run_dir: Path) -> None:
    """A new attempt begins."""
    with contextlib.suppress(OSError):
        (run_dir / FAILURE_FILE).unlink()


def describe_end(run_dir: Path, exit_code: int, *, is_interrupted: bool) -> AttemptEnded:
    """What is known of an attempt that ended."""
    try:
        failure = msgspec.json.decode((run_dir / FAILURE_FILE).read_bytes(), type=Failure)
    except (OSError, msgspec.MsgspecError):
        failure = None
    try:
        step = last_step(run_dir / METRICS_FILE)
    except (OSError, Error):
        step = 0
    return AttemptEnded(exit_code, failure, step, is_interrupted)


def describe_restart(restart: Restart, retries: int, resume: Resume, done: int) -> str:
    """What the user is told: what was lost, where the run goes on, and what is done again.

    Args:
        done: the last step that was complete.
    """
    begin = 0 if resume.folder is None else load_manifest(resume.folder).step
    where = "the beginning" if resume.folder is None else f"the checkpoint of step {begin}"
    again = f"; steps {begin + 1} to {done} are done again" if done > begin + 1 else ""
    again = f"; step {done} is done again" if done == begin + 1 else again
    return f"restart {restart.number} of {retries}: {restart.lost}; going on from {where}{again}"

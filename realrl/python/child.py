"""The process in which `realrl.run` checks and supervises a run: ``python -m realrl.python.child``.

Its stdin is its lifeline, from which it reads the name of an experiment and settings, as `realrl.config.words` takes
them. It writes `Opened` and `Ended` back, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import msgspec

from realrl.cli import leaving_on_ctrl_c, open_closed_streams
from realrl.cli.commands import run_settings
from realrl.errors import Error
from realrl.experiment.loading import failed_in
from realrl.runtime.processes.lifeline import die_with_parent, read_framed, take_stdin

CALLED = "REALRL_CALLED"  # set in the environment of a run that Python code started


class ErrorText(msgspec.Struct, frozen=True):
    """An error as text; `kind` is the name of a class of `realrl.errors`."""

    kind: str
    message: str
    remedy: str


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The run folder is there."""

    run_dir: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The run is over; `error` says why it was refused, `run_dir` is empty if it has none."""

    exit_code: int
    run_dir: str = ""
    error: ErrorText | None = None


def main() -> int:
    """Run one job to its end, and tell the parent about it; returns the exit code."""
    lifeline = take_stdin()
    open_closed_streams()
    reference, settings = json.loads(read_framed(lifeline))
    # The run ends in order when its caller is gone: the step is finished and saved.
    leave = partial(os.kill, os.getpid(), signal.SIGTERM)
    die_with_parent(lifeline, death_signal=signal.SIGTERM, on_parent_gone=leave)
    parent = socket.socket(fileno=os.dup(lifeline))
    os.environ[CALLED] = "1"
    folders: list[str] = []

    def opened(folder: Path) -> None:
        folders.append(str(folder))
        _tell(parent, Opened(folders[-1]))

    try:
        with leaving_on_ctrl_c():
            ended = Ended(run_settings(reference, settings, opened))
    except (Exception, SystemExit) as error:
        known = error if isinstance(error, Error) else failed_in(error)
        if known is None:
            raise
        ended = Ended(known.exit_code, error=ErrorText(_kind(known), known.message, known.remedy or ""))
    _tell(parent, msgspec.structs.replace(ended, run_dir=folders[-1] if folders else ""))
    return ended.exit_code


def _tell(parent: socket.socket, message: Opened | Ended) -> None:
    try:
        parent.sendall(msgspec.json.encode(message) + b"\n")
    except OSError:  # it is gone, which the lifeline notices
        return


def _kind(error: Error) -> str:
    """Return the name of the class of `realrl.errors` that an error is of, or comes from."""
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == Error.__module__)


if __name__ == "__main__":
    sys.exit(main())

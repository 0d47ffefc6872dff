"""The errors that realrl raises on purpose.

Error
├── UsageError            exit code 2: the user can fix it, nothing was started
│   ├── ConfigError       a key, type or value in the configuration
│   ├── GraphError        an MFC list that is not a valid dataflow graph
│   ├── AllocationError   a device mesh or strategy that does not fit
│   ├── DataError         a dataset file or a sample in it
│   └── AssetError        a model, tokenizer or checkpoint on disk
└── RunError              exit code 1: something failed while running
    ├── CallError         an interface raised or returned something invalid
    ├── WorkerLostError   a worker process died or stopped answering
    ├── TransportError    a message could not be sent or understood
    ├── CheckpointError   a checkpoint could not be written or read
    └── MachinesError     exit code 75: machines are missing, and a job scheduler may try again later

InvalidTransitionError    a bug in realrl: a state machine was driven into an illegal state
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_TEXT_CHARS = 4096  # of a text that a user gives, such as a path
_MAX_LINES, _MAX_CHARS, _LEAST_CHARS = 24, 3600, 140


class Error(Exception):
    """Base of all deliberate errors: one sentence, then a remedy.

    Args:
        message: the problem in one sentence, naming the call, key or file.
        remedy: advice to the user; appended to the message.
        call: name of the call that was running.
        step: step at which it happened, from 1.
        worker: global rank of the worker concerned.
        mesh: the device mesh concerned, as text.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        call: str | None = None,
        step: int | None = None,
        worker: int | None = None,
        mesh: str | None = None,
    ) -> None:
        super().__init__(message if remedy is None else f"{message}\n  {remedy}")
        self.message = message
        self.remedy = remedy
        self.call = call
        self.step = step
        self.worker = worker
        self.mesh = mesh


class UsageError(Error):
    """The input is wrong; nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key, type or value that cannot be used."""


class GraphError(UsageError):
    """An MFC list that is not a valid dataflow graph."""


class AllocationError(UsageError):
    """A device mesh or parallel strategy that does not fit."""


class DataError(UsageError):
    """A dataset file, or a sample in it, that cannot be used."""


class AssetError(UsageError):
    """A model, tokenizer or checkpoint on disk that cannot be used."""


class RunError(Error):
    """Something failed while a run was going on."""


class CallError(RunError):
    """An interface raised, or returned a wrong key, a wrong length or NaN; `sample_ids` names the cause, if known."""

    sample_ids: tuple[str, ...] = ()


class WorkerLostError(RunError):
    """A worker process died or stopped answering."""


class TransportError(RunError):
    """A message could not be sent, received or understood."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read back."""


class MachinesError(RunError):
    """Too few machines are there. Job schedulers can be told to queue a job with this exit code again."""

    exit_code = 75  # EX_TEMPFAIL of <sysexits.h>


class InvalidTransitionError(Error):
    """A state machine received an event that its state does not allow; `story` lists the events before it."""

    def __init__(self, message: str, story: Iterable[str] = ()) -> None:
        lines = list(story)
        super().__init__(message if not lines else message + "\nstory:\n  " + "\n  ".join(lines))
        self.story = lines


def is_text(value: str) -> bool:
    """Return True if a string can be a path or a value: short enough, valid Unicode, and without NUL."""
    return len(value) <= MAX_TEXT_CHARS and "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def one_screen(text: str) -> str:
    """Return a message that fits a terminal: at most 24 lines and 4,000 characters, control characters escaped."""
    lines = text.splitlines()
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 2], "...", lines[-1]]
    printable = ["".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[:_MAX_CHARS]) for line in lines]
    limit = max(_MAX_CHARS // max(1, len(lines)), _LEAST_CHARS)
    if sum(map(len, printable)) <= _MAX_CHARS:
        limit = _MAX_CHARS
    return "\n".join(line if len(line) <= limit else f"{line[: limit - 45]} ... {line[-40:]}" for line in printable)


def counted(n: int, word: str) -> str:
    """Return a number and its noun: ``1 step``, ``2,000 steps``."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x' or 'y'?"`` for the closest of `known`, or an empty string."""
    close = difflib.get_close_matches(name[:100], [other for other in known if isinstance(other, str)], n=3, cutoff=0.5)
    if not close:
        return ""
    return " Did you mean " + " or ".join(repr(c) for c in close) + "?"

"""Every error that realrl raises on purpose.

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
    └── CheckpointError   a checkpoint could not be written or read

InvalidTransitionError    a bug in realrl: a state machine was driven into an illegal state
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Error(Exception):
    """Base of all deliberate errors: one sentence, then a remedy.

    Args:
        message: what is wrong, naming the call, key or file.
        remedy: what the user can do about it; appended to the message.
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
    """A configuration key, type or value."""


class GraphError(UsageError):
    """An MFC list that is not a valid dataflow graph."""


class AllocationError(UsageError):
    """A device mesh or parallel strategy that does not fit."""


class DataError(UsageError):
    """A dataset file, or a sample in it."""


class AssetError(UsageError):
    """A model, tokenizer or checkpoint on disk that cannot be used."""


class RunError(Error):
    """Something failed while a run was going on."""


class CallError(RunError):
    """An interface raised, or returned a wrong key, a wrong length or NaN; `sample_ids` are to blame, if known."""

    sample_ids: tuple[str, ...] = ()


class WorkerLostError(RunError):
    """A worker process died or stopped answering."""


class TransportError(RunError):
    """A message could not be sent, received or understood."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read back."""


class InvalidTransitionError(Error):
    """A state machine received an event that its state does not allow; carries the story so far."""

    def __init__(self, message: str, story: Iterable[str] = ()) -> None:
        lines = list(story)
        super().__init__(message if not lines else message + "\nstory:\n  " + "\n  ".join(lines))
        self.story = lines


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x' or 'y'?"`` for the closest of `known`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    if not close:
        return ""
    return " Did you mean " + " or ".join(repr(c) for c in close) + "?"

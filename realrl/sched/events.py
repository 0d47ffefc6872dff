"""Events, the input of the master's state machine, and instructions, its output.

Events are in the past tense: replies of workers, and observations of the shell around the machine. Instructions are
imperative. Both serialise, so the events of a failed run, written one per line, replay in a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from realrl.plan.samples.cursor import CursorState
from realrl.sched.messages import (
    CallDone,
    CheckpointSaved,
    Goodbye,
    Heartbeat,
    Hello,
    HooksDone,
    Ready,
    Request,
    RowsMoved,
    SamplesFreed,
    SamplesLoaded,
    SamplesRead,
    SavedFile,
    SavedRole,
    Span,
    WorkerFailed,
)
from realrl.sched.samples.in_flight import InFlight

# ---------------------------------------------------------------- events


class Start(msgspec.Struct, frozen=True, tag=True):
    """The shell listens and every worker process was launched. Arguments are passed on in `Initialize`."""

    run: bytes = b""
    resume_from: str = ""


class WorkerLost(msgspec.Struct, frozen=True, tag=True):
    """A worker's process ended, or its connection broke."""

    rank: int
    exit_code: int | None
    detail: str


class WorkerSilent(msgspec.Struct, frozen=True, tag=True):
    """No heartbeat of a worker arrived for `silent_s` seconds; `activity` comes from its last one."""

    rank: int
    activity: str
    silent_s: float


class Interrupted(msgspec.Struct, frozen=True, tag=True):
    """The user ends the run (Ctrl-C, SIGTERM): the step under way is finished and saved. A second such event does not
    wait for that."""

    reason: str


class CheckpointCommitted(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint of `step` is whole and in its final place."""

    step: int


class SaveIntervalPassed(msgspec.Struct, frozen=True, tag=True):
    """The time between checkpoints is over: one is wanted as soon as a step is complete."""


class CheckpointFailed(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint of `step` could not be written; `message` tells the user the reason and a remedy."""

    step: int
    message: str


Event = (
    Start
    | WorkerLost
    | WorkerSilent
    | Interrupted
    | SaveIntervalPassed
    | CheckpointCommitted
    | CheckpointFailed
    | Hello
    | Ready
    | SamplesLoaded
    | CallDone
    | RowsMoved
    | HooksDone
    | SamplesRead
    | SamplesFreed
    | CheckpointSaved
    | Goodbye
    | WorkerFailed
    | Heartbeat
)


# ---------------------------------------------------------------- instructions


class FailureKind(Enum):
    """Origin of a run's failure."""

    WORKER_FAILED = "worker_failed"  # an exception in a worker, which reported it
    WORKER_LOST = "worker_lost"  # its process was killed, crashed, or cannot be reached
    WORKER_EXITED = "worker_exited"  # its process ended itself, by an exit status
    WORKER_SILENT = "worker_silent"  # its heartbeat stopped
    BAD_OUTPUT = "bad_output"  # a worker's answer does not match its call's declaration
    CHECKPOINT = "checkpoint"
    INTERRUPTED = "interrupted"  # the user did not wait for an orderly end
    DATASET = "dataset"  # the dataset and the run's settings do not fit together
    DROPPED = "dropped"  # calls drop so many samples that a step cannot be filled
    PROTOCOL = "protocol"  # master and worker are of different versions


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The first cause of a run's end.

    Attributes:
        message: one sentence that names rank, call and step where there are any.
        remedy: advice to the user, or "".
        exit_code: the master's: 2 when the user's input is at fault, else 1.
        rank: the worker that failed.
        call, step: the worker's task at that moment.
        error: class name of the exception in the worker, or "".
        traceback: the worker's, or "".
        sample_ids: samples concerned.
        waiting_ranks: ranks that cannot go on, because a call of theirs needs `rank`.
        waiting_calls: calls in which those ranks wait.
        lost_peer: the worker failed because another one was lost.
    """

    kind: FailureKind
    message: str
    remedy: str = ""
    exit_code: int = 1
    rank: int | None = None
    call: str | None = None
    step: int | None = None
    error: str = ""
    traceback: str = ""
    sample_ids: tuple[str, ...] = ()
    waiting_ranks: tuple[int, ...] = ()
    waiting_calls: tuple[str, ...] = ()
    lost_peer: bool = False


class RankSpan(msgspec.Struct, frozen=True, gc=False):
    """A span of one rank's time."""

    rank: int
    span: Span


class Send(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Send `request` to the worker `rank`."""

    rank: int
    request: Request


class ReportStart(msgspec.Struct, frozen=True, tag=True):
    """Every worker is ready and the length of the run is known: steps `first_step` to `last_step`, inclusive."""

    first_step: int
    last_step: int
    n_rows: int
    n_dropped: int
    notes: tuple[str, ...]


class ReportStep(msgspec.Struct, frozen=True, tag=True):
    """All calls of a step are done. `spans` arrived since the previous report."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    spans: tuple[RankSpan, ...]


class SampleContents(msgspec.Struct, frozen=True):
    """Contents of one sample, read back from the workers.

    Attributes:
        versions: call that produced a key of the sample -> version of the role that the call read.
        columns: name -> this sample's entries, as in `SamplesRead`.
        notes: name -> one number per sequence, as in `CallDone`.
        row: JSON object of the other fields of the dataset's row, if they were read.
    """

    id: str
    versions: Mapping[str, int]
    columns: Mapping[str, tuple[float | bool | str, ...]]
    notes: Mapping[str, tuple[float, ...]] = {}
    row: str = "{}"


class ReportSamples(msgspec.Struct, frozen=True, tag=True):
    """The contents of a step's samples have arrived; `samples` are in the order of the step."""

    step: int
    epoch: int
    samples: tuple[SampleContents, ...]


class BeginEvaluation(msgspec.Struct, frozen=True, tag=True):
    """The parameters as they are after `step` are being evaluated on `n_samples` samples."""

    step: int
    n_samples: int


class ReportEvaluation(msgspec.Struct, frozen=True, tag=True):
    """An evaluation that belongs to no step's report: before the first step, or without training."""

    step: int
    metrics: Mapping[str, float]


class AnnounceStop(msgspec.Struct, frozen=True, tag=True):
    """The run was interrupted: it ends when `step`, and an evaluation that is due after it, is finished and saved."""

    step: int


class OpenCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Make an empty `directory`: the ranks are about to write the checkpoint of `step` there."""

    step: int
    directory: str


class CommitCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Every rank saved: move `directory` to its final place and report the outcome.

    Attributes:
        cursor: loader position after `step`.
        versions: role -> train_step calls that the saved parameters have been through.
        in_flight: work already done for later steps.
        files: rank -> path inside the checkpoint -> file that it wrote.
        roles: role -> layout and digests of its saved state.
        is_last: no step of the run is left.
    """

    step: int
    directory: str
    cursor: CursorState
    versions: Mapping[str, int]
    in_flight: InFlight = InFlight()
    files: Mapping[int, Mapping[str, SavedFile]] = {}
    roles: Mapping[str, SavedRole] = {}
    is_last: bool = False


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Every worker has left: end with exit code 0, or as interrupted when `interrupted` gives a reason."""

    interrupted: str = ""
    spans: tuple[RankSpan, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop every worker at once, show `failure` first, end with its exit code."""

    failure: Failure
    spans: tuple[RankSpan, ...] = ()


Instruction = (
    Send
    | ReportStart
    | ReportStep
    | ReportSamples
    | BeginEvaluation
    | ReportEvaluation
    | AnnounceStop
    | OpenCheckpoint
    | CommitCheckpoint
    | Finish
    | Abort
)


# ---------------------------------------------------------------- event log

_ENCODER = msgspec.json.Encoder()
_EVENT_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode(item: Event | Instruction) -> bytes:
    """Return one event or instruction as one line of JSON, without the line break."""
    return _ENCODER.encode(item)


def decode_event(line: bytes) -> Event:
    """Return the event that `encode` wrote.

    Raises:
        msgspec.ValidationError: the line is no event.
    """
    return _EVENT_DECODER.decode(line)

"""Messages between the master and its workers: sample metadata, requests, replies.

All are msgspec structs: they travel over any transport, and a log of them replays a run in a test. Requests to one
worker carry `seq`, numbered from 0 without gaps, and are executed in that order; a reply repeats the `seq` it answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal

import msgspec

from realrl.plan.samples.transfer import RowTransfer

PROTOCOL_VERSION = 11

HookTime = Literal["ahead of", "before", "after"]
"""Side of a call on which hooks run; ahead of it, its parameters set out while other calls compute."""

Joins = Literal["", "opens", "closes"]
"""Place of a call in a pair that runs together; empty: the call runs by itself."""


class Per(Enum):
    """Owner of one row of a key's data; L is the sequence's number of tokens."""

    TOKEN = "token"  # L rows per sequence
    TRANSITION = "transition"  # L - 1 rows per sequence: row t is about predicting token t + 1
    SEQUENCE = "sequence"  # 1 row per sequence
    SAMPLE = "sample"  # 1 row per sample


class KeySchema(msgspec.Struct, frozen=True):
    """dtype (a torch name such as "int64") and granularity of one key; `trailing` is the shape of one row."""

    dtype: str
    per: Per
    trailing: tuple[int, ...] = ()


class SampleMeta(msgspec.Struct, frozen=True):
    """A batch without its tensors.

    Attributes:
        ids: stable sample ids, unique among living samples.
        schemas: key -> schema.
        seqlens: key -> per sample -> per sequence -> rows of that key's packed data.
    """

    ids: tuple[str, ...]
    schemas: Mapping[str, KeySchema]
    seqlens: Mapping[str, tuple[tuple[int, ...], ...]]


# ---------------------------------------------------------------- requests, master -> worker


class Initialize(msgspec.Struct, frozen=True, tag=True):
    """Build process groups, roles and (on the dataset rank) the dataset from the resolved run.

    Attributes:
        run: the resolved run as JSON (`RunConfig`, experiment reference).
        peers: data-server address of every rank, by rank; empty where no transfer can happen.
        resume_from: checkpoint folder to continue from, or "".
    """

    seq: int
    run: bytes
    peers: tuple[str, ...]
    resume_from: str = ""


class LoadSamples(msgspec.Struct, frozen=True, tag=True):
    """Materialise dataset rows as samples in the worker's store: row `rows[i]` becomes sample `ids[i]`.

    With `is_held_out` the rows are those of the validation data.
    """

    seq: int
    ids: tuple[str, ...]
    rows: tuple[int, ...]
    is_held_out: bool = False


class RunCall(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Run this rank's part of one call.

    Attributes:
        dispatch_id: unique number of the dispatch; the same on all ranks of the mesh.
        step: step, counted from 1.
        minibatches: this rank's sample ids, one tuple per minibatch and pass (one only, unless the call trains).
        transfers: rows this rank must pull first (its own id is every transfer's `target`); empty where rows move by
            collectives, since `MoveRows` has brought them then.
        spreads: rows that this rank passes on to others of its replica, or gets from one of them, once `transfers` are
            done; by point-to-point collectives, in either plane.
        n_steps: steps of the whole run; learning-rate schedules end there.
        keeps: samples whose output this rank must store and report; it drops its output for others. Together the
        ranks of a dispatch keep every sample once; empty for a train_step. A call that may drop samples reports
        fewer: a sample that no rank reports is dropped.
        keeps_parameters: parameters that hooks brought stay for the call's next dispatch, which gets no such hooks.
        joins: a call that opens a pair runs when the one that closes it comes, which is the rank's next request. Both
            are answered then.
        idle_ranks: ranks of the mesh that got no sample, and so do not enter the interface.
    """

    seq: int
    dispatch_id: int
    call: str
    step: int
    minibatches: tuple[tuple[str, ...], ...]
    transfers: tuple[RowTransfer, ...]
    n_steps: int = 0
    keeps: tuple[str, ...] = ()
    spreads: tuple[RowTransfer, ...] = ()
    keeps_parameters: bool = False
    joins: Joins = ""
    idle_ranks: tuple[int, ...] = ()


class MoveRows(msgspec.Struct, frozen=True, tag=True):
    """Send and receive the rows that one dispatch needs, by point-to-point collectives; only in the collective plane.

    Goes to every rank that sends or receives rows for the dispatch, in the call's mesh or not, ahead of its `RunCall`.
    It is apart from `RunCall` so that rows for one call need not wait for another call to end.

    Attributes:
        sends: rows that leave this rank (its own id is every transfer's `source`).
        receives: rows that arrive at this rank (its own id is every transfer's `target`).
    """

    seq: int
    dispatch_id: int
    call: str
    step: int
    sends: tuple[RowTransfer, ...]
    receives: tuple[RowTransfer, ...]


class RunHooks(msgspec.Struct, frozen=True, tag=True):
    """Take part in the hooks around one dispatch of a call: move parameters, or offload them.

    Goes to every rank that one of these hooks concerns, in the call's mesh or not. Every rank knows the hooks from
    ``plan_hooks(...)[call]`` of `realrl.plan.hooks`: its `before` or `after`, in order, as far as their `ranks` contain
    this rank.

    Ahead of a call, a rank begins what the call's parameters need, and does not wait for its end: they set out for the
    call's layout, which is the only hook before it, or return from host memory. `dispatch_id` is then the number of a
    dispatch that is still to come.
    """

    seq: int
    dispatch_id: int
    call: str
    step: int
    when: HookTime


class ReadSamples(msgspec.Struct, frozen=True, tag=True):
    """Return the text and the single numbers of samples: the only contents that ever leave the workers' stores.

    Goes to ranks that hold the rows, before they are asked to free them.

    Attributes:
        step: the samples' step.
        texts: prefix of keys -> samples; `<prefix>input_ids` is decoded, split by `<prefix>prompt_mask`.
        roles: prefix of keys -> role whose tokenizer decodes.
        keys: keys with one number per sequence or per sample -> samples.
        rows: samples whose other fields of the dataset's row are read too.
    """

    seq: int
    step: int
    texts: Mapping[str, tuple[str, ...]]
    roles: Mapping[str, str]
    keys: Mapping[str, tuple[str, ...]]
    rows: tuple[str, ...] = ()


class FreeSamples(msgspec.Struct, frozen=True, tag=True):
    """Drop the samples: every reader is done."""

    seq: int
    ids: tuple[str, ...]


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's share of a checkpoint to host memory, and write it beside the requests that follow.

    Its answer comes when the files are on disk, and so, alone among requests, may come after answers to later requests.

    Attributes:
        directory: a temporary folder, which the master renames.
        rows: key -> samples of later steps whose rows belong to the checkpoint too.
        is_last: no step of the run is left, so that nothing changes the state while it is written.
        waits: the rank executes no other request before its files are written, which spares the copy of what is in host
            memory.
    """

    seq: int
    step: int
    directory: str
    rows: Mapping[str, tuple[str, ...]] = {}
    is_last: bool = False
    waits: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave the process groups and exit."""

    seq: int


Request = (
    Initialize | LoadSamples | RunCall | MoveRows | RunHooks | ReadSamples | FreeSamples | SaveCheckpoint | Shutdown
)


# ---------------------------------------------------------------- replies, worker -> master


class Span(msgspec.Struct, frozen=True):
    """A stretch of one worker's time for the trace; seconds since the epoch of the host's clock."""

    name: str
    kind: str  # "call" | "transfer" | "realloc" | "travel" | "offload" | "wait" | "load" | "read" | "save" | "init",
    # "phase" of a call, "reward" of a process beside the worker
    start_s: float
    end_s: float
    args: Mapping[str, str | int | float] = {}


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a worker: it runs and listens."""

    rank: int
    pid: int
    data_address: str  # where its samples can be pulled from, or ""
    protocol_version: int = PROTOCOL_VERSION


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Initialize is done.

    The dataset rank alone fills `row_ids` (usable rows of the dataset), `held_out_ids` (those of the validation data)
    and `content` (a digest of the rows' data).
    """

    rank: int
    seq: int
    row_ids: tuple[str, ...]
    n_dropped: int
    notes: tuple[str, ...]  # for the user, e.g. "3 of 512 prompts longer than 128 tokens were dropped"
    spans: tuple[Span, ...] = ()
    held_out_ids: tuple[str, ...] = ()
    content: str = ""


class SamplesLoaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to `LoadSamples`. `restored` names keys of samples that came from a checkpoint, not the dataset."""

    rank: int
    seq: int
    meta: SampleMeta
    spans: tuple[Span, ...] = ()
    restored: tuple[SampleMeta, ...] = ()


class CallDone(msgspec.Struct, frozen=True, tag=True):
    """This rank finished its part. `output` is empty (None) on ranks that keep no output and for train_step.

    `metrics` are already reduced over the mesh: all ranks report the same numbers. `sums` (name -> total and count) and
    `maxima` are of this rank's samples alone; ranks that hold the same samples report the same. `bytes_received` counts
    rows. `waited_s` is how long the call waited for parameters that came back from host memory. `notes` are numbers of
    responses for the file of responses: name -> sample -> one per sequence.
    """

    rank: int
    seq: int
    dispatch_id: int
    call: str
    step: int
    output: SampleMeta | None
    metrics: Mapping[str, float]
    spans: tuple[Span, ...]
    bytes_received: int = 0
    memory_gb: float = 0.0
    sums: Mapping[str, tuple[float, float]] = {}
    maxima: Mapping[str, float] = {}
    waited_s: float = 0.0
    notes: Mapping[str, Mapping[str, tuple[float, ...]]] = {}


class RowsMoved(msgspec.Struct, frozen=True, tag=True):
    """The answer to `MoveRows`."""

    rank: int
    seq: int
    dispatch_id: int
    call: str
    step: int
    spans: tuple[Span, ...] = ()
    bytes_received: int = 0


class HooksDone(msgspec.Struct, frozen=True, tag=True):
    """The answer to `RunHooks`.

    `bytes_received` counts parameters that came from other ranks, `waited_s` how long the rank was busy with the hooks.
    """

    rank: int
    seq: int
    dispatch_id: int
    call: str
    step: int
    when: HookTime
    spans: tuple[Span, ...] = ()
    bytes_received: int = 0
    memory_gb: float = 0.0
    waited_s: float = 0.0


class SamplesRead(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReadSamples`.

    Attributes:
        columns: name -> sample -> one entry per sequence, or one in all for a key of the sample. Names are the
            keys asked for, and for each prefix ``<prefix>prompt`` and ``<prefix>response`` (text, without special
            tokens), ``<prefix>prompt_tokens`` and ``<prefix>response_tokens`` (numbers of tokens that were given and
            generated). Where something was put in between generated tokens, ``<prefix>turns`` (JSON) tells all texts
            after the prompt, each with true if it was given.
        rows: sample -> JSON object of the other fields of its row.
    """

    rank: int
    seq: int
    step: int
    columns: Mapping[str, Mapping[str, tuple[float | bool | str, ...]]]
    spans: tuple[Span, ...] = ()
    rows: Mapping[str, str] = {}


class SamplesFreed(msgspec.Struct, frozen=True, tag=True):
    rank: int
    seq: int


class SavedFile(msgspec.Struct, frozen=True):
    """Size and digest (SHA-256, hexadecimal) of a file."""

    size_bytes: int
    sha256: str


class SavedRole(msgspec.Struct, frozen=True):
    """Layout and digests of a saved role.

    Attributes:
        dp, tp, pp: degrees of the layout; each (pp, tp) coordinate has a file of optimizer state.
        model: digest of the names and shapes of its parameters.
        given: digest of parameters that the checkpoint needs but lacks: a frozen role's, or those below adapters.
        vpp: virtual stages of each pipeline stage.
    """

    dp: int
    tp: int
    pp: int
    model: str
    given: str = ""
    vpp: int = 1


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """The answer to `SaveCheckpoint`: this rank's share is on disk.

    Attributes:
        files: path inside the checkpoint -> file.
        roles: role -> layout and digests, for the roles that this rank speaks for.
    """

    rank: int
    seq: int
    step: int
    spans: tuple[Span, ...] = ()
    files: Mapping[str, SavedFile] = {}
    roles: Mapping[str, SavedRole] = {}


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """Shutdown is done; the worker exits."""

    rank: int
    seq: int


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The request could not be completed; the worker executes nothing more but Shutdown.

    Attributes:
        error: class name of the exception.
        needs_peers: the failed operation involves other workers, so the death of one of them may be the cause.
        lost_peer: another worker left a group or did not answer, or the connection to it broke.
    """

    rank: int
    seq: int
    call: str | None
    step: int | None
    error: str
    message: str
    traceback: str
    exit_code: int
    sample_ids: tuple[str, ...] = ()
    needs_peers: bool = False
    lost_peer: bool = False


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent at a fixed interval by a thread beside the computation."""

    rank: int
    seq: int  # request being executed, or -1
    activity: str  # "idle", or the worker's task: "actor_gen", "transfer for actor_train", ...
    busy_s: float


Reply = (
    Hello
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

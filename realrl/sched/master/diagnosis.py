"""Failures from the events that end a run: the worker, its call and step, and the ranks that wait for it."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from realrl.errors import CallError, CheckpointError, UsageError
from realrl.sched.events import Failure, FailureKind, WorkerLost, WorkerSilent
from realrl.sched.messages import (
    PROTOCOL_VERSION,
    FreeSamples,
    Hello,
    Initialize,
    LoadSamples,
    MoveRows,
    ReadSamples,
    Request,
    RunCall,
    RunHooks,
    SaveCheckpoint,
    Shutdown,
    WorkerFailed,
)
from realrl.sched.track.dispatch import Dispatch

SILENCE_REMEDY = "Its node may be overloaded or swapping. If that is normal here, raise cluster.worker_timeout_s."


def describe_request(request: Request | None) -> str:
    """Return the activity of a worker with this oldest open request, to follow "worker 3 died ..."."""
    match request:
        case RunCall(call=call, step=step):
            return f"in call '{call}' of step {step}"
        case MoveRows(call=call, step=step):
            return f"while moving rows for call '{call}' of step {step}"
        case RunHooks(call=call, step=step, when=when):
            return f"in the hooks {when} call '{call}' of step {step}"
        case SaveCheckpoint(step=step):
            return f"while saving the checkpoint of step {step}"
        case Initialize():
            return "while it was starting up"
        case LoadSamples():
            return "while loading samples"
        case ReadSamples(step=step):
            return f"while reading out samples of step {step}"
        case FreeSamples():
            return "while freeing samples"
        case Shutdown():
            return "while shutting down"
        case _:
            return "while it was idle"


def waiting_for(rank: int, dispatches: Iterable[Dispatch]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ranks that cannot finish their parts unless `rank` goes on, and the calls in which they wait.

    Ranks execute the parts of dispatches in one order, so a rank that shares an unfinished part with a stuck rank is
    stuck in it too, and so on for later parts.
    """
    stuck, calls = {rank}, []
    parts = [(part, dispatch.call.name) for dispatch in dispatches for part in dispatch.parts.values()]
    for part, name in sorted(parts, key=lambda entry: entry[0].position):
        if not stuck.isdisjoint(part.pending):
            if len(part.pending) > 1:
                calls.append(name)
            stuck |= part.pending
    return tuple(sorted(stuck - {rank})), tuple(dict.fromkeys(calls))


def worker_failed(reply: WorkerFailed, dispatches: Iterable[Dispatch], request: Request | None) -> Failure:
    """Return the failure of a worker that reported an exception."""
    where = f"in call '{reply.call}'" if reply.call is not None else describe_request(request)
    if reply.call is not None and reply.step is not None:
        where += f" of step {reply.step}"
    if reply.exit_code == UsageError.exit_code:
        message = reply.message
    elif reply.error in (CallError.__name__, CheckpointError.__name__):  # they name role, call and step themselves
        message = f"worker {reply.rank}: {reply.message}"
    else:
        message = f"worker {reply.rank} failed {where}: {reply.error}: {reply.message}"
    ranks, calls = waiting_for(reply.rank, dispatches)
    return Failure(
        kind=FailureKind.WORKER_FAILED,
        message=message,
        exit_code=reply.exit_code or 1,
        rank=reply.rank,
        call=reply.call,
        step=reply.step,
        error=reply.error,
        traceback=reply.traceback,
        sample_ids=reply.sample_ids,
        waiting_ranks=ranks,
        waiting_calls=calls,
        lost_peer=reply.lost_peer,
    )


def never_appeared(event: WorkerLost | WorkerSilent) -> Failure:
    """Return the failure of a worker that ended, or fell silent, before it said Hello."""
    if isinstance(event, WorkerSilent):
        return _gone(
            FailureKind.WORKER_SILENT, f"worker {event.rank} did not start within {event.silent_s:.0f} s", event
        )
    return _gone(_kind_of(event), f"worker {event.rank} ended{_how(event)} while it was starting up", event)


def worker_lost(event: WorkerLost, dispatches: Iterable[Dispatch], request: Request | None) -> Failure:
    """Return the failure of a worker whose process is gone."""
    message = f"worker {event.rank} ended{_how(event)} {describe_request(request)}"
    return _gone(_kind_of(event), message, event, dispatches, request)


def worker_silent(event: WorkerSilent, dispatches: Iterable[Dispatch], request: Request | None) -> Failure:
    """Return the failure of a worker whose heartbeat stopped."""
    doing = f"; it last said: {event.activity}" if event.activity else ""
    message = f"worker {event.rank} gave no sign of life for {event.silent_s:.0f} s {describe_request(request)}{doing}"
    return _gone(FailureKind.WORKER_SILENT, message, event, dispatches, request)


def _kind_of(event: WorkerLost) -> FailureKind:
    is_exit = event.exit_code is not None and event.exit_code >= 0
    return FailureKind.WORKER_EXITED if is_exit else FailureKind.WORKER_LOST


def unusable_dataset(err: UsageError) -> Failure:
    """Return the failure of a run that its dataset cannot feed."""
    return Failure(
        kind=FailureKind.DATASET, message=err.message, remedy=err.remedy or "", exit_code=2, error=type(err).__name__
    )


def wrong_version(hello: Hello) -> Failure:
    """Return the failure of a worker of another version of realrl."""
    return Failure(
        kind=FailureKind.PROTOCOL,
        message=f"worker {hello.rank} speaks protocol version {hello.protocol_version}, the master {PROTOCOL_VERSION}",
        remedy="install the same version of realrl on every node",
        rank=hello.rank,
    )


def _gone(
    kind: FailureKind,
    message: str,
    event: WorkerLost | WorkerSilent,
    dispatches: Iterable[Dispatch] = (),
    request: Request | None = None,
) -> Failure:
    ranks, calls = waiting_for(event.rank, dispatches)
    return Failure(
        kind=kind,
        message=message,
        remedy=death_remedy(event.exit_code) if isinstance(event, WorkerLost) else SILENCE_REMEDY,
        rank=event.rank,
        call=request.call if isinstance(request, RunCall | MoveRows | RunHooks) else None,
        step=request.step if isinstance(request, RunCall | MoveRows | RunHooks | SaveCheckpoint) else None,
        waiting_ranks=ranks,
        waiting_calls=calls,
    )


def death_remedy(exit_code: int | None) -> str:
    """Return advice about a process that ended with this code; a negative code is a signal, None is unknown."""
    if exit_code == -signal.SIGKILL:
        return "Was the machine out of memory? `dmesg | tail` tells; smaller n_seqs or more n_mbs need less."
    if exit_code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGABRT):
        return "A native library crashed; the stack of each thread is in the log."
    if exit_code == -signal.SIGTERM:
        return "Someone or some job scheduler ended it."
    if exit_code is not None and exit_code >= 0:
        return "Code in it ended the process (`os._exit`, a library's exit): its log tells what it did last."
    return "Its log tells what it did last."


def _how(event: WorkerLost) -> str:
    """Return the manner of a process's end, to follow "worker 3 ended"."""
    if event.detail:
        return f" ({event.detail})"
    if event.exit_code is None:
        return ""
    return f" with signal {-event.exit_code}" if event.exit_code < 0 else f" with exit code {event.exit_code}"

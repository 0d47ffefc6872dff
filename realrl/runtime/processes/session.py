"""The session of a `MasterWorker`: its parts, and the exit codes of errors and signals.

`run_session` is the only entry, for the master process of ``launcher=local`` and for ``launcher=inline`` alike.
Whatever happens, the workers are stopped and every file is closed before it returns.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import platform
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from realrl.errors import Error, TransportError, UsageError
from realrl.plan.hooks import NO_OVERLAP, Overlap
from realrl.runtime.launchers.base import Launcher
from realrl.runtime.launchers.inline import InlineLauncher
from realrl.runtime.launchers.local import DEFAULT_HOST, LocalLauncher
from realrl.runtime.launchers.nodes import NodesLauncher, NodesStart, mark_of
from realrl.runtime.output import failure_report as report
from realrl.runtime.output.logged_progress import LoggedProgress
from realrl.runtime.output.logs import log_path, logging_to
from realrl.runtime.output.metrics import MetricsSink, open_sinks
from realrl.runtime.output.progress import Progress, make_progress
from realrl.runtime.output.trace import FILE_NAME as TRACE_FILE
from realrl.runtime.output.trace import TraceWriter
from realrl.runtime.processes.lifeline import framed, socket_folder
from realrl.runtime.processes.signals import SignalReceived, Signals, interrupted_exit_code
from realrl.runtime.transport.base import MasterTransport
from realrl.runtime.transport.inproc import InprocKeyValues, InprocMaster
from realrl.runtime.transport.sockets import Admission, RunKeys, endpoint_beside
from realrl.runtime.transport.zmq import ZmqKeyValueServer, ZmqMaster
from realrl.runtime.worker.heartbeat import HEARTBEAT_INTERVAL_S

DEFAULT_PROGRAM = "realrl.runtime.master.master_worker:run_master"

_log = logging.getLogger(__name__)


class SessionStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start message of the master process; the supervisor sends it through the master's stdin.

    Attributes:
        run: the resolved run, as `Initialize.run` carries it.
        run_dir: absolute path of the run folder.
        run_id: mark in the environment of the run's processes.
        track: extra metric sinks: "tensorboard", "wandb".
        show: further metrics of each step that the display shows.
        port: port of the master on loopback; 0 takes a socket file, which only the run's user can reach.
        program: dotted path of ``program(session) -> exit code``.
        host: dotted path of the factory of each worker's host.
        resume_from: the verified checkpoint to continue from; empty for the first step.
        notes: messages for the user before the run begins.
        overlap: parameters that come early, or stay.
        environments: environment variables of each worker, beside those that it inherits; none where it is empty.
        n_threads: see `Manifest`.
        nodes: machines on which agents start the workers; None starts them on this one.
        restarts_left: number of times that the run starts again after lost processes, at most.
        heartbeat_s: seconds between two heartbeats of a worker.
    """

    run: bytes
    run_dir: str
    run_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    track: tuple[str, ...] = ()
    show: tuple[str, ...] = ()
    port: int = 0
    program: str = DEFAULT_PROGRAM
    host: str = DEFAULT_HOST
    resume_from: str = ""
    overlap: Overlap = NO_OVERLAP
    notes: tuple[str, ...] = ()
    environments: tuple[dict[str, str], ...] = ()
    n_threads: int = 0
    nodes: NodesStart | None = None
    restarts_left: int = 0
    heartbeat_s: float = HEARTBEAT_INTERVAL_S


@dataclass(frozen=True)
class Session:
    """Argument of a master program.

    Attributes:
        admission: argument of `launcher.start`.
        resume_from, overlap, restarts_left, n_threads: see `SessionStart`.
        beat: tells the supervisor that the master lives; to be called several times a second.
        signals: what the user sent to end the run.
    """

    run: bytes
    run_dir: Path
    transport: MasterTransport
    launcher: Launcher
    admission: bytes
    progress: Progress
    metrics: MetricsSink
    trace: TraceWriter
    resume_from: str = ""
    overlap: Overlap = NO_OVERLAP
    beat: Callable[[], None] = lambda: None
    signals: Signals = field(default_factory=Signals)
    restarts_left: int = 0
    n_threads: int = 0


def run_session(start: SessionStart, *, inline: bool, beat: Callable[[], None] = lambda: None) -> int:
    """Run `start.program` to its end and return the exit code of the run.

    Takes over signals for good (see `Signals`), so it belongs in the main thread.

    Args:
        inline: run the workers in this thread instead of starting processes.
        beat: see `Session`.
    """
    run_dir = Path(start.run_dir)
    log = log_path(run_dir, None)
    with contextlib.ExitStack() as stack:
        progress = LoggedProgress(make_progress(live=False if inline else None, shown=start.show), start.show)
        stack.callback(progress.close)
        signals = Signals(counts=inline)
        try:
            signals.catch()  # a signal that was held back until now is raised here
            stack.enter_context(_open_log(log))
            _log.info("Python %s, torch %s, process %d", platform.python_version(), version("torch"), os.getpid())
            with _open_session(start, inline=inline, progress=progress, beat=beat, signals=signals) as session:
                for note in start.notes:
                    progress.phase(note)
                try:
                    program: Callable[[Session], int] = load_dotted(start.program)
                    return program(session)
                finally:
                    signals.ignore()
        except (SignalReceived, KeyboardInterrupt) as interrupt:
            signum = interrupt.signum if isinstance(interrupt, SignalReceived) else signal.SIGINT
            progress.failed(f"realrl: {SignalReceived(signum)}: everything was stopped")
            return interrupted_exit_code(signum, is_on_machines=start.nodes is not None)
        except Error as error:
            if error.exit_code != UsageError.exit_code:
                _log.exception("the run failed")
            progress.failed(report.render(report.from_error(error, log=log)))
            return error.exit_code
        except Exception as error:  # noqa: BLE001 - a bug: the user gets a report, and the exit code
            _log.exception("the run failed")
            progress.failed(report.render(report.from_bug(error, log=log)))
            return 1


@contextlib.contextmanager
def _open_log(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(logging_to(path))
        except OSError as error:
            raise UsageError(
                f"cannot write to the run folder {path.parent.parent}: {error.strerror}",
                remedy="Choose another folder with run_dir=..., or free some space.",
            ) from error
        yield


@contextlib.contextmanager
def _open_session(
    start: SessionStart, *, inline: bool, progress: Progress, beat: Callable[[], None], signals: Signals
) -> Iterator[Session]:
    run_dir = Path(start.run_dir)
    with contextlib.ExitStack() as stack:
        metrics = open_sinks(run_dir, start.track)
        stack.callback(metrics.close)
        trace = TraceWriter(run_dir / TRACE_FILE)
        stack.callback(trace.close)
        transport: InprocMaster | ZmqMaster
        launcher: Launcher
        if inline:
            transport, admission = InprocMaster(), b""
            meeting = InprocKeyValues()
            launcher = InlineLauncher(transport, lambda: partial(load_dotted(start.host), meeting=meeting))
        else:
            keys, nodes = RunKeys.new(), start.nodes
            endpoint = f"tcp://127.0.0.1:{start.port}"
            if nodes is not None:
                keys = RunKeys.derived(nodes.key, mark_of(start.run_id, nodes.attempt))
                endpoint = f"tcp://{nodes.host}:*"
            elif not start.port:
                endpoint = f"ipc://{stack.enter_context(_open_folder(socket_folder(start.run_id)))}/master"
            transport = ZmqMaster(keys, endpoint=endpoint)
            store = ZmqKeyValueServer(keys, endpoint=endpoint_beside(transport.address, "key-values"))
            stack.callback(store.close)
            admitted = Admission(transport.address, store.address, keys.for_workers, heartbeat_s=start.heartbeat_s)
            admission = msgspec.msgpack.encode(admitted)
            if nodes is None:
                launcher = LocalLauncher(run_dir, start.run_id, host=start.host, environments=start.environments)
            else:
                launcher = NodesLauncher(
                    run_dir,
                    nodes,
                    marks=(mark_of(start.run_id, nodes.attempt), mark_of(start.run_id, nodes.attempt - 1)),
                    host=start.host,
                    tell=progress.phase,
                    beat=beat,
                    reclaim=signals.note,
                )
        stack.callback(transport.close)
        stack.callback(launcher.stop)
        yield Session(
            start.run,
            run_dir,
            transport,
            launcher,
            admission,
            progress,
            metrics,
            trace,
            resume_from=start.resume_from,
            overlap=start.overlap,
            beat=beat,
            signals=signals,
            restarts_left=start.restarts_left,
            n_threads=start.n_threads,
        )


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[Path]:
    """Make a folder that no other user can enter, for as long as the context lasts."""
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder of the run's sockets, {path}: {error.strerror}",
            remedy="Name another folder for temporary files with TMPDIR=PATH, or set cluster.master_port.",
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def encode_start(start: SessionStart) -> bytes:
    """Msgpack behind its length, for the master's stdin."""
    return framed(msgspec.msgpack.encode(start))


def decode_start(data: bytes) -> SessionStart:
    """Parse the message after the length prefix. Raises `TransportError` if it is no `SessionStart`."""
    try:
        return msgspec.msgpack.decode(data, type=SessionStart)
    except msgspec.MsgspecError as error:
        raise TransportError(f"the master received a malformed start message: {error}") from error


def load_dotted(path: str) -> Callable[..., Any]:
    """Import ``package.module:name``. Raises `UsageError` when there is no such thing."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
        factory: Callable[..., Any] = getattr(module, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot load {path!r}: {error}", remedy="Write it as package.module:name.") from error
    return factory

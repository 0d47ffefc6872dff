"""Entry points of a run's processes: ``python -m realrl.runtime.processes.main master`` and ``... worker --rank R``.

Nothing here imports torch: the master has none, and a worker imports it when it makes its host, with heartbeats
already going out.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from realrl.runtime.launchers.local import STACK_SIGNAL
from realrl.runtime.output.logs import logging_to
from realrl.runtime.processes.lifeline import RUN_ID, die_with_parent, kill_leftovers, read_framed, take_stdin
from realrl.runtime.processes.session import decode_start, load_dotted, run_session
from realrl.runtime.processes.signals import ORPHANED, ignore_from_now_on
from realrl.runtime.transport.base import WorkerTransport
from realrl.runtime.transport.sockets import Admission, ConnectionBrokenError, endpoint_beside
from realrl.runtime.transport.zmq import ZmqKeyValueClient, ZmqSampleClient, ZmqSampleServer, ZmqWorker
from realrl.runtime.worker.heartbeat import heartbeats
from realrl.runtime.worker.loop import HostFactory, WorkerLoop
from realrl.sched.messages import Hello, Reply, Request

_RECEIVE_TIMEOUT_S = 1.0
_ORPHAN_GRACE_S = 10.0

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one process of a run; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m realrl.runtime.processes.main", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("master", help="reads its start message from stdin")
    worker = kinds.add_parser("worker", help="reads its admission to the run from stdin")
    worker.add_argument("--rank", type=int, required=True, help="global rank")
    worker.add_argument("--host", required=True, help="what the worker hosts, as package.module:factory")
    options = parser.parse_args(arguments)
    if options.kind == "master":
        return master_main()
    return worker_main(options.rank, options.host)


def master_main() -> int:
    """The master process: no accelerator, no torch; ends in order on a signal or when its supervisor is gone."""
    lifeline = take_stdin()
    start = decode_start(read_framed(lifeline))
    # SIGCONT wakes a stopped master, whose thread then finds that its supervisor is gone.
    die_with_parent(lifeline, death_signal=signal.SIGCONT, on_parent_gone=partial(_stop_orphaned_master, start.run_id))
    try:
        return run_session(start, inline=False, beat=partial(_beat, socket.socket(fileno=os.dup(lifeline))))
    finally:
        ignore_from_now_on()


def worker_main(rank: int, host: str) -> int:
    """A worker process: receives, executes and replies until its goodbye; killed as soon as its master is gone."""
    lifeline = take_stdin()
    admission = msgspec.msgpack.decode(read_framed(lifeline), type=Admission)
    die_with_parent(
        lifeline,
        death_signal=signal.SIGKILL,
        on_parent_gone=_kill_own_group,
        lease_end_s=admission.lease_end_s,
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the master decides what a Ctrl-C means
    outlive_sigterm()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)
    meeting = ZmqKeyValueClient(admission.key_values, admission.keys)
    with logging_to(None):
        try:
            run_worker(rank, admission, lambda: partial(load_dotted(host), meeting=meeting))
        except ConnectionBrokenError:  # a loss from which the run recovers, and no exit of its own
            _log.exception("this worker ends")
            _kill_own_group()
    meeting.close()
    return 0


def run_worker(rank: int, admission: Admission, make_host: Callable[[], HostFactory]) -> None:
    """Serve a host until its goodbye, in this process and thread; heartbeats go out from another one."""
    address, keys = admission.master, admission.keys
    client = ZmqSampleClient(keys)
    transport = ZmqWorker(address, rank, keys)
    send = partial(_send_or_end, transport)
    loop = WorkerLoop(rank, client, make_host, post=send)
    beside = f"tcp://{admission.host}:*" if admission.host else endpoint_beside(address, f"samples-{rank}")
    server = ZmqSampleServer(loop.fetch, keys, endpoint=beside)
    transport.send(Hello(rank, os.getpid(), server.address))
    try:
        with heartbeats(loop.heartbeat, send, interval_s=admission.heartbeat_s):
            _serve(loop, transport)
    finally:
        for part in (server, client, transport):
            part.close()


def _send_or_end(transport: WorkerTransport, reply: Reply) -> None:
    """Send from a thread beside the main one, which may be busy for long; without a connection the worker ends."""
    try:
        transport.send(reply)
    except ConnectionBrokenError:
        _log.exception("this worker ends")
        _kill_own_group()


def _serve(loop: WorkerLoop, transport: WorkerTransport) -> None:
    while not loop.finished:
        request = transport.receive(_RECEIVE_TIMEOUT_S)
        if request is not None:
            _execute(loop, transport, request)


def _execute(loop: WorkerLoop, transport: WorkerTransport, request: Request) -> None:
    replies = loop.execute(request)
    try:
        for reply in replies:
            transport.send(reply)
    except Exception as error:  # noqa: BLE001 - the master must hear of it, or it would wait in vain
        _log.exception("cannot send the reply to request %d", request.seq)
        transport.send(loop.failure(request, error))


def outlive_sigterm() -> None:
    """Leave SIGTERM to the master, which finishes its step: job schedulers send it to every process of a run.

    Children do not inherit that: whoever starts them may rely on ending them so.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which programs that are started would inherit
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _beat(supervisor: socket.socket) -> None:
    """Tell the supervisor that the master lives; one that is stopped itself, or gone, does not block it."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
        supervisor.send(b".", socket.MSG_DONTWAIT)


def _stop_orphaned_master(run_id: str) -> None:
    """Stop without waiting for the step under way; if that takes too long, kill everything."""
    _log.error("the process that supervised this run is gone; stopping")
    os.kill(os.getpid(), ORPHANED)
    time.sleep(_ORPHAN_GRACE_S)
    kill_leftovers(RUN_ID, run_id)
    os._exit(1)


def _kill_own_group() -> None:
    """End the worker together with the processes that it started: it leads its process group."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

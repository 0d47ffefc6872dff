from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from realrl.errors import CallError, CheckpointError, DataError, InvalidTransitionError, TransportError
from realrl.runtime.launchers.base import available_cores, threads_per_worker
from realrl.runtime.launchers.inline import InlineLauncher
from realrl.runtime.processes.session import SignalReceived
from realrl.runtime.transport.base import SampleClient
from realrl.runtime.transport.inproc import InprocMaster, InprocSamples
from realrl.runtime.worker.loop import WorkerLoop
from realrl.sched.messages import (
    CheckpointSaved,
    Goodbye,
    Heartbeat,
    Hello,
    Initialize,
    MoveRows,
    Ready,
    Reply,
    Request,
    RunCall,
    RunHooks,
    SaveCheckpoint,
    Shutdown,
    WorkerFailed,
)

INITIALIZE = Initialize(0, b"", ())


def call(seq: int, name: str = "actor_gen") -> RunCall:
    return RunCall(seq, 0, name, 4, (("0/1",),), ())


class ScriptedHost:
    """Runs one action per call name; notes what it was asked."""

    def __init__(self, actions: dict[str, Callable[[], object]] | None = None) -> None:
        self.actions = actions or {}
        self.seen: list[Request] = []

    def handle(self, request: Request) -> Sequence[Reply]:
        self.seen.append(request)
        if isinstance(request, Initialize):
            return [Ready(0, request.seq, (), 0, ())]
        if isinstance(request, RunCall):
            self.actions[request.call]()
        return [Goodbye(0, request.seq)] if isinstance(request, Shutdown) else []

    def fetch(self, keys: Sequence[str], ids: Sequence[str]) -> bytes:
        return ",".join(keys).encode()


def loop_around(host: ScriptedHost, *, is_initialised: bool = True) -> WorkerLoop:
    def make(rank: int, client: SampleClient) -> ScriptedHost:
        return host

    loop = WorkerLoop(0, InprocSamples().client(), lambda: make)
    if is_initialised:
        loop.execute(INITIALIZE)
        host.seen.clear()
    return loop


def raise_data_error() -> None:
    raise DataError("row 17 is not JSON")


def raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("action", "error", "exit_code"),
    [
        (raise_data_error, "DataError", 2),
        (lambda: {}["x"], "KeyError", 1),
        (lambda: sys.exit(5), "SystemExit", 1),
        (raise_interrupt, "KeyboardInterrupt", 1),
    ],
)
def test_what_a_call_raises_becomes_a_failure(action: Callable[[], object], error: str, exit_code: int) -> None:
    loop = loop_around(ScriptedHost({"actor_gen": action}))
    (failed,) = loop.execute(call(1))
    assert isinstance(failed, WorkerFailed)
    assert (failed.rank, failed.seq, failed.call, failed.step) == (0, 1, "actor_gen", 4)
    assert (failed.error, failed.exit_code) == (error, exit_code)
    assert failed.traceback == "" or "test_loop.py" in failed.traceback
    assert (failed.traceback == "") == (error == "DataError")  # a deliberate error explains itself


@pytest.mark.parametrize("request_", [RunHooks(1, 0, "actor_gen", 4, "before"), MoveRows(1, 0, "actor_gen", 4, (), ())])
def test_what_moves_for_a_call_fails_in_its_name(request_: Request) -> None:
    class Broken(ScriptedHost):
        def handle(self, request: Request) -> Sequence[Reply]:
            if isinstance(request, RunHooks | MoveRows):
                raise RuntimeError("Connection closed by peer")
            return super().handle(request)

    (failed,) = loop_around(Broken({})).execute(request_)
    assert isinstance(failed, WorkerFailed)
    assert (failed.call, failed.step, failed.error) == ("actor_gen", 4, "RuntimeError")


def test_a_deliberate_error_brings_the_traceback_of_its_cause_and_its_samples(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="realrl")  # what cannot be encoded cannot be passed on by xdist either

    def blame() -> None:
        try:
            raise ZeroDivisionError("of the \ud800 user")
        except ZeroDivisionError as cause:
            error = CallError("the interface raised")
            error.sample_ids = ("0/1",)
            raise error from cause

    (failed,) = loop_around(ScriptedHost({"actor_gen": blame})).execute(call(1))
    assert isinstance(failed, WorkerFailed)
    assert (failed.error, failed.message, failed.sample_ids) == ("CallError", "the interface raised", ("0/1",))
    assert failed.traceback.endswith("ZeroDivisionError: of the \\ud800 user\n")
    assert "CallError" not in failed.traceback


class LateHost(ScriptedHost):
    """Answers to a checkpoint later."""

    def __init__(self) -> None:
        super().__init__()
        self.later: Future[Reply] = Future()

    def handle(self, request: Request) -> Sequence[Reply | Future[Reply]]:
        return [self.later] if isinstance(request, SaveCheckpoint) else super().handle(request)


def test_a_reply_may_come_while_other_requests_are_executed() -> None:
    host, posted = LateHost(), list[Reply]()
    loop = WorkerLoop(0, InprocSamples().client(), lambda: lambda rank, client: host, post=posted.append)
    loop.execute(INITIALIZE)
    assert loop.execute(SaveCheckpoint(1, 4, "/x")) == []
    assert loop.execute(Shutdown(2)) == [Goodbye(0, 2)]
    assert posted == []
    host.later.set_result(CheckpointSaved(0, 1, 4))
    assert posted == [CheckpointSaved(0, 1, 4)]


def test_a_request_may_fail_later() -> None:
    host, posted = LateHost(), list[Reply]()
    loop = WorkerLoop(0, InprocSamples().client(), lambda: lambda rank, client: host, post=posted.append)
    loop.execute(INITIALIZE)
    loop.execute(SaveCheckpoint(1, 4, "/x"))
    host.later.set_exception(CheckpointError("the disk is full", step=4))
    (failed,) = posted
    assert isinstance(failed, WorkerFailed)
    assert (failed.seq, failed.step, failed.error, failed.message) == (1, 4, "CheckpointError", "the disk is full")


def test_without_a_way_to_send_it_a_late_reply_is_waited_for() -> None:
    host = LateHost()
    loop = loop_around(host)
    host.later.set_result(CheckpointSaved(0, 1, 4))
    assert loop.execute(SaveCheckpoint(1, 4, "/x")) == [CheckpointSaved(0, 1, 4)]


def test_a_signal_is_not_a_failure_of_the_call() -> None:
    def interrupt() -> None:
        raise SignalReceived(2)

    with pytest.raises(SignalReceived):
        loop_around(ScriptedHost({"actor_gen": interrupt})).execute(call(1))


def test_after_a_failure_only_a_shutdown_is_executed() -> None:
    host = ScriptedHost({"actor_gen": raise_data_error})
    loop = loop_around(host)
    loop.execute(call(1))
    assert loop.execute(call(2)) == []
    assert loop.execute(SaveCheckpoint(3, 4, "/x")) == []
    assert loop.execute(Shutdown(4)) == [Goodbye(0, 4)]
    assert loop.finished
    assert host.seen == [call(1), Shutdown(4)]


def test_a_request_out_of_sequence_is_a_bug_that_is_told() -> None:
    loop = loop_around(ScriptedHost({"actor_gen": lambda: None}))
    with pytest.raises(InvalidTransitionError, match="too early: it expects request 1"):
        loop.execute(call(2))


def test_a_host_that_cannot_be_made_is_a_failure_of_the_first_request() -> None:
    def make() -> Callable[[int, SampleClient], ScriptedHost]:
        raise ImportError("no module named torch")

    loop = WorkerLoop(2, InprocSamples().client(), make)
    (failed,) = loop.execute(INITIALIZE)
    assert isinstance(failed, WorkerFailed)
    assert (failed.rank, failed.error, failed.message) == (2, "ImportError", "no module named torch")
    assert loop.execute(Shutdown(1)) == [Goodbye(2, 1)]


def test_a_shutdown_that_fails_is_still_a_goodbye() -> None:
    class Stuck(ScriptedHost):
        def handle(self, request: Request) -> Sequence[Reply]:
            raise RuntimeError("a group is gone")

    loop = loop_around(Stuck(), is_initialised=False)
    loop.execute(INITIALIZE)
    assert loop.execute(Shutdown(1)) == [Goodbye(0, 1)]


def test_heartbeats_tell_what_is_being_executed() -> None:
    beats: list[Heartbeat] = []
    host = ScriptedHost()

    def work() -> None:
        beats.append(loop.heartbeat())
        beats.append(loop.heartbeat())

    host.actions["actor_gen"] = work
    loop = loop_around(host)
    assert loop.heartbeat() == Heartbeat(0, -1, "idle", 0.0)
    loop.execute(call(1))
    assert [(beat.seq, beat.activity) for beat in beats] == [(1, "actor_gen"), (1, "actor_gen")]
    assert beats[1].busy_s >= beats[0].busy_s >= 0
    assert loop.heartbeat() == Heartbeat(0, -1, "idle", 0.0)


def test_rows_are_served_by_the_host_once_there_is_one() -> None:
    loop = loop_around(ScriptedHost(), is_initialised=False)
    with pytest.raises(TransportError, match="worker 0 holds no samples yet"):
        loop.fetch(["rewards"], ["a"])
    loop.execute(INITIALIZE)
    assert loop.fetch(["rewards"], ["a"]) == b"rewards"


def test_the_inline_launcher_runs_requests_on_the_callers_stack() -> None:
    master = InprocMaster()
    frames: list[str] = []

    def remember_stack() -> None:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            frames.append(frame.f_code.co_name)

    host = ScriptedHost({"actor_gen": remember_stack})
    launcher = InlineLauncher(master, lambda: lambda rank, client: host)
    launcher.start(2, b"")
    hellos = [master.receive(0), master.receive(0)]
    assert [reply.rank for reply in hellos if isinstance(reply, Hello)] == [0, 1]
    master.send(0, INITIALIZE)
    assert isinstance(master.receive(0), Ready)
    master.send(0, call(1))
    assert master.receive(0) is None
    assert "test_the_inline_launcher_runs_requests_on_the_callers_stack" in frames
    assert launcher.poll() == []
    assert launcher.log_path(0) is None
    launcher.stop()


def test_threads_are_shared_between_workers() -> None:
    cores = available_cores()
    assert threads_per_worker(1) == cores
    assert threads_per_worker(cores + 1) == 1

"""Tiny masters and workers without torch, named by dotted path in the tests of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from realrl.errors import DataError
from realrl.runtime.output import failure_report as report
from realrl.runtime.processes.session import Session, SignalReceived
from realrl.runtime.transport.base import SampleClient
from realrl.sched.events import WorkerLost
from realrl.sched.key_value import KeyValueClient
from realrl.sched.master import diagnosis
from realrl.sched.messages import (
    CallDone,
    Goodbye,
    Hello,
    Initialize,
    Ready,
    Reply,
    Request,
    RunCall,
    Shutdown,
    WorkerFailed,
)

N_WORKERS = 2
INITIALIZE = Initialize(0, b"", ())


class FakeHost:
    """Does what the call's name says."""

    def __init__(self, rank: int, client: SampleClient, *, meeting: KeyValueClient) -> None:
        self.rank = rank
        self.client = client

    def handle(self, request: Request) -> list[Reply]:
        match request:
            case Initialize():
                return [Ready(self.rank, request.seq, (), 0, ())]
            case RunCall():
                return [self._call(request)]
            case Shutdown():
                return [Goodbye(self.rank, request.seq)]
            case _:
                raise AssertionError(request)

    def fetch(self, keys: Sequence[str], ids: Sequence[str]) -> bytes:
        return f"{','.join(keys)} of {','.join(ids)} from {self.rank}".encode()

    def _call(self, request: RunCall) -> CallDone:
        metrics = {}
        match request.call:
            case "raise":
                raise DataError("the reward is broken", remedy="Mend it.")
            case "exit":
                sys.exit(3)
            case "tensor":
                metrics["x"] = object()
            case "environment":
                ours = sorted(name for name in os.environ if name.startswith("REALRL_"))
                print("cores", os.environ["OMP_NUM_THREADS"], *ours, flush=True)
            case "child":
                metrics["pid"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
            case "sleep":
                print("going to sleep", flush=True)
                time.sleep(600)
            case "stdin":
                metrics["length"] = len(sys.stdin.read())
            case "pull":
                payload = self.client.pull(request.minibatches[0][0], ("rewards",), ("0/1",))
                metrics["length"] = len(payload)
        return CallDone(self.rank, request.seq, request.dispatch_id, request.call, request.step, None, metrics, ())


def broken_host(rank: int, client: SampleClient, *, meeting: KeyValueClient) -> FakeHost:
    raise ImportError("no accelerator library")


def call(seq: int, name: str, argument: str = "") -> RunCall:
    return RunCall(seq, dispatch_id=seq, call=name, step=1, minibatches=((argument,),), transfers=())


def start_workers(session: Session) -> list[Hello]:
    """Start and initialise the workers; returns their greetings, by rank."""
    hellos = greet_workers(session)
    for rank in range(N_WORKERS):
        assert isinstance(ask(session, rank, INITIALIZE), Ready)
    return hellos


def greet_workers(session: Session) -> list[Hello]:
    """Start the workers and return their greetings, by rank."""
    session.launcher.start(N_WORKERS, session.admission)
    hellos: dict[int, Hello] = {}
    while len(hellos) < N_WORKERS:
        reply = session.transport.receive(0.2)
        if isinstance(reply, Hello):
            hellos[reply.rank] = reply
        assert not session.launcher.poll(), "a worker died at once"
    return [hellos[rank] for rank in range(N_WORKERS)]


def ask(session: Session, rank: int, request: Request) -> Reply:
    """The reply of one worker to one request."""
    session.transport.send(rank, request)
    while True:
        reply = session.transport.receive(0.2)
        if reply is not None and reply.rank == rank and isinstance(reply, CallDone | Ready | WorkerFailed | Goodbye):
            return reply
        for lost_rank, exit_code, _ in session.launcher.poll():
            raise AssertionError(f"worker {lost_rank} {report.signal_name(exit_code)}")


def one_of_each(session: Session) -> int:
    """A whole life: greet, call, pull rows from a peer, shut down."""
    hellos = start_workers(session)
    results = {
        "torch": "torch" in sys.modules,
        "stdin": ask(session, 0, call(1, "stdin")).metrics["length"],
        "pull": ask(session, 1, call(1, "pull", hellos[0].data_address)).metrics["length"],
    }
    ask(session, 1, call(2, "environment"))
    for rank, seq in ((0, 2), (1, 3)):
        assert isinstance(ask(session, rank, Shutdown(seq)), Goodbye)
    ended: list[tuple[int, int | None]] = []
    while len(ended) < N_WORKERS:
        ended += [(end.rank, end.exit_code) for end in session.launcher.poll()]
    (session.run_dir / "results.json").write_text(json.dumps({**results, "ended": sorted(ended)}))
    return 0


def failing_calls(session: Session) -> int:
    """Run a call whose user code or host is broken, and return the exit code."""
    greet_workers(session)
    failure, seq = ask(session, 0, INITIALIZE), 1
    if not isinstance(failure, WorkerFailed):
        failure, seq = ask(session, 0, call(1, session.run.decode())), 2
    assert isinstance(ask(session, 0, Shutdown(seq)), Goodbye)
    decided = msgspec.structs.replace(
        diagnosis.worker_failed(failure, (), None), waiting_ranks=(1,), waiting_calls=("actor_train",)
    )
    told = report.from_failure(decided, log=session.launcher.log_path(0))
    session.progress.failed(str(told))
    return told.exit_code


def wait_for_worse(session: Session) -> int:
    """Two workers at work and a child of one of them; tells their pids, then waits for somebody to die."""
    hellos = start_workers(session)
    child = ask(session, 0, call(1, "child"))
    for rank, seq in ((0, 2), (1, 1)):
        session.transport.send(rank, call(seq, "sleep"))
    while any("going to sleep" not in session.launcher.log_path(rank).read_text() for rank in range(N_WORKERS)):
        session.transport.receive(0.05)
        assert not session.launcher.poll(), "a worker died at once"
    pids = {"supervisor": os.getppid(), "master": os.getpid(), "child": int(child.metrics["pid"])}
    pids |= {f"worker {hello.rank}": hello.pid for hello in hellos}
    partial = session.run_dir / "pids.partial"
    partial.write_text(json.dumps(pids))
    partial.rename(session.run_dir / "pids.json")
    while True:
        session.beat()
        session.transport.receive(0.1)
        for rank, exit_code, _ in session.launcher.poll():
            lost = WorkerLost(rank, exit_code, report.signal_name(exit_code))
            decided = msgspec.structs.replace(
                diagnosis.worker_lost(lost, (), call(1, "sleep")), waiting_ranks=(1 - rank,)
            )
            failure = report.from_failure(decided, log=session.launcher.log_path(rank))
            session.progress.failed(str(failure))
            return failure.exit_code


def dies_so_often(session: Session) -> int:
    """Is killed in its first attempts, as many as the run says; the last one works."""
    attempts = session.run_dir / "attempts"
    with attempts.open("a") as file:
        file.write("x")
    if attempts.stat().st_size <= int(session.run):
        os.kill(os.getpid(), signal.SIGKILL)
    return one_of_each(session)


def freezes_at_first(session: Session) -> int:
    """Stops itself in its first attempt; the next one works."""
    first = session.run_dir / "frozen"
    if not first.exists():
        first.touch()
        session.beat()
        os.kill(os.getpid(), signal.SIGSTOP)
    return one_of_each(session)


def talkative(session: Session) -> int:
    """Writes more than a pipe holds."""
    session.beat()
    print("x" * 1_000_000, flush=True)
    return 0


def stubborn(session: Session) -> int:
    """Does not stop when asked to."""
    try:
        return wait_for_worse(session)
    except SignalReceived:
        (session.run_dir / "interrupted").touch()
        while True:
            signal.pause()


def buggy(session: Session) -> int:
    raise ZeroDivisionError("a bug")

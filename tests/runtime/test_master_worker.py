"""What the master's shell does with the world around its state machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from realrl.config.schema import SaveConfig
from realrl.errors import TransportError
from realrl.runtime import master_worker
from realrl.runtime.checkpoint import CheckpointStore
from realrl.runtime.master_worker import MasterWorker
from realrl.runtime.recovery import describe_end
from realrl.sched.events import Abort, Event, Failure, FailureKind, Instruction, Send, Start, WorkerLost
from realrl.sched.messages import Shutdown, WorkerFailed


class ScriptedState:
    """Answers the start with one request, and a loss with the end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.plan = SimpleNamespace(readout=None, first_step=1)

    def handle(self, event: Event) -> list[Instruction]:
        self.events.append(event)
        if isinstance(event, Start):
            return [Send(0, Shutdown(0))]
        return [Abort(Failure(kind=FailureKind.WORKER_LOST, message="a worker is gone", rank=0))]


class GoneTransport:
    def send(self, rank: int, request: object) -> None:
        raise TransportError(f"worker {rank} is not connected", worker=rank)


class FailingTransport:
    """Takes every request, and brings one failure."""

    def __init__(self, reply: WorkerFailed) -> None:
        self.reply = reply

    def send(self, rank: int, request: object) -> None:
        """Nobody reads it."""

    def receive(self, timeout_s: float) -> WorkerFailed:
        return self.reply


class Launcher:
    def __init__(self, ended: list[tuple[int, int]]) -> None:
        self.ended = ended

    def start(self, n_workers: int, address: str, environment: dict[str, str]) -> None:
        """The workers of this test are dead already."""

    def poll(self) -> list[tuple[int, int]]:
        return self.ended

    def log_path(self, rank: int) -> None:
        return None


def run_to_the_end(
    transport: object, ended: list[tuple[int, int]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ScriptedState, list[str]]:
    """A master of two workers; what its state was told, and what the user read."""
    monkeypatch.setattr(master_worker, "_DEATH_NOTICE_S", 0.05)
    reports: list[str] = []
    session = SimpleNamespace(
        transport=transport,
        launcher=Launcher(ended),
        address="",
        environment={},
        run_dir=folder,
        progress=SimpleNamespace(phase=lambda text: None, failed=reports.append),
    )
    state = ScriptedState()
    plan = SimpleNamespace(n_workers=2, config=SimpleNamespace(launcher="local", save=SaveConfig()))
    master = MasterWorker(plan, state, session, CheckpointStore(folder, keep=1, experiment="ppo"))  # type: ignore[arg-type]
    assert master.run(Start(run=b"", rendezvous="", resume_from="")) == 1
    told = describe_end(folder, 1, is_interrupted=False).failure
    assert told == Failure(kind=FailureKind.WORKER_LOST, message="a worker is gone", rank=0)
    return state, reports


@pytest.mark.parametrize(
    ("ended", "lost"),
    [
        ([(1, -9)], WorkerLost(1, -9, "killed by SIGKILL")),
        ([], WorkerLost(0, None, "worker 0 is not connected")),
    ],
    ids=["a process died", "nobody died"],
)
def test_a_connection_that_is_gone_is_told_as_the_death_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[tuple[int, int]], lost: WorkerLost
) -> None:
    state, reports = run_to_the_end(GoneTransport(), ended, tmp_path, monkeypatch)
    assert state.events[1:] == [lost]
    assert reports == ["error: a worker is gone"]


GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44091"
FAILED = WorkerFailed(0, 3, "actor_train", 2, "CallError", "it failed", GLOO, 1)
USER_ERROR = WorkerFailed(0, 3, "actor_train", 2, "CallError", "it failed", "ValueError: mine", 1)


@pytest.mark.parametrize(
    ("reply", "ended", "blamed"),
    [
        (FAILED, [(1, -9)], WorkerLost(1, -9, "killed by SIGKILL")),
        (FAILED, [], FAILED),
        (USER_ERROR, [(1, -9)], USER_ERROR),
    ],
    ids=["a peer died", "nobody died", "an error of its own"],
)
def test_a_broken_collective_is_blamed_on_the_worker_that_died(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reply: WorkerFailed,
    ended: list[tuple[int, int]],
    blamed: Event,
) -> None:
    state, _ = run_to_the_end(FailingTransport(reply), ended, tmp_path, monkeypatch)
    assert state.events[1:] == [blamed]

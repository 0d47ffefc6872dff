"""What the master's shell does with the world around its state machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from realrl.errors import TransportError
from realrl.runtime import master_worker
from realrl.runtime.checkpoint import CheckpointStore
from realrl.runtime.master_worker import MasterWorker
from realrl.sched.events import Abort, Event, Failure, FailureKind, Instruction, Send, Start, WorkerLost
from realrl.sched.messages import Shutdown


class ScriptedState:
    """Answers the start with one request, and a loss with the end."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def handle(self, event: Event) -> list[Instruction]:
        self.events.append(event)
        if isinstance(event, Start):
            return [Send(0, Shutdown(0))]
        return [Abort(Failure(kind=FailureKind.WORKER_LOST, message="a worker is gone", rank=0))]


class GoneTransport:
    def send(self, rank: int, request: object) -> None:
        raise TransportError(f"worker {rank} is not connected", worker=rank)


class Launcher:
    def __init__(self, ended: list[tuple[int, int]]) -> None:
        self.ended = ended

    def start(self, n_workers: int, address: str, environment: dict[str, str]) -> None:
        """The workers of this test are dead already."""

    def poll(self) -> list[tuple[int, int]]:
        return self.ended

    def log_path(self, rank: int) -> None:
        return None


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
    monkeypatch.setattr(master_worker, "_DEATH_NOTICE_S", 0.05)
    reports: list[str] = []
    session = SimpleNamespace(
        transport=GoneTransport(),
        launcher=Launcher(ended),
        address="",
        environment={},
        progress=SimpleNamespace(phase=lambda text: None, failed=reports.append),
    )
    state = ScriptedState()
    plan = SimpleNamespace(n_workers=2, config=SimpleNamespace(launcher="local"))
    master = MasterWorker(plan, state, session, CheckpointStore(tmp_path, keep=1, experiment="ppo"))  # type: ignore[arg-type]
    assert master.run(Start(run=b"", rendezvous="", resume_from="")) == 1
    assert state.events[1:] == [lost]
    assert reports == ["error: a worker is gone"]

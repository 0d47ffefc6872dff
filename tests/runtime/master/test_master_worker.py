"""Dealings of the master's shell with the world around its state machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from realrl.config.schema import ClusterConfig, DatasetConfig, EvalConfig, SaveConfig
from realrl.errors import TransportError
from realrl.runtime.checkpoints.store import CheckpointStore
from realrl.runtime.launchers.base import WorkerEnd
from realrl.runtime.master import master_worker
from realrl.runtime.master.master_worker import MasterWorker
from realrl.runtime.processes.recovery import describe_end
from realrl.runtime.processes.signals import Signals
from realrl.sched.events import (
    Abort,
    Event,
    Failure,
    FailureKind,
    Instruction,
    OpenCheckpoint,
    ReportSamples,
    ReportStep,
    Send,
    Start,
    WorkerLost,
    WorkerSilent,
)
from realrl.sched.messages import Heartbeat, Shutdown, WorkerFailed
from realrl.sched.track.readout import NO_READOUT


class ScriptedState:
    """Answers the start with one request, and a loss with the end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.plan = SimpleNamespace(main=SimpleNamespace(readout=NO_READOUT, first_step=1))

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
    """Tells of the workers that ended once, when it was asked `news_after` times in vain."""

    def __init__(self, ended: list[tuple[int, int]], news_after: int = 0) -> None:
        self.ended = ended
        self.news_after = news_after

    def start(self, n_workers: int, admission: bytes) -> None:
        """The workers of this test are dead already."""

    def poll(self) -> list[WorkerEnd]:
        self.news_after -= 1
        if self.news_after >= 0:
            return []
        ended, self.ended = self.ended, []
        return [WorkerEnd(*end) for end in ended]

    def machine(self, rank: int) -> str:
        return ""

    def clock_offset_s(self, rank: int) -> float:
        return 0.0

    def dump_stack(self, rank: int) -> None:
        """There is none."""

    def log_path(self, rank: int) -> None:
        return None


def run_to_the_end(
    transport: object,
    launcher: Launcher,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    timeout_s: float = 60.0,
    notice_s: float = 0.1,
) -> tuple[ScriptedState, list[str]]:
    """A master of two workers; what its state was told, and what the user read."""
    monkeypatch.setattr(master_worker, "_DEATH_NOTICE_S", notice_s)
    reports: list[str] = []
    session = SimpleNamespace(
        transport=transport,
        launcher=launcher,
        admission=b"",
        run_dir=folder,
        trace=SimpleNamespace(spans=lambda rank, spans: None),
        progress=SimpleNamespace(phase=lambda text: None, failed=reports.append, activity=lambda rank, text: None),
        beat=lambda: None,
        signals=Signals(),
        restarts_left=0,
    )
    state = ScriptedState()
    cluster = ClusterConfig(worker_timeout_s=timeout_s)
    config = SimpleNamespace(
        launcher="local", save=SaveConfig(), cluster=cluster, dataset=DatasetConfig(), eval=EvalConfig()
    )
    plan = SimpleNamespace(n_workers=2, config=config)
    master = MasterWorker(plan, state, session, CheckpointStore(folder, keep=1, experiment="ppo"))  # type: ignore[arg-type]
    assert master.run(Start(run=b"", resume_from="")) == 1
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
    state, reports = run_to_the_end(GoneTransport(), Launcher(ended), tmp_path, monkeypatch)
    assert state.events[1:] == [lost]
    assert reports == ["realrl: error: a worker is gone"]


LOST = WorkerLost(1, -9, "killed by SIGKILL")


def failed(*, needs_peers: bool, lost_peer: bool = False) -> WorkerFailed:
    trace = "Traceback"
    return WorkerFailed(0, 3, "actor_train", 2, "CallError", "it failed", trace, 1, (), needs_peers, lost_peer)


GLOO = failed(needs_peers=True, lost_peer=True)
ENFORCED, MINE = failed(needs_peers=True), failed(needs_peers=False)


@pytest.mark.parametrize(
    ("failure", "ended", "news_after", "blamed"),
    [
        (GLOO, [(1, -9)], 2, LOST),
        (ENFORCED, [(1, -9)], 2, LOST),
        (GLOO, [], 0, GLOO),
        (MINE, [(1, -9)], 0, LOST),
        (MINE, [(1, -9)], 2, MINE),
        (GLOO, [(0, -6)], 2, GLOO),
        (GLOO, [(0, -6), (1, -9)], 2, LOST),
    ],
    ids=[
        "a peer died",
        "a peer died, which is told in other words",
        "nobody died",
        "a death that is known",
        "nobody waits for news that change nothing",
        "it died itself",
        "it died itself, after a peer",
    ],
)
def test_a_failure_is_blamed_on_the_worker_that_died_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: WorkerFailed,
    ended: list[tuple[int, int]],
    news_after: int,
    blamed: Event,
) -> None:
    launcher = Launcher(ended, news_after)
    notice_s = 60.0 if blamed is LOST else 0.1  # it ends with the news, however late a busy machine looks for them
    state, _ = run_to_the_end(FailingTransport(failure), launcher, tmp_path, monkeypatch, notice_s=notice_s)
    assert state.events[1:] == [blamed]


class PausedTransport:
    """The master is stopped for 100 s; then the heartbeats that came meanwhile are there, and after them one worker's.

    The time is this transport's: `receive` lets it pass.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waiting = [Heartbeat(rank, -1, f"beat {n}", 0.0) for n in range(100) for rank in (0, 1)]
        self.n_read_late = 0

    def send(self, rank: int, request: object) -> None:
        """Nobody reads it."""

    def receive(self, timeout_s: float) -> Heartbeat | None:
        if self.now_s == 0.0:
            self.now_s = 100.0
        if self.waiting:
            self.n_read_late += 1
            return self.waiting.pop()
        self.now_s += max(timeout_s, 0.01)
        return Heartbeat(0, -1, "alive", 0.0) if round(self.now_s * 100) % 50 == 0 else None


def test_heartbeats_that_waited_are_read_before_silence_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = PausedTransport()
    monkeypatch.setattr(master_worker, "time", SimpleNamespace(monotonic=lambda: transport.now_s, sleep=lambda s: None))
    state, _ = run_to_the_end(transport, Launcher([]), tmp_path, monkeypatch, timeout_s=5.0)
    assert transport.n_read_late == 200
    [silent] = state.events[1:]
    assert isinstance(silent, WorkerSilent)
    assert (silent.rank, silent.activity) == (1, "beat 0")
    assert transport.now_s > 104.0  # the pause was no part of the silence


def test_requests_go_out_before_files_are_written() -> None:
    """Requests overtake reports alone: the folder of a checkpoint is there before workers write to it."""
    samples, step, opens = ReportSamples(1, 0, ()), ReportStep(1, 0, {}, ()), OpenCheckpoint(1, "step_1")
    send, save = Send(0, Shutdown(1)), Send(1, Shutdown(2))
    ordered = list(master_worker._sends_first([samples, step, send, opens, save]))
    assert ordered == [send, samples, step, opens, save]
    assert list(master_worker._sends_first([opens, samples, send])) == [opens, send, samples]

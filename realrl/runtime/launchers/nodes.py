"""Workers on several machines: an agent on each of them, which joined by hand or by a job scheduler, starts them.

    master's thread ── start, poll, stop ──► NodesLauncher ◄── events ── thread ──► Machines
                                                                          │ ▲
                                                                agents ◄──┘ └── beats

The thread answers beats also while the master is busy: an agent that gets no answer ends its workers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from realrl.errors import MachinesError, RunError, UsageError
from realrl.runtime.launchers.base import WorkerEnd
from realrl.runtime.nodes.survey import write_nonce
from realrl.runtime.output.logs import log_path
from realrl.runtime.processes.lifeline import lease_clock
from realrl.runtime.transport.nodes import NodeServer
from realrl.sched.nodes.differences import Expected
from realrl.sched.nodes.machines import (
    AllStopped,
    EndWanted,
    Event,
    Gathered,
    GiveUp,
    Instruction,
    Machines,
    MachinesPlan,
    Received,
    Reclaimed,
    SendTo,
    StackWanted,
    Tell,
    Ticked,
    WorkerGone,
    with_clock,
)
from realrl.sched.nodes.messages import Dismissed, Examine, StartWorkers

_TURN_S = 0.1
_STOP_SLACK_S = 2.0

_log = logging.getLogger(__name__)


class NodesStart(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the master of a run on several machines; its key goes to no file and no log.

    Attributes:
        host, port: where agents join.
        listening: descriptor of the socket that listens there, inherited.
        n_accelerators: devices that a machine needs for its workers; 0 on CPUs.
        versions, digests, files: see `Expected`.
        directory: working directory of the workers.
        environment: variables of all workers.
        attempt: number of this attempt of the run, from 1.
    """

    key: bytes
    host: str
    port: int
    listening: int
    n_machines: int
    n_workers_each: int
    n_accelerators: int
    lease_s: float
    start_timeout_s: float
    versions: Mapping[str, str]
    digests: Mapping[str, str]
    files: Mapping[str, str]
    directory: str
    device: str
    environment: Mapping[str, str] = {}
    attempt: int = 1

    def __repr__(self) -> str:
        return f"NodesStart({self.host}:{self.port}, attempt {self.attempt})"


def expected_of(nodes: NodesStart, run_dir: Path, nonce: str) -> Expected:
    """Return what every machine must have; `nonce` is the content of the master's file in the run folder."""
    return Expected(
        versions=nodes.versions,
        digests=nodes.digests,
        files=nodes.files,
        run_dir=str(run_dir),
        nonce=nonce,
        n_accelerators=nodes.n_accelerators,
        n_machines=nodes.n_machines,
    )


class NodesLauncher:
    """Starts the workers of one attempt through the agents of its machines.

    Args:
        marks: of this attempt, and of the one before it, or "".
        host: dotted path of the factory of each worker's host.
        tell: shows a line to the user; called by the master's thread.
        beat: tells the supervisor that the master lives, while this waits.
        reclaim: is called with the name of a signal when somebody wants a machine back.
    """

    def __init__(
        self,
        run_dir: Path,
        nodes: NodesStart,
        *,
        marks: tuple[str, str],
        host: str,
        tell: Callable[[str], None],
        beat: Callable[[], None],
        reclaim: Callable[[str], None],
    ) -> None:
        self._run_dir = run_dir
        self._nodes = nodes
        self._mark, self._previous = marks
        self._host = host
        self._tell = tell
        self._beat = beat
        self._reclaim = reclaim
        self._asked: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Instruction | Exception] = queue.SimpleQueue()
        self._machines: Machines | None = None
        self._thread: threading.Thread | None = None
        self._nonce: Path | None = None
        self._is_over = threading.Event()
        self._is_stopped = False

    def start(self, n_workers: int, admission: bytes) -> None:
        """Wait until enough machines are there, and have them start their workers.

        Raises:
            UsageError: a machine is not fit for the run.
            MachinesError: too few came in time.
        """
        nodes = self._nodes
        assert n_workers == nodes.n_machines * nodes.n_workers_each
        self._begin(admission)
        self._tell(f"waiting for {nodes.n_machines} machines at {nodes.host}:{nodes.port}")
        while True:
            for found in self._news(_TURN_S):
                match found:
                    case Gathered(names):
                        self._tell(f"workers start on {', '.join(names)}")
                        return
                    case GiveUp(message, remedy, exit_code):
                        kind = UsageError if exit_code == UsageError.exit_code else MachinesError
                        raise kind(message, remedy=remedy)

    def poll(self) -> list[WorkerEnd]:
        gone = [found for found in self._news(0.0) if isinstance(found, WorkerGone)]
        return [WorkerEnd(end.rank, end.exit_code, end.detail or f" on {end.machine}") for end in gone]

    def stop(self) -> None:
        """End all workers, and wait until none can be alive: those of a machine that is silent have a lease."""
        if self._thread is None or self._is_stopped:
            return
        self._is_stopped = True
        self._asked.put(EndWanted())
        deadline_s = time.monotonic() + self._nodes.lease_s + _STOP_SLACK_S + 2 * _TURN_S
        try:
            while time.monotonic() < deadline_s and self._thread.is_alive():
                if any(isinstance(found, AllStopped) for found in self._news(_TURN_S)):
                    break
        finally:
            self._is_over.set()
            self._thread.join()
            if self._nonce is not None:
                self._nonce.unlink(missing_ok=True)

    def dump_stack(self, rank: int) -> None:
        self._asked.put(StackWanted(rank))
        time.sleep(2 * _TURN_S)  # on its way

    def log_path(self, rank: int) -> Path | None:
        return log_path(self._run_dir, rank)

    def machine(self, rank: int) -> str:
        return "" if self._machines is None else self._machines.name_of_rank(rank)

    def clock_offset_s(self, rank: int) -> float:
        return 0.0 if self._machines is None else self._machines.offset_of_rank(rank)

    # ------------------------------------------------------------ the thread

    def _begin(self, admission: bytes) -> None:
        nodes = self._nodes
        name, nonce = write_nonce(self._run_dir)
        self._nonce = self._run_dir / name
        order = StartWorkers(
            attempt=self._mark,
            first_rank=0,
            n_workers=nodes.n_workers_each,
            admission=admission,
            host=self._host,
            run_dir=str(self._run_dir),
            directory=nodes.directory,
            device=nodes.device,
            environment=nodes.environment,
        )
        plan = MachinesPlan(
            n_machines=nodes.n_machines,
            expected=expected_of(nodes, self._run_dir, nonce),
            examine=Examine(str(self._run_dir), name, nodes.directory, tuple(nodes.files)),
            order=order,
            previous_attempt=self._previous,
            lease_s=nodes.lease_s,
            start_timeout_s=nodes.start_timeout_s,
        )
        machines = self._machines = Machines(plan, lease_clock())
        server = NodeServer(nodes.key, f"tcp://{nodes.host}:{nodes.port}", nodes.listening)
        self._thread = threading.Thread(target=self._serve, args=(server, machines), name="machines", daemon=True)
        self._thread.start()

    def _serve(self, server: NodeServer, machines: Machines) -> None:
        try:
            looked_s = lease_clock()
            while not self._is_over.is_set():
                received = server.receive(_TURN_S)
                while received is not None:
                    self._handle(server, machines, Received(*received, lease_clock()))
                    received = server.receive(0.0)
                while not self._asked.empty():
                    self._handle(server, machines, self._asked.get())
                if lease_clock() - looked_s >= _TURN_S:  # and not after each of many machines' messages
                    looked_s = lease_clock()
                    self._handle(server, machines, Ticked(looked_s))
        except Exception as error:  # noqa: BLE001 - the master's thread raises it
            _log.exception("the thread that leads the machines has failed")
            self._found.put(error)
        finally:
            server.close()

    def _handle(self, server: NodeServer, machines: Machines, event: Event) -> None:
        for instruction in machines.handle(event):
            if isinstance(instruction, SendTo):
                server.send(instruction.agent, with_clock(instruction.message, time.time()))
            else:
                self._found.put(instruction)

    def _news(self, timeout_s: float) -> list[Instruction]:
        """Return what the thread has found; waits for something. The user is told what is for him."""
        self._beat()
        news: list[Instruction] = []
        try:
            item = self._found.get(timeout=timeout_s) if timeout_s else self._found.get_nowait()
            while True:
                if isinstance(item, Exception):
                    raise RunError(f"the master cannot lead the machines any more: {item}") from item
                if isinstance(item, Tell):
                    self._tell(item.text)
                elif isinstance(item, Reclaimed):
                    self._tell(f"{item.signal} on machine {item.machine}: somebody wants it back")
                    self._reclaim(item.signal)
                else:
                    news.append(item)
                item = self._found.get_nowait()
        except queue.Empty:
            return news


def mark_of(run_id: str, attempt: int) -> str:
    """Return the mark of an attempt, by which processes and keys of others are told apart; "" before the first."""
    return f"{run_id}-{attempt}" if attempt else ""


def dismiss(nodes: NodesStart, exit_code: int, *, limit_s: float = 3.0, quiet_s: float = 0.4) -> None:
    """Tell the agents that the run is over, when no master is there any more.

    Waits until as many as the run has machines were told, and nobody else comes.
    """
    server = NodeServer(nodes.key, f"tcp://{nodes.host}:{nodes.port}", nodes.listening)
    told: set[bytes] = set()
    deadline_s = time.monotonic() + limit_s
    last_s = time.monotonic()
    try:
        while (now_s := time.monotonic()) < deadline_s:
            if len(told) >= nodes.n_machines and now_s - last_s > quiet_s:
                break
            received = server.receive(_TURN_S)
            if received is not None:
                server.send(received[0], Dismissed(exit_code))
                last_s = last_s if received[0] in told else now_s
                told.add(received[0])
    finally:
        server.close()

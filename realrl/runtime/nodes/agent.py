"""The process behind ``realrl node``: it joins a run, and starts the workers of this machine when the master says so.

    DEALER ──messages──►┐                      ┌──► DEALER          Say
    LocalLauncher ─ends─►├─► Agent.handle ─────┼──► LocalLauncher   Start, Stop, Renew, Dump
    clock, signals ─────►┘                     └──► exit code       Leave

One thread does all of it: workers end with the thread that started them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from realrl.errors import Error, UsageError
from realrl.runtime.launchers.base import available_cores
from realrl.runtime.launchers.local import LocalLauncher
from realrl.runtime.nodes.addresses import interface_of, own_address, parse_place, resolve
from realrl.runtime.nodes.doors import OpenPort, knock, open_door
from realrl.runtime.nodes.survey import facts, look
from realrl.runtime.output.logs import logging_to
from realrl.runtime.processes.lifeline import lease_clock
from realrl.runtime.processes.load import waiting_now
from realrl.runtime.processes.machine import accelerators, device_environments
from realrl.runtime.processes.signals import interrupted_exit_code
from realrl.runtime.transport.nodes import NodeClient
from realrl.runtime.transport.sockets import Admission
from realrl.sched.nodes.agent import (
    Agent,
    AgentPhase,
    Answered,
    Dump,
    Event,
    Heard,
    Instruction,
    Leave,
    Look,
    Looked,
    Note,
    Open,
    Probe,
    Probed,
    Renew,
    Say,
    Signalled,
    Start,
    StartFailed,
    Stop,
    Ticked,
    Try,
    WorkersEnded,
)
from realrl.sched.nodes.jobs import without_job
from realrl.sched.nodes.messages import DoorOpened, Greeting, StartWorkers

_TURN_S = 0.1
_LOOK_AGAIN_S = 2.0
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_Found = tuple[str, bytes]  # place and key


@dataclass(frozen=True)
class JobPlace:
    """This machine among those of a job: its number, and how many there are; None and 0 if nobody says."""

    index: int | None = None
    n_machines: int = 0


def run_agent(
    place: str,
    key: bytes,
    job: JobPlace,
    *,
    patience_s: float,
    outlives_run: bool = False,
    find: Callable[[], _Found | None] = lambda: None,
) -> int:
    """Join the run whose master listens at ``HOST:PORT``, and serve it to its end; returns the exit code.

    Args:
        patience_s: time without a master after which the agent gives up.
        outlives_run: see `realrl.sched.nodes.agent.Agent`.
        find: place and key as they are now, if that is known: a run that begins anew may change them.

    Raises:
        UsageError: there is no such host, or no route to it; or the master refused this machine or the key.
    """
    for name in os.environ.keys() - without_job(os.environ).keys():
        del os.environ[name]
    while True:
        ended = _run_agent(place, key, job, patience_s, outlives_run, find)
        if isinstance(ended, int):
            return ended
        place, key = ended


def _run_agent(
    place: str, key: bytes, job: JobPlace, patience_s: float, outlives_run: bool, find: Callable[[], _Found | None]
) -> int | _Found:
    host, port = parse_place(place)
    address = resolve(host)
    greeting = Greeting(
        machine=socket.gethostname(),
        pid=os.getpid(),
        address=own_address(address),
        facts=facts(),
        index=job.index,
        n_allocated=job.n_machines,
    )
    with logging_to(None):

        def moved() -> _Found | None:
            found = find()
            return None if found in (None, (place, key)) else found

        place = f"{address}:{port}"
        agent = Agent(greeting, place, patience_s=patience_s, outlives_run=outlives_run, now_s=lease_clock())
        return _Shell(greeting, agent, place, key, moved).run()


class _Shell:
    def __init__(
        self, greeting: Greeting, agent: Agent, place: str, key: bytes, moved: Callable[[], _Found | None]
    ) -> None:
        self._greeting = greeting
        self._place = place
        self._client = NodeClient(key, place)
        self._agent = agent
        self._launcher: LocalLauncher | None = None
        self._first_rank = 0
        self._lease_end_s = 0.0
        self._signals: list[int] = []
        self._left: Leave | None = None
        self._moved = moved
        self._looked_s = time.monotonic()
        self._port: OpenPort | None = None  # open for other machines, if a doctor asks

    def run(self) -> int | _Found:
        """Serve the run to its end, and return the exit code; or return where it is now."""
        _say(f"machine {self._greeting.machine} at {self._greeting.address} seeks the master at {self._place}")
        try:
            with self._catching():
                while self._left is None:
                    if (moved := self._look_again()) is not None:
                        return moved
                    self._turn()
        finally:
            self._stop()
            if self._port is not None:
                self._port.close()
            self._client.close()
        if self._left.exit_code == UsageError.exit_code and self._left.text:
            raise UsageError(self._left.text, remedy=self._left.remedy or None)
        if self._left.text:
            print(f"realrl: error: {self._left.text}\n  {self._left.remedy}".rstrip(), file=sys.stderr, flush=True)
        else:
            _say(f"the run is over: exit code {self._left.exit_code}")
        return self._left.exit_code

    def _look_again(self) -> _Found | None:
        """Return where the run is, if that has changed while this sought it."""
        if self._agent.phase is not AgentPhase.SEEKING or time.monotonic() - self._looked_s < _LOOK_AGAIN_S:
            return None
        self._looked_s = time.monotonic()
        return self._moved()

    def _turn(self) -> None:
        message = self._client.receive(_TURN_S)
        while message is not None:
            self._handle(Heard(message, lease_clock(), time.time()))
            message = self._client.receive(0.0) if self._left is None else None
        if self._launcher is not None:
            ended = {end.rank - self._first_rank: end.exit_code or 0 for end in self._launcher.poll()}
            if ended:
                self._handle(WorkersEnded(ended, lease_clock()))
        while self._signals:
            signum = self._signals.pop(0)
            is_urgent = signum in (signal.SIGINT, signal.SIGHUP)
            exit_code = interrupted_exit_code(signum, is_on_machines=True)
            self._handle(Signalled(signal.Signals(signum).name, exit_code, is_urgent, lease_clock()))
        if self._client.is_refused() and self._moved() is None:
            raise UsageError(
                f"the master at {self._place} does not accept this key",
                remedy="Use the file that `realrl run` told for this run, or the REALRL_KEY that it was given.",
            )
        self._handle(Ticked(lease_clock(), time.time()))

    def _handle(self, event: Event) -> None:
        for instruction in self._agent.handle(event):
            caused = self._perform(instruction)
            if caused is not None:
                self._handle(caused)

    def _perform(self, instruction: Instruction) -> Event | None:
        match instruction:
            case Say(message):
                self._client.send(message)
            case Look(examine):
                return Looked(look(examine), lease_clock(), time.time())
            case Start(order):
                return self._start(order)
            case Stop():
                self._stop()
            case Renew(until_s):
                self._lease_end_s = until_s
                if self._launcher is not None:
                    self._launcher.renew(until_s)
            case Dump(rank):
                if self._launcher is not None:
                    self._launcher.dump_stack(self._first_rank + rank)
            case Open():
                return Answered(self._open_door())
            case Try(doors):
                return Answered(knock(doors))
            case Probe():
                return Probed(self._client.is_closed())
            case Note(text):
                _say(text)
            case Leave():
                self._left = instruction
        return None

    def _start(self, order: StartWorkers) -> StartFailed | None:
        admission = msgspec.structs.replace(
            msgspec.msgpack.decode(order.admission, type=Admission),
            host=self._greeting.address,
            lease_end_s=self._agent.lease_end_s,
        )
        self._first_rank = order.first_rank
        self._launcher = LocalLauncher(
            Path(order.run_dir),
            f"{order.attempt}-{secrets.token_hex(4)}",  # of this agent: it may not be the only one here
            host=order.host,
            environments=worker_environments(order, self._greeting.address, os.environ),
            first_rank=order.first_rank,
            directory=order.directory,
        )
        try:
            self._launcher.start(order.n_workers, msgspec.msgpack.encode(admission))
        except (Error, OSError) as error:
            return StartFailed(str(error), lease_clock())
        return None

    def _open_door(self) -> DoorOpened:
        if self._port is not None:
            return DoorOpened(self._port.door)
        self._port, opened = open_door(self._greeting.address)
        return opened

    def _stop(self) -> None:
        if self._launcher is not None:
            self._launcher.stop()
            self._launcher = None

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        """Note signals instead of dying of them."""

        def note(signum: int, frame: FrameType | None) -> None:
            self._signals.append(signum)

        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        previous = {signum: signal.signal(signum, note) for signum in caught}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


def worker_environments(
    order: StartWorkers, address: str, environment: Mapping[str, str]
) -> tuple[dict[str, str], ...]:
    """Return the environment variables of each worker here: of the run, of its device, and of this machine's network.

    What the user has set on this machine stays.
    """
    common = dict(order.environment)
    interface = interface_of(address)
    if interface is not None:  # by default libraries ask the host name, which may be loopback's
        common |= dict.fromkeys(_INTERFACES, interface)
    if order.device == "cpu":
        common |= waiting_now(available_cores(), environment)[0]
    common = {name: value for name, value in common.items() if name not in environment}
    if order.device == "cpu":
        return (common,) * order.n_workers
    return tuple({**common, **own} for own in device_environments(order.n_workers, accelerators(), environment))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"realrl node: {text}", flush=True)

"""The machines of one attempt of a run, as the master sees them: a pure state machine.

    Greeting ──► EXAMINING ──► MEMBER ──enough of them──► RUNNING ──► STOPPED
                    │            │                           │
                    └─ refused   └──────── silence ──────────┴──► forgotten; its workers count as lost

Invariants:

- Workers start when `n_machines` members are there, and no worker of an earlier attempt can be alive: its machines say
  that they ended theirs, or the lease that the earlier master gave them is over.
- A machine is lost when the lease of the last beat that was answered is over, and `SLACK_S` more, in which it ends its
  workers. It gets no answer from then on, but the question who it is.
- Every worker that was started is reported as gone once, or was stopped by order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from realrl.sched.nodes.differences import Difference, Expected, difference_found, difference_of
from realrl.sched.nodes.messages import (
    Beat,
    BeatHeard,
    DumpStack,
    Examine,
    Examined,
    FromAgent,
    Greeting,
    Refused,
    StartWorkers,
    StopWorkers,
    ToAgent,
    Welcome,
    WhoAreYou,
)

SLACK_S = 2.0
EX_TEMPFAIL = 75  # <sysexits.h>; job schedulers can be told to queue such a job again


@dataclass(frozen=True)
class MachinesPlan:
    """Needs of an attempt: machines, their order, and time for them to come.

    Attributes:
        order: for the first machine; the others get later ranks.
        previous_attempt: mark of the attempt before this one, or "".
        start_timeout_s: time in which enough machines must be there.
    """

    n_machines: int
    expected: Expected
    examine: Examine
    order: StartWorkers
    previous_attempt: str
    lease_s: float
    start_timeout_s: float

    @property
    def silence_limit_s(self) -> float:
        """Silence after which no worker of a machine can be alive."""
        return self.lease_s + SLACK_S


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Received:
    """A message of an agent arrived."""

    agent: bytes
    message: FromAgent
    now_s: float


@dataclass(frozen=True)
class Ticked:
    """Time has passed, and every message that had arrived was handled."""

    now_s: float


@dataclass(frozen=True)
class StackWanted:
    """The stacks of a worker are wanted in its log."""

    rank: int


@dataclass(frozen=True)
class EndWanted:
    """All workers are to end."""


Event = Received | Ticked | StackWanted | EndWanted

# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class SendTo:
    """Send a message to an agent."""

    agent: bytes
    message: ToAgent


@dataclass(frozen=True)
class Tell:
    """Tell the user something."""

    text: str


@dataclass(frozen=True)
class Gathered:
    """Enough machines are there, and were told to start their workers: names, in the order of their ranks."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class WorkerGone:
    """A worker ended on a machine; without an exit code it is lost with its machine, for the reason `detail`."""

    rank: int
    exit_code: int | None
    machine: str
    detail: str = ""


@dataclass(frozen=True)
class Reclaimed:
    """Somebody wants a machine back, and has sent its agent a signal of this name."""

    machine: str
    signal: str


@dataclass(frozen=True)
class GiveUp:
    """The run cannot begin."""

    message: str
    remedy: str
    exit_code: int


@dataclass(frozen=True)
class AllStopped:
    """No worker of this attempt is alive."""


Instruction = SendTo | Tell | Gathered | WorkerGone | Reclaimed | GiveUp | AllStopped


class MachinePhase(Enum):
    """State of a machine in an attempt."""

    EXAMINING = "examining"  # it was asked what is there
    MEMBER = "member"  # it fits, and waits: for others, or as a spare
    RUNNING = "running"  # it was told to start workers
    STOPPED = "stopped"  # it had workers of this attempt, and they are gone


@dataclass
class _Machine:
    greeting: Greeting
    phase: MachinePhase
    number: int  # in the order of joining
    heard_s: float
    first_rank: int = 0
    ended: set[int] = field(default_factory=set)  # local numbers of workers reported as gone
    is_leaving: bool = False
    offset_s: float = 0.0


class RunOfMachines(Enum):
    """State of all machines together."""

    GATHERING = "gathering"
    RUNNING = "running"
    ENDING = "ending"
    OVER = "over"


class Machines:
    """All machines of one attempt.

    Args:
        now_s: the time; the master before this one gave no lease after it.
    """

    def __init__(self, plan: MachinesPlan, now_s: float) -> None:
        self.plan = plan
        self.phase = RunOfMachines.GATHERING
        self._machines: dict[bytes, _Machine] = {}
        self._placed: tuple[_Machine, ...] = ()  # those with workers, in the order of their ranks; also lost ones
        self._names: tuple[str, ...] = ()  # theirs
        self._n_met = 0
        self._begun_s = now_s

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event and return the instructions to perform, in their order."""
        match event:
            case Received(agent, Greeting() as greeting, now_s):
                return self._on_greeting(agent, greeting, now_s)
            case Received(agent, Examined() as examined, now_s):
                return [*self._on_examined(agent, examined, now_s), *self._gather(now_s)]
            case Received(agent, Beat() as beat, now_s):
                return [*self._on_beat(agent, beat, now_s), *self._finish()]
            case Ticked(now_s):
                return [*self._look(now_s), *self._gather(now_s), *self._finish()]
            case StackWanted(rank):
                found = ((a, m) for a, m in self._running() if 0 <= rank - m.first_rank < self._n_each)
                return [SendTo(agent, DumpStack(self.plan.order.attempt, rank)) for agent, _ in found]
            case EndWanted():
                if self.phase is RunOfMachines.OVER:  # given up before a worker was started, or ended already
                    return [AllStopped()]
                self.phase = RunOfMachines.ENDING
                stop = StopWorkers(self.plan.order.attempt)
                return [*(SendTo(agent, stop) for agent, _ in self._running()), *self._finish()]
        raise TypeError(f"unknown event {type(event).__name__}")

    # ------------------------------------------------------------ questions

    def name_of_rank(self, rank: int) -> str:
        """Return the name of the machine of a worker; "" while it has none."""
        place = rank // self._n_each  # another thread asks
        return self._names[place] if place < len(self._names) else ""

    def offset_of_rank(self, rank: int) -> float:
        """Return the seconds by which the master's clock is ahead of that of a worker's machine."""
        place = rank // self._n_each
        return self._placed[place].offset_s if place < len(self._placed) else 0.0

    @property
    def _n_each(self) -> int:
        return self.plan.order.n_workers

    def _running(self) -> list[tuple[bytes, _Machine]]:
        return [(a, m) for a, m in list(self._machines.items()) if m.phase is MachinePhase.RUNNING]

    def _members(self) -> list[tuple[bytes, _Machine]]:
        return [(a, m) for a, m in self._machines.items() if m.phase is MachinePhase.MEMBER]

    def _name(self, machine: _Machine) -> str:
        name = machine.greeting.machine
        is_ambiguous = any(m.greeting.machine == name and m is not machine for m in self._machines.values())
        return f"{name} ({machine.greeting.address})" if is_ambiguous else name

    # ------------------------------------------------------------ messages

    def _on_greeting(self, agent: bytes, greeting: Greeting, now_s: float) -> list[Instruction]:
        known = self._machines.pop(agent, None)
        lost: list[Instruction] = []
        if known is not None and known.phase is MachinePhase.RUNNING:
            lost = self._lose(known, f"machine {self._name(known)} heard nothing of the master and ended its workers")
        number = self._n_met if known is None else known.number
        self._n_met += known is None
        difference = difference_of(greeting, self.plan.expected)
        machine = _Machine(greeting, MachinePhase.EXAMINING, number, now_s)
        if difference is not None:
            return [*lost, *self._refuse(agent, machine, difference)]
        self._machines[agent] = machine
        return [*lost, SendTo(agent, self.plan.examine)]

    def _on_examined(self, agent: bytes, examined: Examined, now_s: float) -> list[Instruction]:
        machine = self._machines.get(agent)
        if machine is None:
            return [SendTo(agent, WhoAreYou())]
        if machine.phase is not MachinePhase.EXAMINING:  # it arrived twice
            return []
        difference = difference_found(examined, self.plan.expected)
        if difference is not None:
            del self._machines[agent]
            return self._refuse(agent, machine, difference)
        machine.phase, machine.heard_s = MachinePhase.MEMBER, now_s
        told = self._describe(machine) if self.phase is RunOfMachines.GATHERING else f"{self._name(machine)} is a spare"
        return [SendTo(agent, Welcome(self.plan.lease_s, examined.number)), Tell(told)]

    def _on_beat(self, agent: bytes, beat: Beat, now_s: float) -> list[Instruction]:
        machine = self._machines.get(agent)
        if machine is None or machine.phase is MachinePhase.EXAMINING:
            return [SendTo(agent, WhoAreYou())]
        if beat.attempt not in ("", self.plan.order.attempt):
            # An order of an earlier master came late: to answer this beat would give those workers a lease.
            del self._machines[agent]
            lost = f"machine {self._name(machine)} has workers of an earlier attempt"
            gone = self._lose(machine, lost) if machine.phase is MachinePhase.RUNNING else []
            return [SendTo(agent, WhoAreYou()), *gone]
        machine.heard_s, machine.offset_s = now_s, beat.offset_s
        found: list[Instruction] = [SendTo(agent, BeatHeard(beat.number, 0.0))]
        if beat.leaving and not machine.is_leaving:
            machine.is_leaving = True
            found.append(Reclaimed(self._name(machine), beat.leaving))
        if machine.phase is not MachinePhase.RUNNING:
            return found
        is_ours = beat.attempt == self.plan.order.attempt
        if self.phase is not RunOfMachines.RUNNING:
            if not is_ours:
                machine.phase = MachinePhase.STOPPED
                return found
            return [*found, SendTo(agent, StopWorkers(self.plan.order.attempt))]
        if not is_ours:
            return [*found, SendTo(agent, self._order_for(machine))]
        if beat.problem:
            return [*found, *self._lose(machine, f"not started on machine {self._name(machine)}: {beat.problem}")]
        return [*found, *self._note_ended(machine, beat)]

    def _note_ended(self, machine: _Machine, beat: Beat) -> Iterable[Instruction]:
        new = sorted((local, code) for local, code in beat.ended.items() if local not in machine.ended)
        if not new:
            return []
        machine.ended.update(local for local, _ in new)
        name = self._name(machine)
        return [WorkerGone(machine.first_rank + local, code, name) for local, code in new]

    # ------------------------------------------------------------ time

    def _look(self, now_s: float) -> list[Instruction]:
        """Forget the machines that are silent for so long that their workers are gone."""
        found: list[Instruction] = []
        for agent, machine in list(self._machines.items()):
            silent_s = now_s - machine.heard_s
            if silent_s <= self.plan.silence_limit_s or machine.phase is MachinePhase.STOPPED:
                continue
            name = self._name(machine)
            del self._machines[agent]
            if machine.phase is MachinePhase.RUNNING:
                found += self._lose(machine, f"machine {name} gave no sign of life for {silent_s:.0f} s")
            elif machine.phase is MachinePhase.MEMBER:
                found.append(Tell(f"{name} gave no sign of life for {silent_s:.0f} s and is forgotten"))
        return found

    def _lose(self, machine: _Machine, detail: str) -> list[Instruction]:
        """Report the workers of a machine that were not reported yet."""
        machine.phase = MachinePhase.STOPPED
        if self.phase is not RunOfMachines.RUNNING:
            return []
        gone = [local for local in range(self._n_each) if local not in machine.ended]
        machine.ended.update(gone)
        return [WorkerGone(machine.first_rank + local, None, self._name(machine), detail) for local in gone]

    def _gather(self, now_s: float) -> list[Instruction]:
        """Start the workers if enough machines are there, or give up."""
        if self.phase is not RunOfMachines.GATHERING:
            return []
        members, needed = self._members(), self.plan.n_machines
        waited_s = now_s - self._begun_s
        if len(members) < needed:
            if waited_s < self.plan.start_timeout_s:
                return []
            self.phase = RunOfMachines.OVER
            there = ", ".join(self._name(machine) for _, machine in members) or "none"
            return [
                GiveUp(
                    f"{len(members)} of {needed} machines joined within {self.plan.start_timeout_s:g} s: {there}",
                    "Start `realrl node` on the others, raise cluster.start_timeout_s, or lower cluster.n_nodes.",
                    EX_TEMPFAIL,
                )
            ]
        previous = self.plan.previous_attempt
        n_clean = sum(machine.greeting.last_attempt == previous for _, machine in members)
        if previous and n_clean < needed and waited_s < self.plan.silence_limit_s:
            return []
        members.sort(key=lambda entry: (_index_of(entry[1]), entry[1].number))
        self.phase = RunOfMachines.RUNNING
        orders: list[Instruction] = []
        for place, (agent, machine) in enumerate(members[:needed]):
            machine.phase, machine.first_rank = MachinePhase.RUNNING, place * self._n_each
            orders.append(SendTo(agent, self._order_for(machine)))
        self._placed = tuple(machine for _, machine in members[:needed])
        self._names = tuple(map(self._name, self._placed))
        spares = [Tell(f"{self._name(machine)} is a spare") for _, machine in members[needed:]]
        return [*orders, Gathered(self._names), *spares]

    def _finish(self) -> list[Instruction]:
        if self.phase is not RunOfMachines.ENDING or self._running():
            return []
        self.phase = RunOfMachines.OVER
        return [AllStopped()]

    def _order_for(self, machine: _Machine) -> StartWorkers:
        return msgspec.structs.replace(self.plan.order, first_rank=machine.first_rank)

    def _refuse(self, agent: bytes, machine: _Machine, difference: Difference) -> list[Instruction]:
        """Turn a machine away; one that is needed ends the run, which would wait in vain."""
        message = f"machine {self._name(machine)} {difference.message}"
        refusal = SendTo(agent, Refused(message, difference.remedy))
        if self.phase is not RunOfMachines.GATHERING or self.plan.previous_attempt:
            return [refusal, Tell(f"refused: {message}")]
        self.phase = RunOfMachines.OVER
        return [refusal, GiveUp(message, difference.remedy, 2)]

    def _describe(self, machine: _Machine) -> str:
        facts, n_there = machine.greeting.facts, len(self._members())
        devices = f"{facts.n_accelerators} CUDA devices, " if facts.n_accelerators else ""
        memory = f", {facts.memory_bytes / 1e9:.0f} GB" if facts.memory_bytes else ""
        cpus = {m.greeting.facts.cpu for _, m in self._members()}
        note = "; its CPU is of another kind than the others', so numbers may differ by rounding"
        return (
            f"machine {self._name(machine)} at {machine.greeting.address} joined ({devices}{facts.n_cores} "
            f"cores{memory}): {n_there} of {self.plan.n_machines}{note if len(cpus) > 1 else ''}"
        )


def with_clock(message: ToAgent, wall_s: float) -> ToAgent:
    """Put the master's wall clock into an answer that tells it, at the moment of its sending."""
    return msgspec.structs.replace(message, now_s=wall_s) if isinstance(message, BeatHeard | Welcome) else message


def _index_of(machine: _Machine) -> float:
    return float("inf") if machine.greeting.index is None else machine.greeting.index

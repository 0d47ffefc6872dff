"""The machines of a run as a doctor sees them, before there is a run: a pure state machine.

    agents:  Greeting ─► Examined ─► ─────────── beats ───────────────────────────────►
    doctor:  GATHERING ──enough joined, or time is up──► OPENING ──doors──► KNOCKING ──all answered──► OVER
                                                            └───────── or time is up ────────────────┘

Invariants:

- Nothing is refused: differences are for the reader of the reports.
- Every pair of machines is tried, in both directions, each machine with itself as well.
- A question is asked again with the answer to every beat, until it is answered: a message may be lost.
- It is over `start_timeout_s` + `ANSWER_S` after its beginning at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from realrl.sched.nodes.machines import Received, SendTo, Tell, Ticked
from realrl.sched.nodes.messages import (
    Beat,
    BeatHeard,
    Door,
    DoorOpened,
    Examine,
    Examined,
    FromAgent,
    Greeting,
    Knock,
    Knocked,
    OpenDoor,
    Welcome,
    WhoAreYou,
)

ANSWER_S = 20.0  # for all questions
_CLOCK_BEATS = 3  # round trips by which a clock is compared


@dataclass(frozen=True)
class InspectionPlan:
    """Questions of an inspection, and the number of machines that are asked."""

    n_machines: int
    examine: Examine
    lease_s: float
    start_timeout_s: float


@dataclass(frozen=True)
class MachineReport:
    """Answers of one machine.

    Attributes:
        name: its host name; with its address where several have the same.
        examined: what it found; None if it did not answer.
        offset_s, offset_error_s: see `Beat`.
        seconds: name of a machine -> time until its word came through a connection.
        problems: name of a machine that it could not reach -> reason.
    """

    name: str
    greeting: Greeting
    examined: Examined | None
    offset_s: float
    offset_error_s: float
    seconds: Mapping[str, float]
    problems: Mapping[str, str]


@dataclass(frozen=True)
class Concluded:
    """Everything was asked."""


Instruction = SendTo | Tell | Concluded


class InspectionPhase(Enum):
    """Question that is asked now."""

    GATHERING = "gathering"
    OPENING = "opening"
    KNOCKING = "knocking"
    OVER = "over"


@dataclass
class _Asked:
    greeting: Greeting
    number: int  # in the order of joining
    examined: Examined | None = None
    n_beats: int = 0
    offset_s: float = 0.0
    offset_error_s: float = math.inf
    opened: DoorOpened | None = None
    knocked: Knocked | None = None


class Inspection:
    """The questions to all machines."""

    def __init__(self, plan: InspectionPlan, now_s: float) -> None:
        self.plan = plan
        self.phase = InspectionPhase.GATHERING
        self._asked: dict[bytes, _Asked] = {}
        self._n_met = 0
        self._deadline_s = now_s + plan.start_timeout_s

    def handle(self, event: Received | Ticked) -> list[Instruction]:
        """Take in one event and return the instructions to perform, in their order."""
        if self.phase is InspectionPhase.OVER:
            return []
        found: list[Instruction] = []
        if isinstance(event, Received):
            found = self._on_message(event.agent, event.message)
        return [*found, *self._go_on(event.now_s)]

    def reports(self) -> tuple[MachineReport, ...]:
        """Return what every machine told, in the order of their indices, or of joining."""
        return tuple(self._report(one) for one in self._in_order())

    # ------------------------------------------------------------ messages

    def _on_message(self, agent: bytes, message: FromAgent) -> list[Instruction]:
        if isinstance(message, Greeting):
            if agent not in self._asked and self.phase is not InspectionPhase.GATHERING:
                return []  # it comes too late; it hears of the end
            number = self._n_met if agent not in self._asked else self._asked[agent].number
            self._n_met += agent not in self._asked
            self._asked[agent] = _Asked(message, number)
            return [SendTo(agent, self.plan.examine)]
        asked = self._asked.get(agent)
        if asked is None:
            return [SendTo(agent, WhoAreYou())]
        match message:
            case Examined():
                is_new, asked.examined = asked.examined is None, message
                told = [Tell(self._describe(asked))] if is_new else []
                return [SendTo(agent, Welcome(self.plan.lease_s, message.number)), *told]
            case Beat():
                asked.n_beats += 1
                asked.offset_s, asked.offset_error_s = message.offset_s, message.offset_error_s
                return [SendTo(agent, BeatHeard(message.number, 0.0)), *self._question(agent, asked)]
            case DoorOpened():
                asked.opened = message
            case Knocked():
                asked.knocked = message
        return []

    def _question(self, agent: bytes, asked: _Asked) -> list[Instruction]:
        if self.phase is InspectionPhase.OPENING and asked.opened is None:
            return [SendTo(agent, OpenDoor())]
        if self.phase is InspectionPhase.KNOCKING and asked.knocked is None:
            return [SendTo(agent, Knock(self._doors()))]
        return []

    # ------------------------------------------------------------ phases

    def _go_on(self, now_s: float) -> list[Instruction]:
        """Begin the next phase if this one is done."""
        there = [one for one in self._asked.values() if one.examined is not None]
        is_late = now_s >= self._deadline_s
        match self.phase:
            case InspectionPhase.GATHERING if len(there) >= self.plan.n_machines or is_late:
                self._deadline_s = now_s + ANSWER_S
                return self._begin(InspectionPhase.OPENING if there else InspectionPhase.OVER)
            case InspectionPhase.OPENING if all(one.opened for one in there) or is_late:
                return self._begin(InspectionPhase.KNOCKING)
            case InspectionPhase.KNOCKING if is_late or all(
                one.knocked and one.n_beats >= _CLOCK_BEATS for one in there
            ):
                return self._begin(InspectionPhase.OVER)
        return []

    def _begin(self, phase: InspectionPhase) -> list[Instruction]:
        self.phase = phase
        if phase is InspectionPhase.OVER:
            return [Concluded()]
        return [said for agent, one in self._asked.items() if one.examined for said in self._question(agent, one)]

    def _doors(self) -> tuple[Door, ...]:
        return tuple(one.opened.door for one in self._in_order() if one.opened and one.opened.door)

    # ------------------------------------------------------------ what they told

    def _in_order(self) -> list[_Asked]:
        def place(one: _Asked) -> tuple[float, int]:
            return math.inf if one.greeting.index is None else one.greeting.index, one.number

        return sorted(self._asked.values(), key=place)

    def _name(self, one: _Asked) -> str:
        name = one.greeting.machine
        is_ambiguous = sum(other.greeting.machine == name for other in self._asked.values()) > 1
        return f"{name} ({one.greeting.address})" if is_ambiguous else name

    def _describe(self, one: _Asked) -> str:
        n_there = sum(other.examined is not None for other in self._asked.values())
        where = f"machine {one.greeting.machine} at {one.greeting.address}"
        return f"{where} joined: {n_there} of {self.plan.n_machines}"

    def _report(self, one: _Asked) -> MachineReport:
        seconds, problems = dict[str, float](), dict[str, str]()
        for other in self._in_order():
            if other.examined is None:
                continue
            name, door = self._name(other), None if other.opened is None else other.opened.door
            if door is None:
                problems[name] = other.opened.problem if other.opened else "it opened no port"
            elif one.knocked is None:
                problems[name] = f"{self._name(one)} did not answer"
            elif door.place in one.knocked.seconds:
                seconds[name] = one.knocked.seconds[door.place]
            else:
                problems[name] = one.knocked.problems.get(door.place, "it was not tried")
        return MachineReport(
            self._name(one), one.greeting, one.examined, one.offset_s, one.offset_error_s, seconds, problems
        )

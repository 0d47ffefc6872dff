"""An agent, which starts the workers of its machine: a pure state machine.

    SEEKING ──Welcome──► MEMBER ──StartWorkers──► RUNNING ──StopWorkers──► MEMBER
       ▲                    │                        │
       └──────── the lease is over, or another master asks who this is: workers are ended first
    anywhere: Refused, Dismissed, a signal, patience is over ──► OVER
    SEEKING again: nobody listens at the master's address any more ──► OVER

The lease: a beat that the master has answered allows workers to live for `lease_s` from the moment of its sending.
`realrl run` holds the master's port while it lives, also while it starts a master again. A port that is closed is the
end of both; a cut network or a machine without power closes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec

from realrl.sched.nodes.clocks import ClockOffset
from realrl.sched.nodes.messages import (
    BEAT_S,
    Beat,
    BeatHeard,
    Dismissed,
    Door,
    DoorOpened,
    DumpStack,
    Examine,
    Examined,
    FromAgent,
    Greeting,
    Knock,
    Knocked,
    OpenDoor,
    Refused,
    StartWorkers,
    StopWorkers,
    ToAgent,
    Welcome,
    WhoAreYou,
)

_GREET_AGAIN_S = 2.0
_PROBE_S = 0.5
_CLOSED_PROBES = 2  # in a row that prove that the run is over: one may be the reset of a connection
_KEPT_BEATS = 64
_EX_TEMPFAIL = 75


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Heard:
    """A message of the master arrived; `wall_s` is this machine's wall clock then."""

    message: ToAgent
    now_s: float
    wall_s: float


@dataclass(frozen=True)
class Looked:
    """Findings of `Look`."""

    examined: Examined
    now_s: float
    wall_s: float


@dataclass(frozen=True)
class WorkersEnded:
    """Workers ended by themselves: local number -> exit code."""

    ended: Mapping[int, int]
    now_s: float


@dataclass(frozen=True)
class StartFailed:
    """The workers could not be started."""

    problem: str
    now_s: float


@dataclass(frozen=True)
class Signalled:
    """A signal came: somebody wants the machine back, or at once (`is_urgent`)."""

    name: str
    exit_code: int
    is_urgent: bool
    now_s: float


@dataclass(frozen=True)
class Answered:
    """Findings of `Open` or `Try`."""

    answer: DoorOpened | Knocked


@dataclass(frozen=True)
class Probed:
    """Answer to `Probe`: `is_closed` if the master's machine said that nobody listens there."""

    is_closed: bool


@dataclass(frozen=True)
class Ticked:
    """Time has passed."""

    now_s: float
    wall_s: float


Event = Heard | Looked | WorkersEnded | StartFailed | Signalled | Answered | Probed | Ticked

# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class Say:
    """Send a message to the master."""

    message: FromAgent


@dataclass(frozen=True)
class Look:
    """Look at what the master asks for."""

    examine: Examine


@dataclass(frozen=True)
class Start:
    """Start workers."""

    order: StartWorkers


@dataclass(frozen=True)
class Stop:
    """End all workers at once."""


@dataclass(frozen=True)
class Renew:
    """Workers may live until this time."""

    until_s: float


@dataclass(frozen=True)
class Dump:
    """Make a worker write its stacks to its log."""

    rank: int


@dataclass(frozen=True)
class Open:
    """Listen on a free port, unless one is open."""


@dataclass(frozen=True)
class Try:
    """Connect to other machines."""

    doors: tuple[Door, ...]


@dataclass(frozen=True)
class Probe:
    """Find out whether somebody listens at the master's address."""


@dataclass(frozen=True)
class Note:
    """Tell the user something."""

    text: str


@dataclass(frozen=True)
class Leave:
    """End with this exit code; `text` tells the reason, if it is not empty."""

    exit_code: int
    text: str = ""
    remedy: str = ""


Instruction = Say | Look | Start | Stop | Renew | Dump | Open | Try | Probe | Note | Leave


class AgentPhase(Enum):
    """State of an agent."""

    SEEKING = "seeking"  # greets until a master welcomes it
    MEMBER = "member"  # beats
    RUNNING = "running"  # beats, and has workers
    OVER = "over"


class Agent:
    """One machine of a run.

    Args:
        greeting: what this agent says of itself.
        place: address of the master, for messages.
        patience_s: time without a master after which the agent gives up.
        outlives_run: wait so long also where `realrl run` was killed, as somebody may start it again.
        now_s: the time.
    """

    def __init__(
        self, greeting: Greeting, place: str, *, patience_s: float, outlives_run: bool = False, now_s: float
    ) -> None:
        self.phase = AgentPhase.SEEKING
        self._greeting = greeting
        self._place = place
        self._patience_s = patience_s
        self._outlives_run = outlives_run
        self._probed_s = now_s
        self._n_closed = 0  # probes in a row
        self._heard_s = now_s
        self._said_s = float("-inf")
        self._lease_s = 0.0
        self._lease_end_s = now_s
        self._was_member = False
        self._attempt = ""
        self._first_rank = 0
        self._ended: dict[int, int] = {}
        self._problem = self._leaving = ""
        self._number = 0
        self._sent: dict[int, tuple[float, float]] = {}  # number of what was sent -> when, by both clocks
        self._clock = ClockOffset()  # of the master

    @property
    def lease_end_s(self) -> float:
        """Time until which workers may live."""
        return self._lease_end_s

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event and return the instructions to perform, in their order."""
        if self.phase is AgentPhase.OVER:
            return []
        match event:
            case Heard(message, now_s, wall_s):
                self._heard_s = now_s
                return self._on_message(message, now_s, wall_s)
            case Looked(examined, now_s, wall_s):
                self._said_s = now_s
                return [Say(msgspec.structs.replace(examined, number=self._count(now_s, wall_s)))]
            case WorkersEnded(ended, _):
                self._ended |= ended
                self._said_s = float("-inf")  # a beat is due
            case StartFailed(problem, _):
                self._problem = problem
                self._said_s = float("-inf")
            case Signalled():
                return self._on_signal(event)
            case Answered(answer):
                return [Say(answer)]
            case Probed(is_closed):
                return self._on_probed(is_closed)
            case Ticked(now_s, wall_s):
                return self._on_tick(now_s, wall_s)
        return []

    # ------------------------------------------------------------ messages

    def _on_message(self, message: ToAgent, now_s: float, wall_s: float) -> list[Instruction]:
        match message:
            case Examine():
                return [Look(message)] if self.phase is AgentPhase.SEEKING else []
            case Welcome(lease_s, number, master_s) if self.phase is AgentPhase.SEEKING and number in self._sent:
                # A master that is gone meanwhile may have sent it: the lease is what that one gave.
                self._note_clock(number, master_s, now_s, wall_s)
                self.phase, self._was_member = AgentPhase.MEMBER, True
                self._lease_s, self._lease_end_s = lease_s, self._sent[number][0] + lease_s
                return [Note("joined; waiting for the other machines")]
            case Refused(text, remedy):
                return self._leave(2, text, remedy)
            case Dismissed(exit_code):
                return self._leave(exit_code)
            case WhoAreYou() if self.phase is not AgentPhase.SEEKING:
                return self._seek("another master runs there now")
            case BeatHeard(number, master_s) if number in self._sent:
                return self._on_heard(number, master_s, now_s, wall_s)
            case StartWorkers() if self.phase is AgentPhase.MEMBER and message.attempt != self._greeting.last_attempt:
                # An order that was long on its way comes from a master that has given this machine up.
                return self._start(message) if now_s < self._lease_end_s else []
            case StopWorkers(attempt) if self.phase is AgentPhase.RUNNING and attempt == self._attempt:
                self._forget_workers()
                self.phase, self._said_s = AgentPhase.MEMBER, float("-inf")
                return [Stop()]
            case DumpStack(attempt, rank) if self.phase is AgentPhase.RUNNING and attempt == self._attempt:
                return [Dump(rank - self._first_rank)]
            case OpenDoor() if self.phase is AgentPhase.MEMBER:
                return [Open()]
            case Knock(doors) if self.phase is AgentPhase.MEMBER:
                return [Try(doors)]
        return []

    def _on_heard(self, number: int, master_s: float, now_s: float, wall_s: float) -> list[Instruction]:
        self._note_clock(number, master_s, now_s, wall_s)
        self._lease_end_s = max(self._lease_end_s, self._sent[number][0] + self._lease_s)
        return [Renew(self._lease_end_s)] if self.phase is AgentPhase.RUNNING else []

    def _note_clock(self, number: int, master_s: float, now_s: float, wall_s: float) -> None:
        sent_s, sent_wall_s = self._sent[number]
        self._clock.note(sent_s=sent_wall_s, heard_s=wall_s, answered_s=master_s, delay_s=now_s - sent_s)

    def _start(self, order: StartWorkers) -> list[Instruction]:
        self.phase, self._attempt, self._first_rank = AgentPhase.RUNNING, order.attempt, order.first_rank
        last = order.first_rank + order.n_workers - 1
        self._said_s = float("-inf")
        which = f"worker {last}" if order.n_workers == 1 else f"workers {order.first_rank} to {last}"
        return [Note(f"starting {which}"), Start(order), Renew(self._lease_end_s)]

    # ------------------------------------------------------------ time and signals

    def _on_tick(self, now_s: float, wall_s: float) -> list[Instruction]:
        if self.phase is not AgentPhase.SEEKING and now_s >= self._lease_end_s:
            return self._seek(f"no word from the master for {self._lease_s:g} s")
        if now_s - self._heard_s >= self._patience_s:
            exit_code = _EX_TEMPFAIL if self._was_member else 1
            text = f"no master answered at {self._place} within {self._patience_s:g} s"
            return self._leave(exit_code, text, "Is `realrl run` with launcher=external going on there?")
        if self.phase is AgentPhase.SEEKING:
            return self._look_for_master(now_s)
        return self._beat(now_s, wall_s) if now_s - self._said_s >= BEAT_S else []

    def _look_for_master(self, now_s: float) -> list[Instruction]:
        said: list[Instruction] = []
        if now_s - self._said_s >= _GREET_AGAIN_S:
            self._said_s = now_s
            said.append(Say(self._greeting))
        if self._was_member and not self._outlives_run and now_s - self._probed_s >= _PROBE_S:
            self._probed_s = now_s
            said.append(Probe())
        return said

    def _on_probed(self, is_closed: bool) -> list[Instruction]:
        self._n_closed = self._n_closed + 1 if is_closed and self.phase is AgentPhase.SEEKING else 0
        if self._n_closed < _CLOSED_PROBES:
            return []
        return self._leave(
            _EX_TEMPFAIL,
            f"the run at {self._place} is gone: nobody listens there any more",
            "With --patience S an agent waits for a run that is started again.",
        )

    def _beat(self, now_s: float, wall_s: float) -> list[Instruction]:
        self._said_s = now_s
        beat = Beat(
            number=self._count(now_s, wall_s),
            attempt=self._attempt,
            ended=dict(self._ended),
            problem=self._problem,
            leaving=self._leaving,
            offset_s=self._clock.offset_s,
            offset_error_s=self._clock.error_s,
        )
        return [Say(beat)]

    def _count(self, now_s: float, wall_s: float) -> int:
        """Return the number of what is sent now."""
        self._number += 1
        self._sent[self._number] = now_s, wall_s
        self._sent.pop(self._number - _KEPT_BEATS, None)
        return self._number

    def _on_signal(self, event: Signalled) -> list[Instruction]:
        if event.is_urgent or self._leaving or self.phase is not AgentPhase.RUNNING:
            return self._leave(event.exit_code, f"ended by {event.name}")
        self._leaving, self._said_s = event.name, float("-inf")
        return [Note(f"{event.name}: the run is told to save and to end; a second signal ends the workers at once")]

    # ------------------------------------------------------------ ends

    def _seek(self, why: str) -> list[Instruction]:
        """Begin anew, without workers."""
        if self._leaving:  # nobody is there to save the run
            return self._leave(_EX_TEMPFAIL, f"ended by {self._leaving}: {why}")
        had_workers = self.phase is AgentPhase.RUNNING
        self._forget_workers()
        self.phase, self._said_s = AgentPhase.SEEKING, float("-inf")
        return [Stop(), Note(f"{why}: the workers here were ended")] if had_workers else []

    def _forget_workers(self) -> None:
        if self._attempt:
            self._greeting = msgspec.structs.replace(self._greeting, last_attempt=self._attempt)
        self._attempt, self._problem = "", ""
        self._ended = {}

    def _leave(self, exit_code: int, text: str = "", remedy: str = "") -> list[Instruction]:
        had_workers = self.phase is AgentPhase.RUNNING
        self.phase = AgentPhase.OVER
        return [*([Stop()] if had_workers else []), Leave(exit_code, text, remedy)]

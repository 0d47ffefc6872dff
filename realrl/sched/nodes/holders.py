"""Holders of agents on a Ray cluster: what a run asks of it, and what is done when an agent or its machine goes.

Every place of a run, one on each machine, has a holder: an actor that starts one agent and waits for its end.

    WANTED ──AskHolder──► ASKED ──HolderReady──► SERVING ──AgentEnded, by itself──► ENDED ──► OVER
       ▲                    │                     ▲   │ └──AgentEnded, by a signal──► HURT ──┐
       └──── HolderLost ────┴─────────────────────┼───┘                                      │
                                                  └────────────── StartAgent ────────────────┘

The master knows nothing of this: it sees machines that come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from realrl.errors import counted
from realrl.sched.nodes.differences import Difference

_AGAIN_S = 1.0  # until the next try; twice as long after each that failed
_MOST_AGAIN_S = 60.0
_SERVED_S = 30.0  # an agent that lived for so long had started well
_END_S = 10.0  # in which the end of an agent may be that of the run


@dataclass(frozen=True)
class RayMachine:
    """A living node of a Ray cluster: what it has, whether or not others use it."""

    name: str
    address: str
    n_cpus: float
    n_gpus: float


@dataclass(frozen=True)
class Need:
    """Machines that a run asks a cluster for, and CPUs and GPUs of each of them."""

    n_machines: int
    n_cpus: int
    n_gpus: int

    def __str__(self) -> str:
        return _amount(self.n_cpus, self.n_gpus)


def shortage(cluster: str, machines: Sequence[RayMachine], need: Need) -> Difference | None:
    """Return why a cluster could never give what a run needs; None if it can."""
    if len(machines) < need.n_machines:
        return Difference(
            f"the Ray cluster at {cluster} has {counted(len(machines), 'machine')}, "
            f"and the plan needs {need.n_machines}",
            f"Add machines with `ray start --address={cluster}`, or use cluster.n_nodes={len(machines)}.",
        )
    fit = [machine for machine in machines if machine.n_cpus >= need.n_cpus and machine.n_gpus >= need.n_gpus]
    if len(fit) >= need.n_machines:
        return None
    there = ", ".join(f"{one.name} {_amount(one.n_cpus, one.n_gpus)}" for one in machines if one not in fit)
    return Difference(
        f"{len(fit)} of the {need.n_machines} machines that the plan needs have {need} in the Ray cluster at "
        f"{cluster}; the others: {there}",
        "Use a smaller cluster.n_devices_per_node or cluster.ray_cpus, or start Ray there with more.",
    )


def _amount(n_cpus: float, n_gpus: float) -> str:
    cpus = f"{n_cpus:g} CPU{'' if n_cpus == 1 else 's'}"
    return f"{cpus} and {n_gpus:g} GPU{'' if n_gpus == 1 else 's'}" if n_gpus else cpus


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class HolderReady:
    """The holder of a place is up, on this machine."""

    place: int
    machine: str


@dataclass(frozen=True)
class AgentEnded:
    """An agent ended; negative exit codes are signals. `said` is its error or last line."""

    place: int
    exit_code: int
    said: str = ""


@dataclass(frozen=True)
class HolderLost:
    """The holder of a place is gone or could not start, for the reason `why`."""

    place: int
    why: str


Happening = HolderReady | AgentEnded | HolderLost

# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class AskHolder:
    """Ask Ray for the holder of a place; an earlier one counts for nothing."""

    place: int


@dataclass(frozen=True)
class StartAgent:
    """Have the holder of a place start its agent."""

    place: int


@dataclass(frozen=True)
class Tell:
    """Tell the user something."""

    text: str


@dataclass(frozen=True)
class AllServe:
    """All agents were started for the first time, on these machines, in the order of their places."""

    machines: tuple[str, ...]


@dataclass(frozen=True)
class Refuse:
    """The run cannot begin."""

    message: str
    remedy: str


Instruction = AskHolder | StartAgent | Tell | AllServe | Refuse


class Phase(Enum):
    """State of a place."""

    WANTED = "wanted"  # a holder is to be asked for
    ASKED = "asked"
    SERVING = "serving"  # its agent runs
    HURT = "hurt"  # its agent was killed
    ENDED = "ended"  # its agent ended; whether that is the run's end will be seen
    OVER = "over"


@dataclass
class _Place:
    phase: Phase = Phase.WANTED
    since_s: float = float("-inf")
    machine: str = ""
    again_s: float = 0.0  # until the next try
    end: AgentEnded | None = None

    def fail(self, phase: Phase, now_s: float) -> None:
        """Wait before the next try."""
        had_started = self.phase is Phase.SERVING and now_s - self.since_s >= _SERVED_S
        self.again_s = _AGAIN_S if had_started else min(_MOST_AGAIN_S, 2 * self.again_s or _AGAIN_S)
        self.phase, self.since_s = phase, now_s


class Holders:
    """All places of a run.

    Args:
        n_places: their number.
        cluster: address of the cluster, for messages.
    """

    def __init__(self, n_places: int, cluster: str) -> None:
        self._places = [_Place() for _ in range(n_places)]
        self._cluster = cluster
        self._has_begun = False

    def machine(self, place: int) -> str:
        """Return the name of the machine of a place; "" while it has none."""
        return self._places[place].machine

    def handle(self, happening: Happening, now_s: float) -> list[Instruction]:
        """Take in what happened and return the instructions to perform."""
        place = self._places[happening.place]
        match happening:
            case HolderReady(number, machine):
                place.phase, place.since_s, place.machine = Phase.SERVING, now_s, machine
                return [StartAgent(number), *self._begin()]
            case AgentEnded(_, exit_code, _) if exit_code < 0:
                place.fail(Phase.HURT, now_s)
                return [Tell(f"the agent on {place.machine} was killed by signal {-exit_code}: it is started again")]
            case AgentEnded():
                place.phase, place.since_s, place.end = Phase.ENDED, now_s, happening
                return []
            case HolderLost(number, why) if not self._has_begun:
                place.phase = Phase.OVER
                where = f"machine {number} in the cluster at {self._cluster}"
                remedy = "realrl and Ray must be installed on every machine of the cluster."
                return [Refuse(f"Ray could not start the agent of {where}: {why}", remedy)]
            case HolderLost(_, why):
                machine = place.machine
                lost = f"Ray has lost the agent on {machine}" if machine else "Ray could not place an agent"
                place.fail(Phase.WANTED, now_s)
                place.machine = ""
                return [Tell(f"{lost} ({why}): it is started again where there is room")]
        raise TypeError(f"unknown event {type(happening).__name__}")

    def tick(self, now_s: float) -> list[Instruction]:
        """Return what is due."""
        due: list[Instruction] = []
        for number, place in enumerate(self._places):
            waited_s = now_s - place.since_s
            if place.phase is Phase.WANTED and waited_s >= place.again_s:
                place.phase, place.since_s = Phase.ASKED, now_s
                due.append(AskHolder(number))
            elif place.phase is Phase.HURT and waited_s >= place.again_s:
                place.phase, place.since_s = Phase.SERVING, now_s
                due.append(StartAgent(number))
            elif place.phase is Phase.ENDED and waited_s >= _END_S and place.end is not None:
                place.phase = Phase.OVER
                said = f": {place.end.said}" if place.end.said else ""
                due.append(Tell(f"the agent on {place.machine} ended with exit code {place.end.exit_code}{said}"))
        return due

    def _begin(self) -> list[Instruction]:
        if self._has_begun or any(place.phase is not Phase.SERVING for place in self._places):
            return []
        self._has_begun = True
        return [AllServe(tuple(place.machine for place in self._places))]

"""Messages between the master and the agents, one on each machine, which start the workers there.

    agent                                   master
    Greeting (who, facts)        ──────►
                                 ◄──────    Examine (what to look at)
    Examined (what is there)     ──────►
                                 ◄──────    Welcome, or Refused
    Beat (state), every second   ──────►
                                 ◄──────    BeatHeard: the lease goes on
                                 ◄──────    StartWorkers, StopWorkers, DumpStack
                                 ◄──────    Dismissed: the run is over
                                 ◄──────    OpenDoor, Knock: from a doctor
    DoorOpened, Knocked          ──────►

A connection may break and lose what was under way. So a beat carries the whole state of an agent, its answer repeats
what the master wants until the state shows it, and everything may arrive twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

NODES_VERSION = 2
BEAT_S = 1.0


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a machine that its agent knows without being asked.

    Attributes:
        versions: package or "python" -> version.
        digests: name of what must be equal everywhere -> digest.
        n_accelerators: devices on which workers can compute, besides the CPU.
        n_cores: cores that the agent may use.
        memory_bytes: of the machine, or of the agent's share; 0 if it is not known.
        cpu: kind and instruction sets of the processor, to compare.
        cpu_features: those instruction sets that kernels of realrl and torch choose by.
        accelerator: name of the first device.
        accelerator_bytes: memory of the smallest one; 0 if it is not known.
    """

    versions: Mapping[str, str]
    digests: Mapping[str, str]
    n_accelerators: int = 0
    n_cores: int = 1
    memory_bytes: int = 0
    cpu: str = ""
    cpu_features: tuple[str, ...] = ()
    accelerator: str = ""
    accelerator_bytes: int = 0


class Greeting(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An agent is there.

    Attributes:
        machine: host name.
        pid: process of the agent.
        address: of the machine, on its route to the master.
        facts: see `NodeFacts`.
        index: number of the machine among those of its job, where a launcher gave one.
        n_allocated: machines of that job; 0 if it is not known.
        last_attempt: the attempt whose workers ran here; none of them is left.
    """

    machine: str
    pid: int
    address: str
    facts: NodeFacts
    index: int | None = None
    n_allocated: int = 0
    last_attempt: str = ""
    version: int = NODES_VERSION


class Examined(msgspec.Struct, frozen=True, tag=True):
    """Findings of `Examine`.

    Attributes:
        nonce: content of the master's file in the run folder; empty if it is not there.
        problem: reason for which workers could not run here, or "".
        digests: path -> digest of each file that is there.
        free_bytes: folder -> free space there: the run's folder, and shared memory.
        number: counts what the agent sends; the answer repeats it.
    """

    nonce: str
    problem: str
    digests: Mapping[str, str]
    free_bytes: Mapping[str, int] = {}
    number: int = 0


class Beat(msgspec.Struct, frozen=True, tag=True):
    """State of an agent.

    Attributes:
        number: counts the beats.
        attempt: the attempt whose workers were started here, until they are gone; or "".
        ended: local number of a worker that ended -> exit code; negative ones are signals.
        problem: reason for which the workers could not be started, or "".
        leaving: name of the signal by which somebody wants this machine back, or "".
        offset_s: master's wall clock minus the machine's, as far as the agent knows.
        offset_error_s: most by which that is wrong; infinite before it was measured.
    """

    number: int
    attempt: str = ""
    ended: Mapping[int, int] = {}
    problem: str = ""
    leaving: str = ""
    offset_s: float = 0.0
    offset_error_s: float = float("inf")


class Door(msgspec.Struct, frozen=True):
    """A free port of a machine, where somebody listens: ``HOST:PORT``, and what is said to those who connect."""

    place: str
    word: str


class DoorOpened(msgspec.Struct, frozen=True, tag=True):
    """Other machines can try to connect to this one; or the reason for which they cannot."""

    door: Door | None
    problem: str = ""


class Knocked(msgspec.Struct, frozen=True, tag=True):
    """Outcome for each door of `Knock`.

    Attributes:
        seconds: place of each that opened -> time until its word was there.
        problems: place of each other -> reason.
    """

    seconds: Mapping[str, float]
    problems: Mapping[str, str]


FromAgent = Greeting | Examined | Beat | DoorOpened | Knocked


class Examine(msgspec.Struct, frozen=True, tag=True):
    """Look at what the run needs.

    Attributes:
        run_dir: folder of the run.
        nonce_file: name of a file in it whose content only who shares the folder can tell.
        directory: working directory of the workers.
        files: paths of files whose content must be that of the master's.
    """

    run_dir: str
    nonce_file: str
    directory: str
    files: tuple[str, ...] = ()


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The machine belongs to the run, by what it sent as `number`: its lease begins with that, and beats renew it.

    `now_s` is the master's wall clock.
    """

    lease_s: float
    number: int
    now_s: float = 0.0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The machine cannot take part; the agent ends."""

    message: str
    remedy: str = ""


class WhoAreYou(msgspec.Struct, frozen=True, tag=True):
    """A beat came from an agent that this master has not met: it greets, when its workers are gone."""


class BeatHeard(msgspec.Struct, frozen=True, tag=True):
    """The master has heard beat `number`: the lease is `lease_s` from its sending on; `now_s` is its wall clock."""

    number: int
    now_s: float


class StartWorkers(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Start workers `first_rank` and following, one for each device.

    Attributes:
        attempt: mark of this attempt of the run.
        admission: for the workers, with the master's addresses.
        host: dotted path of the factory of each worker's host.
        device: "cpu" or "cuda".
        environment: variables of all workers.
    """

    attempt: str
    first_rank: int
    n_workers: int
    admission: bytes
    host: str
    run_dir: str
    directory: str
    device: str = "cpu"
    environment: Mapping[str, str] = {}


class StopWorkers(msgspec.Struct, frozen=True, tag=True):
    """End the workers at once."""

    attempt: str


class DumpStack(msgspec.Struct, frozen=True, tag=True):
    """Make a worker write its stacks to its log; `rank` is global."""

    attempt: str
    rank: int


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """The run is over; the agent ends with the run's exit code."""

    exit_code: int


class OpenDoor(msgspec.Struct, frozen=True, tag=True):
    """Listen on a free port."""


class Knock(msgspec.Struct, frozen=True, tag=True):
    """Connect to all of these."""

    doors: tuple[Door, ...]


ToAgent = (
    Examine
    | Welcome
    | Refused
    | WhoAreYou
    | BeatHeard
    | StartWorkers
    | StopWorkers
    | DumpStack
    | Dismissed
    | OpenDoor
    | Knock
)

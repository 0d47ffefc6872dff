"""Messages between `realrl run`, the keeper of its machines on a Ray cluster, and the agents there.

realrl run                 keeper                        agent, below an actor of Ray
KeeperStart   ──stdin──►
              ◄──stdin── Connected, Told, Placed or Refusal
                           AgentStart    ──an actor's method, stdin──►
"""

from __future__ import annotations

import msgspec

AUTO = "auto"  # address: whichever cluster runs on this machine
HOW_TO_START = "Start one with `ray start --head`, or name one by cluster.ray_address=HOST:PORT or RAY_ADDRESS."


class AgentStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start message of an agent, from the keeper by way of its holder; so the key is in no argument and no log.

    Attributes:
        place: where the master listens.
        index: number of the machine.
        n_threads: compute threads of each worker, unless the machine's environment says.
    """

    place: str
    key: bytes
    index: int
    n_machines: int
    n_threads: int

    def __repr__(self) -> str:
        return f"AgentStart({self.place}, {self.index})"


class KeeperStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start message of a keeper, from `realrl run`.

    Attributes:
        address: of the cluster, as the user gave it; "auto" looks for one on this machine.
        name: of the placement group, for Ray's own lists.
        n_machines: machines that the run needs, each with `n_cpus` and `n_gpus`.
        start_timeout_s: time in which Ray must give them.
        agent: for each agent, with its own index.
    """

    address: str
    name: str
    n_machines: int
    n_cpus: int
    n_gpus: int
    start_timeout_s: float
    agent: AgentStart


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The keeper is a driver of the cluster at this address."""

    address: str


class Told(msgspec.Struct, frozen=True, tag=True):
    """Something for the user to read."""

    text: str


class Placed(msgspec.Struct, frozen=True, tag=True):
    """Every machine has its agent."""

    machines: tuple[str, ...]


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The run cannot have its machines; `exit_code` is 2, or 75 where another time may do."""

    message: str
    remedy: str
    exit_code: int


News = Connected | Told | Placed | Refusal

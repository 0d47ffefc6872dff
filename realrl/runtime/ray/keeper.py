"""The keeper: a process of `realrl run` that has the machines of a run on a Ray cluster, as the driver of a job of Ray.

    stdin ── start, end ──►┌────────┐──► Cluster: hold, serve
                           │ Keeper │
    stdin ◄─ what to tell ─└────────┘◄── Cluster: news

It is a process of its own, because Ray takes over the signals and the output of a driver, and ends what a driver
has started when the driver ends. So agents end with this process, and this process with `realrl run`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from realrl.errors import MachinesError, UsageError
from realrl.runtime.output.logs import logging_to
from realrl.runtime.processes.lifeline import die_with_parent, framed, read_framed, take_stdin
from realrl.runtime.ray.cluster import Cluster, RayCluster
from realrl.runtime.ray.messages import Connected, KeeperStart, News, Placed, Refusal, Told
from realrl.sched.nodes.holders import (
    AgentEnded,
    AllServe,
    AskHolder,
    Holders,
    Instruction,
    Need,
    Refuse,
    StartAgent,
    Tell,
    shortage,
)

_TURN_S = 0.2
_WAIT_TOLD_S = 2.0  # of waiting for Ray before the user is told
_LAST_WORDS_S = 3.0  # for agents to end by themselves, when the run is over
_RELEASE_S = 10.0

_log = logging.getLogger("realrl.runtime.ray.keeper")  # it is run as a program, whose name is another


class Keeper:
    """Keeps an agent on each machine, until the run is over.

    Args:
        tell: sends news to `realrl run`.
        is_over: True when `realrl run` has ended, or has no use for the machines any more.
    """

    def __init__(
        self, start: KeeperStart, cluster: Cluster, *, tell: Callable[[News], None], is_over: Callable[[], bool]
    ) -> None:
        self._start = start
        self._cluster = cluster
        self._tell = tell
        self._is_over = is_over
        self._n_serving = 0
        self._is_refused = False

    def run(self) -> None:
        """Get the machines, and start agents there as long as the run goes on."""
        try:
            address = self._cluster.connect(self._start.address)
            self._tell(Connected(address))
            self._reserve(address)
            self._keep(Holders(self._start.n_machines, address))
        except (UsageError, MachinesError) as error:
            self._tell(Refusal(error.message, error.remedy or "", error.exit_code))
        finally:
            self._cluster.release()

    def _reserve(self, address: str) -> None:
        start = self._start
        need = Need(start.n_machines, start.n_cpus, start.n_gpus)
        lacking = shortage(address, self._cluster.machines(), need)
        if lacking is not None:
            raise UsageError(lacking.message, remedy=lacking.remedy)
        self._cluster.reserve(need, start.name)
        begin_s, is_told = time.monotonic(), False
        while not self._is_over() and not self._cluster.is_reserved(_TURN_S):
            waited_s = time.monotonic() - begin_s
            if waited_s >= start.start_timeout_s:
                raise MachinesError(
                    f"the Ray cluster at {address} had no room for {need.n_machines} machines with {need} each "
                    f"within {start.start_timeout_s:g} s",
                    remedy="Others use it, as `ray status` tells: try later, or raise cluster.start_timeout_s.",
                )
            if waited_s >= _WAIT_TOLD_S and not is_told:
                is_told = True
                self._tell(Told(f"waiting for Ray to give {need.n_machines} machines with {need} each"))

    def _keep(self, holders: Holders) -> None:
        over_s: float | None = None
        while not self._is_refused:
            for happening in self._cluster.news(_TURN_S):
                _log.info("%s", happening)
                self._n_serving -= isinstance(happening, AgentEnded)
                if over_s is None:
                    self._perform(holders.handle(happening, time.monotonic()))
            if over_s is not None and (self._n_serving <= 0 or time.monotonic() >= over_s + _LAST_WORDS_S):
                return
            if over_s is None and self._is_over():
                over_s = time.monotonic()
            elif over_s is None:
                self._perform(holders.tick(time.monotonic()))

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case AskHolder(place):
                    self._cluster.hold(place)
                case StartAgent(place):
                    agent = msgspec.structs.replace(self._start.agent, index=place)
                    self._cluster.serve(place, msgspec.msgpack.encode(agent))
                    self._n_serving += 1
                case Tell(text):
                    self._tell(Told(text))
                case AllServe(machines):
                    self._tell(Placed(machines))
                case Refuse(message, remedy):
                    self._is_refused = True
                    self._tell(Refusal(message, remedy, UsageError.exit_code))


def main() -> int:
    """Keep the machines of a run until the other end of stdin is gone."""
    lifeline = take_stdin()
    start = msgspec.msgpack.decode(read_framed(lifeline), type=KeeperStart)
    is_over = threading.Event()
    die_with_parent(lifeline, death_signal=signal.SIGCONT, on_parent_gone=lambda: _leave(is_over))

    def tell(news: News) -> None:
        _log.info("%s", news)
        try:
            os.write(lifeline, framed(msgspec.msgpack.encode(news)))
        except (BrokenPipeError, ConnectionResetError):
            is_over.set()

    with logging_to(None):
        Keeper(start, RayCluster(), tell=tell, is_over=is_over.is_set).run()
    return 0


def _leave(is_over: threading.Event) -> None:
    """Have the keeper end; if it waits for Ray in vain, end the process, upon which Ray ends the actors."""
    is_over.set()
    time.sleep(_LAST_WORDS_S + _RELEASE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

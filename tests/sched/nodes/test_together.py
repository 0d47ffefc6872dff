"""Masters and agents together, on a network that loses, delays and cuts, with processes that die at any time.

Whatever happens, no worker of an attempt is alive when those of a later one start, and a run whose machines stay comes
to its workers in the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from realrl.sched.nodes import agent as of_agent
from realrl.sched.nodes import machines as of_master
from realrl.sched.nodes.agent import Agent
from realrl.sched.nodes.machines import Machines
from realrl.sched.nodes.messages import Examined, StartWorkers
from tests.sched.nodes.test_machines import FACTS, PLAN, msgspec_replace

TURN_S = 0.1


@dataclass
class Place:
    """An agent, the workers that it has, and the cable to the master."""

    agent: Agent
    attempt: str = ""  # whose workers are alive here
    lease_end_s: float = 0.0
    is_cut: bool = False
    to_master: list[tuple[float, object]] = field(default_factory=list)
    from_master: list[tuple[float, object]] = field(default_factory=list)


class World:
    """Three machines, two of which the run needs, and one master after another."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.n_attempts = 0
        self.places = {name: self._boot(name) for name in (b"a", b"b", b"c")}
        self.master: Machines | None = None
        self.n_started = self.n_agents = 0
        self.next_master()

    def _boot(self, name: bytes) -> Place:
        greeting = of_agent.Greeting(machine=name.decode(), pid=1, address="10.0.0.1", facts=FACTS)
        return Place(Agent(greeting, "x", patience_s=1e9, now_s=self.now_s))

    def next_master(self) -> None:
        before = f"run-{self.n_attempts}" if self.n_attempts else ""
        self.n_attempts += 1
        order = msgspec.structs.replace(PLAN.order, attempt=f"run-{self.n_attempts}")
        plan = msgspec_replace(PLAN, order=order, previous_attempt=before, start_timeout_s=1e9)
        self.master = Machines(plan, self.now_s)

    def step(self) -> None:
        """Let a turn pass; hurt something now and then."""
        self.now_s += TURN_S
        for name, place in self.places.items():
            self._deliver(name, place)
            self._obey(name, place, place.agent.handle(of_agent.Ticked(self.now_s, self.now_s)))
            if place.attempt and self.now_s >= place.lease_end_s:  # the worker's own judgement
                place.attempt = ""
        if self.master is not None:
            self._follow(self.master.handle(of_master.Ticked(self.now_s)))

    def hurt(self) -> None:
        what = self.random.choice(("cut", "heal", "lose", "kill master", "new agent"))
        name = self.random.choice(list(self.places))
        place = self.places[name]
        if what == "cut":
            place.is_cut = True
        elif what == "heal":
            place.is_cut = False
        elif what == "lose":
            place.to_master.clear()
            place.from_master.clear()
        elif what == "kill master":
            self.next_master()
        else:  # its workers die with the agent
            del self.places[name]
            self.n_agents += 1
            name = b"agent %d" % self.n_agents
            self.places[name] = self._boot(name)

    def _deliver(self, name: bytes, place: Place) -> None:
        if place.is_cut:
            return
        for queue, take in ((place.to_master, self._to_master), (place.from_master, self._to_agent)):
            while queue and queue[0][0] <= self.now_s:
                take(name, place, queue.pop(0)[1])

    def _to_master(self, name: bytes, place: Place, message: object) -> None:
        if self.master is not None:
            self._follow(self.master.handle(of_master.Received(name, message, self.now_s)))

    def _to_agent(self, name: bytes, place: Place, message: object) -> None:
        self._obey(name, place, place.agent.handle(of_agent.Heard(message, self.now_s, self.now_s)))

    def _follow(self, instructions: list[of_master.Instruction]) -> None:
        if any(isinstance(item, of_master.WorkerGone) for item in instructions):  # the attempt has failed
            self.next_master()
            return
        for item in instructions:
            if isinstance(item, of_master.SendTo) and item.agent in self.places:
                self.places[item.agent].from_master.append((self.now_s + self._delay(), item.message))
                if isinstance(item.message, StartWorkers):
                    attempts = {place.attempt for place in self.places.values()} - {"", item.message.attempt}
                    assert not attempts, f"workers of {attempts} live while those of {item.message.attempt} start"

    def _obey(self, name: bytes, place: Place, instructions: list[of_agent.Instruction]) -> None:
        for item in instructions:
            match item:
                case of_agent.Say(message):
                    place.to_master.append((self.now_s + self._delay(), message))
                case of_agent.Look():
                    self._obey(name, place, place.agent.handle(of_agent.Looked(FOUND, self.now_s, self.now_s)))
                case of_agent.Start(order):
                    assert place.attempt == ""
                    place.attempt, place.lease_end_s = order.attempt, place.agent.lease_end_s
                    self.n_started += 1
                case of_agent.Stop():
                    place.attempt = ""
                case of_agent.Renew(until_s):
                    place.lease_end_s = until_s

    def _delay(self) -> float:
        return self.random.choice((0.0, 0.0, 0.05, 0.3, 3.0))


FOUND = Examined("nonce", "", {"/a.py": "1"})


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 200))])
def test_no_worker_outlives_its_attempt_and_the_run_goes_on(seed: int) -> None:
    world = World(seed)
    for _ in range(40):
        for _ in range(world.random.randrange(1, 120)):
            world.step()
        world.hurt()
    for place in world.places.values():
        place.is_cut = False
    world.next_master()
    for _ in range(3000):
        world.step()
        attempt = f"run-{world.n_attempts}"
        if sum(place.attempt == attempt for place in world.places.values()) == 2:
            break
    else:
        raise AssertionError("the workers never started")
    assert world.n_started > 2

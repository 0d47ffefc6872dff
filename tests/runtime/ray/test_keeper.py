"""The keeper with a cluster of its own making: what it asks for, what it tells, and that it gives everything back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from realrl.errors import UsageError
from realrl.runtime.ray.cluster import explained
from realrl.runtime.ray.keeper import Keeper
from realrl.runtime.ray.messages import AgentStart, Connected, KeeperStart, News, Placed, Refusal, Told
from realrl.sched.nodes.holders import AgentEnded, Happening, HolderLost, HolderReady, Need, RayMachine

KEY = bytes(range(32))
START = KeeperStart(
    address="auto",
    name="realrl a",
    n_machines=2,
    n_cpus=2,
    n_gpus=0,
    start_timeout_s=60.0,
    agent=AgentStart(place="10.0.0.1:29500", key=KEY, index=0, n_machines=2, n_threads=1),
)
MACHINES = (RayMachine("alpha", "10.0.0.1", 2, 0), RayMachine("beta", "10.0.0.2", 2, 0))


class FakeCluster:
    """Machines that are there at once; agents that live until the script says otherwise."""

    def __init__(self, machines: Sequence[RayMachine] = MACHINES, script: Sequence[Happening | None] = ()) -> None:
        self.there = machines
        self.script = list(script)  # what happens after every agent was started, a turn each
        self.has_room = True
        self.refusal: UsageError | None = None
        self.done: list[str] = []
        self.served: list[tuple[int, AgentStart]] = []
        self.coming: list[Happening] = []

    def connect(self, address: str) -> str:
        if self.refusal is not None:
            raise self.refusal
        return "10.0.0.1:6379"

    def machines(self) -> Sequence[RayMachine]:
        return self.there

    def reserve(self, need: Need, name: str) -> None:
        self.done.append(f"reserve {need.n_machines} with {need}")

    def is_reserved(self, timeout_s: float) -> bool:
        return self.has_room

    def hold(self, place: int) -> None:
        self.done.append(f"hold {place}")
        self.coming.append(HolderReady(place, self.there[place].name))

    def serve(self, place: int, start: bytes) -> None:
        self.done.append(f"serve {place}")
        self.served.append((place, msgspec.msgpack.decode(start, type=AgentStart)))

    def news(self, timeout_s: float) -> list[Happening]:
        found, self.coming = self.coming, []
        if not found and self.served and self.script:
            happening = self.script.pop(0)
            found = [] if happening is None else [happening]
        return found

    def release(self) -> None:
        self.done.append("release")


def run(cluster: FakeCluster, start: KeeperStart = START, *, turns: int = 0) -> list[News]:
    """Return what the keeper tells, until the script is over and `turns` more have passed."""
    told: list[News] = []
    left = turns

    def is_over() -> bool:
        nonlocal left
        left -= not cluster.script
        return left < 0 and any(isinstance(news, Placed) for news in told)

    Keeper(start, cluster, tell=told.append, is_over=is_over).run()
    assert cluster.done[-1] == "release"
    return told


def test_every_machine_has_an_agent_that_knows_its_place() -> None:
    ends = [AgentEnded(0, 0), AgentEnded(1, 0)]
    cluster = FakeCluster(script=ends)
    assert run(cluster) == [Connected("10.0.0.1:6379"), Placed(("alpha", "beta"))]
    assert cluster.done == ["reserve 2 with 2 CPUs", "hold 0", "hold 1", "serve 0", "serve 1", "release"]
    assert [(place, start.index, start.key) for place, start in cluster.served] == [(0, 0, KEY), (1, 1, KEY)]


def test_a_machine_that_is_lost_has_its_agent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrl.sched.nodes.holders._AGAIN_S", 0.0)
    cluster = FakeCluster(script=[HolderLost(1, "the node died"), None, None, AgentEnded(0, 0), AgentEnded(1, 0)])
    told = run(cluster)
    assert told[-1] == Told("Ray has lost the agent on beta (the node died): it is started again where there is room")
    assert cluster.done[-3:] == ["hold 1", "serve 1", "release"]


def test_too_small_a_cluster_is_refused_before_anything_is_asked() -> None:
    cluster = FakeCluster(MACHINES[:1])
    [_, refusal] = run_to_refusal(cluster)
    assert refusal.exit_code == 2
    assert "has 1 machine, and the plan needs 2" in refusal.message
    assert "cluster.n_nodes=1" in refusal.remedy
    assert cluster.done == ["release"]


def test_a_full_cluster_is_waited_for_and_then_told_as_one_to_try_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrl.runtime.ray.keeper._WAIT_TOLD_S", 0.0)
    cluster = FakeCluster()
    cluster.has_room = False
    told = run_to_refusal(cluster, msgspec.structs.replace(START, start_timeout_s=0.05))
    assert told[1] == Told("waiting for Ray to give 2 machines with 2 CPUs each")
    assert told[-1].exit_code == 75
    assert "had no room for 2 machines with 2 CPUs each within 0.05 s" in told[-1].message


def test_an_agent_that_cannot_start_ends_the_run() -> None:
    cluster = FakeCluster()
    cluster.hold = lambda place: cluster.coming.append(HolderLost(place, "No module named 'realrl'"))
    told = run_to_refusal(cluster)
    assert "No module named 'realrl'" in told[-1].message
    assert cluster.served == []


def run_to_refusal(cluster: FakeCluster, start: KeeperStart = START) -> list[News]:
    told: list[News] = []
    Keeper(start, cluster, tell=told.append, is_over=lambda: False).run()
    assert isinstance(told[-1], Refusal)
    return told


def test_a_cluster_that_cannot_be_joined_is_refused_in_ones_own_words() -> None:
    cluster = FakeCluster()
    cluster.refusal = explained(ConnectionError("Could not find any running Ray instance."), "auto")
    [refusal] = run_to_refusal(cluster)
    assert refusal.message.startswith("there is no Ray cluster on this machine: Could not find any")
    other = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.4\n"
        "This process on node 10.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    message = explained(other, "10.0.0.1:6379").message
    assert "has other versions than this machine: The cluster was started with: Ray: 2.9.0 Python: 3.10.4" in message
    assert "Ray: 2.60.0 Python: 3.11.7" in message
    elsewhere = explained(RuntimeError("No node info found"), "10.0.0.1:6379")
    assert "this machine cannot join the Ray cluster at 10.0.0.1:6379: No node info found" in elsewhere.message


def test_the_key_is_in_no_text() -> None:
    for text in (repr(START), str(START), repr(START.agent)):
        assert KEY.hex() not in text
        assert repr(KEY) not in text

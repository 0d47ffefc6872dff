"""Machines as the master sees them: joining, refusals, leases, and what is told of workers that are gone."""

from __future__ import annotations

import msgspec
import pytest

from realrl.sched.nodes.differences import Expected
from realrl.sched.nodes.machines import (
    SLACK_S,
    AllStopped,
    EndWanted,
    Gathered,
    GiveUp,
    Instruction,
    Machines,
    MachinesPlan,
    Received,
    Reclaimed,
    SendTo,
    StackWanted,
    Tell,
    Ticked,
    WorkerGone,
    with_clock,
)
from realrl.sched.nodes.messages import (
    NODES_VERSION,
    Beat,
    BeatHeard,
    DumpStack,
    Examine,
    Examined,
    FromAgent,
    Greeting,
    NodeFacts,
    Refused,
    StartWorkers,
    StopWorkers,
    Welcome,
    WhoAreYou,
)

FACTS = NodeFacts(versions={"python": "3.11.7", "realrl": "1"}, digests={"code": "c"}, n_cores=8, cpu="x86")
EXPECTED = Expected(FACTS.versions, FACTS.digests, {"/a.py": "1"}, "/runs/a", "nonce", 0, 2)
ORDER = StartWorkers(
    attempt="run-2", first_rank=0, n_workers=4, admission=b"", host="host", run_dir="/runs/a", directory="/home"
)
PLAN = MachinesPlan(
    n_machines=2,
    expected=EXPECTED,
    examine=Examine("/runs/a", ".nonce", "/home", ("/a.py",)),
    order=ORDER,
    previous_attempt="",
    lease_s=10.0,
    start_timeout_s=60.0,
)
FOUND = Examined("nonce", "", {"/a.py": "1"})
A, B, C = b"a", b"b", b"c"
NAMES = {A: "alpha", B: "beta", C: "gamma"}


def greeting(agent: bytes, **changes: object) -> Greeting:
    plain = Greeting(machine=NAMES[agent], pid=1, address=f"10.0.0.{agent[0]}", facts=FACTS)
    return msgspec.structs.replace(plain, **changes)


class Told:
    """A machine under test, and everything that it has said."""

    def __init__(self, plan: MachinesPlan = PLAN) -> None:
        self.machines = Machines(plan, 0.0)
        self.said: list[Instruction] = []

    def hear(self, agent: bytes, message: FromAgent, now_s: float = 1.0) -> list[Instruction]:
        return self._note(self.machines.handle(Received(agent, message, now_s)))

    def tick(self, now_s: float) -> list[Instruction]:
        return self._note(self.machines.handle(Ticked(now_s)))

    def join(self, agent: bytes, now_s: float = 1.0, **changes: object) -> list[Instruction]:
        return [*self.hear(agent, greeting(agent, **changes), now_s), *self.hear(agent, FOUND, now_s)]

    def _note(self, said: list[Instruction]) -> list[Instruction]:
        self.said += said
        return said

    def of(self, kind: type) -> list[Instruction]:
        return [item for item in self.said if isinstance(item, kind)]


def running() -> Told:
    told = Told()
    told.join(A)
    told.join(B)
    return told


def orders(said: list[Instruction]) -> dict[bytes, int]:
    """Agent -> the first rank that it was told to start."""
    sent = [(item.agent, item.message) for item in said if isinstance(item, SendTo)]
    return {agent: message.first_rank for agent, message in sent if isinstance(message, StartWorkers)}


def test_workers_start_when_enough_machines_are_there() -> None:
    told = Told()
    first = told.join(A)
    assert first[0] == SendTo(A, PLAN.examine)
    assert first[1] == SendTo(A, Welcome(10.0, 0))
    assert "alpha at 10.0.0.97 joined (8 cores): 1 of 2" in first[2].text
    assert told.of(Gathered) == []
    second = told.join(B)
    assert Gathered(("alpha", "beta")) in second
    assert orders(second) == {A: 0, B: 4}


def test_numbers_of_machines_give_the_ranks_and_who_comes_later_is_a_spare() -> None:
    told = Told()
    told.join(A, index=1)
    said = told.join(B, index=0)
    assert orders(said) == {B: 0, A: 4}
    assert told.machines.name_of_rank(0) == told.machines.name_of_rank(3) == "beta"
    assert told.machines.name_of_rank(4) == "alpha"
    assert Tell("gamma is a spare") in told.join(C)
    assert told.machines.name_of_rank(8) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": NODES_VERSION + 1}, "speaks version 3 of the protocol of machines, the master 2"),
        (
            {"facts": msgspec.structs.replace(FACTS, versions={"python": "3.11.7", "realrl": "2"})},
            "has realrl 2, the master's machine 1",
        ),
        ({"facts": msgspec.structs.replace(FACTS, versions={"python": "3.11.7"})}, "has realrl none"),
        ({"facts": msgspec.structs.replace(FACTS, digests={"code": "d"})}, "has other code than the master's machine"),
        ({"n_allocated": 1}, "is one of 1 machines of its job, and the plan needs 2"),
        ({"address": "127.0.0.1"}, "reached the master over 127.0.0.1, where no other machine can reach its workers"),
    ],
)
def test_a_machine_that_differs_ends_the_start(changes: dict[str, object], expected: str) -> None:
    told = Told()
    said = told.hear(B, greeting(B, **changes))
    [given_up] = told.of(GiveUp)
    assert f"machine beta {expected}" in given_up.message
    assert given_up.exit_code == 2
    assert SendTo(B, Refused(given_up.message, given_up.remedy)) in said
    assert told.join(A) != []
    assert orders(told.said) == {}
    assert told.machines.handle(EndWanted()) == [AllStopped()]  # no lease is waited for


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Examined("", "", {}), "does not see the run folder /runs/a of the master"),
        (Examined("other", "", {"/a.py": "1"}), "does not see the run folder /runs/a of the master"),
        (Examined("nonce", "has no folder /home", {}), "has no folder /home"),
        (Examined("nonce", "", {}), "has no file /a.py"),
        (Examined("nonce", "", {"/a.py": "2"}), "has another a.py than the master's machine: /a.py"),
    ],
)
def test_a_machine_that_lacks_something_ends_the_start(found: Examined, expected: str) -> None:
    told = Told()
    told.hear(B, greeting(B))
    told.hear(B, found)
    assert f"machine beta {expected}" in told.of(GiveUp)[0].message


def test_a_machine_without_devices_is_refused_and_names_of_equal_machines_have_addresses() -> None:
    expected = Expected(FACTS.versions, FACTS.digests, {}, "/runs/a", "nonce", 4, 2)
    told = Told(msgspec_replace(PLAN, expected=expected))
    told.hear(A, greeting(A))
    assert "machine alpha has 0 CUDA devices, and 4 workers need one each" in told.of(GiveUp)[0].message
    told = Told()
    told.join(A, machine="node")
    assert "machine node (10.0.0.98) at" in told.join(B, machine="node")[2].text


def msgspec_replace(plan: MachinesPlan, **changes: object) -> MachinesPlan:
    return MachinesPlan(**{**{name: getattr(plan, name) for name in MachinesPlan.__dataclass_fields__}, **changes})


def test_a_spare_that_differs_is_refused_and_the_run_goes_on() -> None:
    told = running()
    told.hear(C, greeting(C, version=9))
    assert told.of(GiveUp) == []
    assert any("refused: machine gamma" in item.text for item in told.of(Tell))


def test_too_few_machines_are_a_temporary_failure() -> None:
    told = Told()
    told.join(A, 55.0)
    assert told.tick(59.0) == []
    [given_up] = told.tick(60.0)
    assert "1 of 2 machines joined within 60 s: alpha" in given_up.message
    assert given_up.exit_code == 75
    assert told.tick(61.0) == []


def test_a_dead_worker_is_told_once_with_its_machine_although_beats_repeat_it() -> None:
    told = running()
    beat = Beat(1, "run-2", {1: -9})
    assert told.hear(B, beat, 2.0) == [SendTo(B, BeatHeard(1, 0.0)), WorkerGone(5, -9, "beta")]
    assert told.hear(B, Beat(2, "run-2", {1: -9}), 3.0) == [SendTo(B, BeatHeard(2, 0.0))]
    assert told.hear(B, Beat(3, "run-2", {1: -9, 3: 1}), 3.0)[1:] == [WorkerGone(7, 1, "beta")]


def test_an_order_that_was_lost_is_repeated() -> None:
    told = running()
    assert orders(told.hear(B, Beat(1), 2.0)) == {B: 4}
    assert orders(told.hear(B, Beat(2, "run-2"), 3.0)) == {}


def test_a_silent_machine_is_lost_when_its_lease_must_be_over_and_hears_nothing_then() -> None:
    told = running()
    told.hear(A, Beat(1, "run-2"), 12.0)
    told.hear(B, Beat(1, "run-2", {0: -9}), 2.0)
    assert told.tick(2.0 + 10.0 + SLACK_S) == []
    gone = told.tick(2.0 + 10.0 + SLACK_S + 0.1)
    assert [(end.rank, end.exit_code, end.machine) for end in gone] == [(r, None, "beta") for r in (5, 6, 7)]
    assert "machine beta gave no sign of life for 12 s" in gone[0].detail
    assert told.hear(B, Beat(2, "run-2"), 15.0) == [SendTo(B, WhoAreYou())]


def test_an_agent_that_greets_again_has_lost_its_workers() -> None:
    told = running()
    said = told.hear(B, greeting(B, last_attempt="run-2"), 5.0)
    assert [end.rank for end in said if isinstance(end, WorkerGone)] == [4, 5, 6, 7]
    assert "heard nothing of the master and ended its workers" in said[0].detail


def test_workers_that_cannot_be_started_are_lost_for_that_reason() -> None:
    told = running()
    said = told.hear(B, Beat(1, "run-2", {}, "no memory"), 2.0)
    assert said[1].detail == "not started on machine beta: no memory"


def test_the_end_waits_until_no_worker_can_be_alive() -> None:
    told = running()
    told.hear(A, Beat(1, "run-2"), 5.0)
    assert told.machines.handle(EndWanted()) == [SendTo(a, StopWorkers("run-2")) for a in (A, B)]
    assert told.hear(A, Beat(2, "run-2"), 6.0)[-1] == SendTo(A, StopWorkers("run-2"))
    assert AllStopped() not in told.hear(A, Beat(3, ""), 6.0)
    assert told.tick(1.0 + 10.0 + SLACK_S) == []
    assert told.tick(1.0 + 10.0 + SLACK_S + 0.1) == [AllStopped()]


def test_a_run_without_workers_is_over_at_once() -> None:
    assert Machines(PLAN, 0.0).handle(EndWanted()) == [AllStopped()]


def test_a_later_attempt_waits_for_the_machines_of_the_one_before_or_for_their_leases() -> None:
    later = msgspec_replace(PLAN, previous_attempt="run-1")
    told = Told(later)
    told.join(A, last_attempt="run-1")
    assert orders(told.join(C)) == {}
    assert orders(told.join(B, last_attempt="run-1")) == {A: 0, C: 4}
    told = Told(later)
    told.join(A, 4.0, last_attempt="run-1")
    told.join(C, 5.0)
    assert orders(told.tick(10.0 + SLACK_S - 0.1)) == {}
    assert orders(told.tick(10.0 + SLACK_S)) == {A: 0, C: 4}


def test_a_spare_that_falls_silent_is_forgotten() -> None:
    told = running()
    told.join(C, 2.0)
    for agent in (A, B):
        told.hear(agent, Beat(1, "run-2"), 14.0)
    assert told.tick(14.5) == [Tell("gamma gave no sign of life for 12 s and is forgotten")]


def test_strangers_are_asked_who_they_are() -> None:
    told = Told()
    assert told.hear(A, Beat(1)) == [SendTo(A, WhoAreYou())]
    assert told.hear(A, FOUND) == [SendTo(A, WhoAreYou())]


def test_workers_of_an_earlier_attempt_get_no_lease() -> None:
    told = running()
    said = told.hear(B, Beat(1, "run-1"), 2.0)
    assert said[0] == SendTo(B, WhoAreYou())
    assert [end.rank for end in said[1:]] == [4, 5, 6, 7]
    told.join(C, 2.0)
    assert told.hear(C, Beat(1, "run-1"), 2.0) == [SendTo(C, WhoAreYou())]


def test_a_machine_that_somebody_wants_back_is_told_once() -> None:
    told = running()
    assert told.hear(B, Beat(1, "run-2", leaving="SIGTERM"), 2.0)[1:] == [Reclaimed("beta", "SIGTERM")]
    assert told.hear(B, Beat(2, "run-2", leaving="SIGTERM"), 3.0)[1:] == []


def test_stacks_and_clocks_go_by_machine() -> None:
    told = running()
    assert told.machines.handle(StackWanted(6)) == [SendTo(B, DumpStack("run-2", 6))]
    told.hear(B, Beat(1, "run-2", offset_s=5.0), 2.0)
    assert [told.machines.offset_of_rank(rank) for rank in (0, 4)] == [0.0, 5.0]
    told.machines.handle(Ticked(20.0))  # beta is lost; its last bars are still to be written
    assert [told.machines.name_of_rank(rank) for rank in (3, 4, 8)] == ["alpha", "beta", ""]
    assert [told.machines.offset_of_rank(rank) for rank in (3, 4, 8)] == [0.0, 5.0, 0.0]
    assert with_clock(BeatHeard(1, 0.0), 7.0) == BeatHeard(1, 7.0)
    assert with_clock(Welcome(10.0, 1), 7.0) == Welcome(10.0, 1, 7.0)


def test_machines_of_different_kinds_are_told() -> None:
    told = Told()
    told.join(A)
    said = told.join(B, facts=msgspec.structs.replace(FACTS, cpu="arm"))
    assert "its CPU is of another kind" in said[2].text


def test_a_run_that_was_given_up_has_nothing_to_stop() -> None:
    told = Told()
    told.tick(PLAN.start_timeout_s)
    assert isinstance(told.said[-1], GiveUp)
    assert told.machines.handle(EndWanted()) == [AllStopped()]

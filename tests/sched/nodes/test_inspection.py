"""Questions of a doctor to machines, which come to an end whatever they answer."""

from __future__ import annotations

from realrl.sched.nodes.inspection import (
    ANSWER_S,
    Concluded,
    Inspection,
    InspectionPhase,
    InspectionPlan,
    Instruction,
    MachineReport,
)
from realrl.sched.nodes.machines import Received, SendTo, Ticked
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
    NodeFacts,
    OpenDoor,
    Welcome,
    WhoAreYou,
)

A, B = b"a", b"b"
EXAMINE = Examine("/runs", ".nonce", "/home")
PLAN = InspectionPlan(2, EXAMINE, lease_s=10.0, start_timeout_s=60.0)
DOORS = {A: Door("10.0.0.1:1", "alpha's"), B: Door("10.0.0.2:2", "beta's")}
FOUND = Examined("nonce", "", {}, {"/runs": 5})


class Told:
    def __init__(self) -> None:
        self.inspection = Inspection(PLAN, 0.0)

    def hear(self, agent: bytes, message: FromAgent, now_s: float = 1.0) -> list[Instruction]:
        return self.inspection.handle(Received(agent, message, now_s))

    def join(self, agent: bytes, machine: str, number: int, index: int | None = None) -> list[Instruction]:
        greeting = Greeting(
            machine=machine, pid=1, address=f"10.0.0.{number}", facts=NodeFacts(versions={}, digests={}), index=index
        )
        assert self.hear(agent, greeting) == [SendTo(agent, EXAMINE)]
        return self.hear(agent, FOUND)

    def beat(self, agent: bytes, number: int, offset_s: float = 0.5) -> list[Instruction]:
        return self.hear(agent, Beat(number, offset_s=offset_s, offset_error_s=0.1))

    @property
    def reports(self) -> tuple[MachineReport, ...]:
        return self.inspection.reports()


def joined() -> Told:
    told = Told()
    assert told.join(B, "beta", 2, index=1)[0] == SendTo(B, Welcome(10.0, 0))
    assert told.join(A, "alpha", 1, index=0)[2:] == [SendTo(B, OpenDoor()), SendTo(A, OpenDoor())]
    return told


def knocking() -> Told:
    told = joined()
    assert told.hear(A, DoorOpened(DOORS[A])) == []
    knocks = [SendTo(agent, Knock((DOORS[A], DOORS[B]))) for agent in (B, A)]
    assert told.hear(B, DoorOpened(DOORS[B])) == knocks
    return told


def test_all_pairs_are_tried_and_clocks_compared() -> None:
    told = knocking()
    for agent in (A, B):
        for number in (1, 2, 3):
            told.beat(agent, number)
    everything = Knocked({"10.0.0.1:1": 0.001, "10.0.0.2:2": 0.002}, {})
    assert told.hear(A, everything) == []
    assert told.hear(B, Knocked({"10.0.0.2:2": 0.003}, {"10.0.0.1:1": "Connection refused"})) == [Concluded()]
    alpha, beta = told.reports
    assert (alpha.name, alpha.seconds, alpha.problems) == ("alpha", {"alpha": 0.001, "beta": 0.002}, {})
    assert (beta.name, beta.seconds, beta.problems) == ("beta", {"beta": 0.003}, {"alpha": "Connection refused"})
    assert (alpha.offset_s, alpha.offset_error_s) == (0.5, 0.1)
    assert told.inspection.phase is InspectionPhase.OVER
    assert told.beat(A, 4) == []


def test_a_question_is_asked_again_until_it_is_answered() -> None:
    told = joined()
    assert told.beat(A, 1) == [SendTo(A, BeatHeard(1, 0.0)), SendTo(A, OpenDoor())]
    told.hear(A, DoorOpened(DOORS[A]))
    assert told.beat(A, 2) == [SendTo(A, BeatHeard(2, 0.0))]
    told.hear(B, DoorOpened(None, "cannot listen"))
    assert told.beat(B, 1)[1:] == [SendTo(B, Knock((DOORS[A],)))]
    told.hear(B, Knocked({}, {"10.0.0.1:1": "no answer within 3 s"}))
    assert told.beat(B, 2) == [SendTo(B, BeatHeard(2, 0.0))]
    assert told.reports[1].problems == {"alpha": "no answer within 3 s", "beta": "cannot listen"}


def test_it_ends_with_those_who_came() -> None:
    told = Told()
    told.join(B, "beta", 2)
    assert told.inspection.handle(Ticked(59.0)) == []
    assert told.inspection.handle(Ticked(60.0)) == [SendTo(B, OpenDoor())]
    assert told.inspection.handle(Ticked(60.0 + ANSWER_S)) == [SendTo(B, Knock(()))]
    assert told.inspection.handle(Ticked(60.0 + ANSWER_S)) == [Concluded()]
    assert [(one.name, one.problems) for one in told.reports] == [("beta", {"beta": "it opened no port"})]
    alone = Inspection(PLAN, 0.0)
    assert alone.handle(Ticked(60.0)) == [Concluded()]
    assert alone.reports() == ()


def test_a_machine_that_falls_silent_does_not_hold_up_the_others() -> None:
    told = knocking()
    told.hear(A, Knocked({"10.0.0.1:1": 0.001}, {"10.0.0.2:2": "no answer within 3 s"}))
    assert told.inspection.handle(Ticked(1.0 + ANSWER_S)) == [Concluded()]
    assert told.reports[1].problems == {"alpha": "beta did not answer", "beta": "beta did not answer"}


def test_machines_of_one_name_are_told_apart_and_strangers_are_asked_who_they_are() -> None:
    told = Told()
    assert told.beat(A, 1) == [SendTo(A, WhoAreYou())]
    told.join(A, "node", 1)
    told.join(B, "node", 2)
    assert [one.name for one in told.reports] == ["node (10.0.0.1)", "node (10.0.0.2)"]
    late = Greeting(machine="c", pid=1, address="10.0.0.3", facts=NodeFacts(versions={}, digests={}))
    assert told.hear(b"c", late) == []

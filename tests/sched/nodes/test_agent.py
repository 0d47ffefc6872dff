"""An agent: how it joins, what ends its workers, and when it leaves."""

from __future__ import annotations

import msgspec

from realrl.sched.nodes.agent import (
    Agent,
    AgentPhase,
    Dump,
    Heard,
    Instruction,
    Leave,
    Look,
    Looked,
    Note,
    Probe,
    Probed,
    Renew,
    Say,
    Signalled,
    Start,
    StartFailed,
    Stop,
    Ticked,
    WorkersEnded,
)
from realrl.sched.nodes.messages import (
    Beat,
    BeatHeard,
    Dismissed,
    DumpStack,
    Examine,
    Examined,
    Greeting,
    NodeFacts,
    Refused,
    StartWorkers,
    StopWorkers,
    ToAgent,
    Welcome,
    WhoAreYou,
)

GREETING = Greeting(machine="beta", pid=1, address="10.0.0.2", facts=NodeFacts(versions={}, digests={}))
EXAMINE = Examine("/runs/a", ".nonce", "/home")
FOUND = Examined("nonce", "", {})
LEASE_S = 10.0


def order(attempt: str = "run-1") -> StartWorkers:
    return StartWorkers(
        attempt=attempt, first_rank=4, n_workers=2, admission=b"", host="h", run_dir="/runs/a", directory="/home"
    )


def seeking(*, outlives_run: bool = False) -> Agent:
    return Agent(GREETING, "10.0.0.1:29500", patience_s=60.0, outlives_run=outlives_run, now_s=0.0)


def hear(agent: Agent, message: ToAgent, now_s: float, wall_s: float = 0.0) -> list[Instruction]:
    return agent.handle(Heard(message, now_s, wall_s))


def tick(agent: Agent, now_s: float, wall_s: float = 0.0) -> list[Instruction]:
    return agent.handle(Ticked(now_s, wall_s))


def member(*, outlives_run: bool = False) -> Agent:
    agent = seeking(outlives_run=outlives_run)
    assert tick(agent, 0.0) == [Say(GREETING)]
    assert hear(agent, EXAMINE, 0.5) == [Look(EXAMINE)]
    assert agent.handle(Looked(FOUND, 1.0, 0.0)) == [Say(msgspec.structs.replace(FOUND, number=1))]
    assert isinstance(hear(agent, Welcome(LEASE_S, 1), 1.5)[0], Note)
    return agent


def running() -> Agent:
    agent = member()
    assert hear(agent, order(), 2.0)[1:] == [Start(order()), Renew(11.0)]
    return agent


def test_it_greets_until_somebody_answers_and_beats_then() -> None:
    agent = seeking()
    assert tick(agent, 0.0) == [Say(GREETING)]
    assert tick(agent, 1.9) == []
    assert tick(agent, 2.0) == [Say(GREETING)]
    agent = member()
    assert tick(agent, 1.9) == []
    assert tick(agent, 2.1, 50.0) == [Say(Beat(2))]


def test_workers_live_for_a_lease_from_the_sending_of_the_last_beat_that_was_answered() -> None:
    agent = running()
    beat = tick(agent, 2.5)[0].message
    assert beat.attempt == "run-1"
    assert hear(agent, BeatHeard(beat.number, 0.0), 4.0) == [Renew(12.5)]
    assert agent.lease_end_s == 12.5
    assert hear(agent, BeatHeard(99, 0.0), 5.0) == []
    assert not any(isinstance(item, Stop) for item in tick(agent, 12.4))
    stopped, note = tick(agent, 12.5)
    assert stopped == Stop()
    assert "no word from the master for 10 s" in note.text
    assert agent.phase is AgentPhase.SEEKING
    again = tick(agent, 12.6)[0].message
    assert again.last_attempt == "run-1"


def test_an_order_that_comes_twice_or_too_late_starts_nothing() -> None:
    agent = running()
    assert hear(agent, order(), 3.0) == []
    hear(agent, StopWorkers("run-1"), 3.0)
    assert hear(agent, order(), 4.0) == []
    assert hear(member(), order(), 11.0) == [], "the lease is over"
    assert hear(agent, order("run-2"), 4.0)[1] == Start(order("run-2"))


def test_the_master_ends_workers_and_another_master_as_well() -> None:
    agent = running()
    assert hear(agent, StopWorkers("another"), 3.0) == []
    assert hear(agent, StopWorkers("run-1"), 3.0) == [Stop()]
    assert tick(agent, 3.1) == [Say(Beat(2))]
    agent = running()
    assert hear(agent, WhoAreYou(), 3.0)[0] == Stop()
    assert tick(agent, 3.1)[0].message.last_attempt == "run-1"


def test_ends_of_workers_are_told_at_once_and_again() -> None:
    agent = running()
    tick(agent, 2.5)
    agent.handle(WorkersEnded({1: -9}, 2.6))
    assert tick(agent, 2.6) == [Say(Beat(3, "run-1", {1: -9}))]
    assert tick(agent, 3.7) == [Say(Beat(4, "run-1", {1: -9}))]
    agent.handle(StartFailed("no memory", 3.8))
    assert tick(agent, 3.8)[0].message.problem == "no memory"


def test_it_leaves_when_it_is_refused_dismissed_or_alone() -> None:
    assert hear(seeking(), Refused("no", "do this"), 1.0) == [Leave(2, "no", "do this")]
    agent = running()
    assert hear(agent, Dismissed(143), 3.0) == [Stop(), Leave(143)]
    assert tick(agent, 99.0) == []
    assert tick(seeking(), 60.0)[0].exit_code == 1
    agent = member()
    tick(agent, 11.0)
    [left] = tick(agent, 61.5)
    assert left.exit_code == 75
    assert "no master answered at 10.0.0.1:29500 within 60 s" in left.text


def test_it_leaves_a_run_whose_port_is_closed_and_waits_for_one_that_is_silent() -> None:
    agent = member()
    assert agent.handle(Probed(True)) == [], "the lease is not over"
    tick(agent, 11.0)
    probes = [now_s for now_s in (11.1, 11.2, 11.7, 12.3) if Probe() in tick(agent, now_s)]
    assert probes == [11.1, 11.7, 12.3]
    assert agent.handle(Probed(True)) == []
    assert agent.handle(Probed(False)) == []
    assert agent.handle(Probed(True)) == []
    [left] = agent.handle(Probed(True))
    assert left.exit_code == 75
    assert "the run at 10.0.0.1:29500 is gone" in left.text
    assert agent.phase is AgentPhase.OVER


def test_it_does_not_look_whether_a_run_is_gone_that_it_may_outlive_or_never_joined() -> None:
    patient, new = member(outlives_run=True), seeking()
    assert not any(Probe() in tick(agent, 0.5 * turn) for agent in (patient, new) for turn in range(22, 80))


def test_a_late_welcome_of_a_master_that_is_gone_gives_no_new_lease() -> None:
    agent = seeking()
    agent.handle(Looked(FOUND, 1.0, 0.0))
    agent.handle(Looked(FOUND, 9.0, 0.0))
    hear(agent, Welcome(LEASE_S, 1), 9.5)
    assert agent.lease_end_s == 11.0
    assert hear(seeking(), Welcome(LEASE_S, 7), 1.0) == []


def test_signals() -> None:
    agent = running()
    [note] = agent.handle(Signalled("SIGTERM", 143, False, 3.0))
    assert "the run is told to save" in note.text
    assert tick(agent, 3.0)[0].message.leaving == "SIGTERM"
    assert agent.handle(Signalled("SIGTERM", 143, False, 4.0)) == [Stop(), Leave(143, "ended by SIGTERM")]
    assert running().handle(Signalled("SIGINT", 130, True, 3.0)) == [Stop(), Leave(130, "ended by SIGINT")]
    assert member().handle(Signalled("SIGTERM", 143, False, 3.0)) == [Leave(143, "ended by SIGTERM")]


def test_an_agent_that_is_to_leave_seeks_no_other_master() -> None:
    agent = running()
    agent.handle(Signalled("SIGTERM", 75, False, 3.0))
    said = tick(agent, 11.0)
    assert said == [Stop(), Leave(75, "ended by SIGTERM: no word from the master for 10 s")]


def test_stacks_are_those_of_local_workers() -> None:
    assert hear(running(), DumpStack("run-1", 5), 3.0) == [Dump(1)]
    assert hear(running(), DumpStack("run-0", 5), 3.0) == []


def test_beats_tell_how_far_the_masters_clock_is_ahead() -> None:
    agent = member()
    tick(agent, 2.0, 1000.0)
    hear(agent, BeatHeard(2, 1005.05), 2.1, 1000.1)
    tick(agent, 3.0, 1001.0)
    hear(agent, BeatHeard(3, 1007.9), 5.0, 1003.0)
    beat = tick(agent, 6.0, 1004.0)[0].message
    assert abs(beat.offset_s - 5.0) <= beat.offset_error_s <= 0.05 + 1e-9

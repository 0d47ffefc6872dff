"""Requests of a run to a Ray cluster, and losses of an agent, its actor or its machine."""

from __future__ import annotations

import pytest

from realrl.sched.nodes.holders import (
    AgentEnded,
    AllServe,
    AskHolder,
    HolderLost,
    HolderReady,
    Holders,
    Need,
    RayMachine,
    Refuse,
    StartAgent,
    Tell,
    shortage,
)

WHERE = "10.0.0.1:6379"
ALPHA, BETA = RayMachine("alpha", "10.0.0.1", 8, 4), RayMachine("beta", "10.0.0.2", 2, 0)


def serving() -> Holders:
    """Two places whose agents were started at 0 s."""
    holders = Holders(2, WHERE)
    assert holders.tick(0.0) == [AskHolder(0), AskHolder(1)]
    assert holders.tick(100.0) == []
    assert holders.handle(HolderReady(1, "beta"), 0.0) == [StartAgent(1)]
    started = holders.handle(HolderReady(0, "alpha"), 0.0)
    assert started == [StartAgent(0), AllServe(("alpha", "beta"))]
    return holders


@pytest.mark.parametrize(
    ("need", "message"),
    [
        (Need(2, 2, 0), None),
        (Need(1, 8, 4), None),
        (Need(3, 1, 0), "the Ray cluster at 10.0.0.1:6379 has 2 machines, and the plan needs 3"),
        (Need(2, 4, 0), "1 of the 2 machines that the plan needs have 4 CPUs in the Ray cluster at 10.0.0.1:6379; "
                        "the others: beta 2 CPUs"),
        (Need(2, 1, 1), "1 of the 2 machines that the plan needs have 1 CPU and 1 GPU in the Ray cluster at "
                        "10.0.0.1:6379; the others: beta 2 CPUs"),
        (Need(1, 8, 8), "0 of the 1 machines that the plan needs have 8 CPUs and 8 GPUs in the Ray cluster at "
                        "10.0.0.1:6379; the others: alpha 8 CPUs and 4 GPUs, beta 2 CPUs"),
    ],
)  # fmt: skip
def test_a_cluster_that_could_never_do_is_refused_with_both_numbers(need: Need, message: str | None) -> None:
    lacking = shortage(WHERE, [ALPHA, BETA], need)
    assert (lacking and lacking.message) == message


def test_an_agent_that_was_killed_starts_again_on_the_same_machine() -> None:
    holders = serving()
    [told] = holders.handle(AgentEnded(1, -9), 50.0)
    assert told == Tell("the agent on beta was killed by signal 9: it is started again")
    assert holders.tick(50.5) == []
    assert holders.tick(51.0) == [StartAgent(1)]


def test_what_fails_again_and_again_is_tried_less_often() -> None:
    holders, now_s, waits = serving(), 50.0, []
    for _ in range(8):
        holders.handle(AgentEnded(0, -11), now_s)
        begin_s = now_s
        while not holders.tick(now_s):
            now_s += 0.5
        waits.append(now_s - begin_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    holders.handle(AgentEnded(0, -11), now_s + 1000)
    assert holders.tick(now_s + 1001) == [StartAgent(0)]


def test_an_agent_that_ended_by_itself_is_told_unless_the_run_is_over_by_then() -> None:
    holders = serving()
    assert holders.handle(AgentEnded(1, 1, "No module named realrl"), 50.0) == []
    assert holders.tick(52.0) == []
    assert holders.tick(60.0) == [Tell("the agent on beta ended with exit code 1: No module named realrl")]
    assert holders.tick(500.0) == []


def test_an_agent_that_is_lost_goes_where_there_is_room() -> None:
    holders = serving()
    [told] = holders.handle(HolderLost(1, "the node died"), 50.0)
    assert told == Tell("Ray has lost the agent on beta (the node died): it is started again where there is room")
    assert holders.machine(1) == ""
    assert holders.tick(51.0) == [AskHolder(1)]
    [told] = holders.handle(HolderLost(1, "no realrl there"), 52.0)
    assert told == Tell("Ray could not place an agent (no realrl there): it is started again where there is room")
    assert holders.tick(53.0) == []
    assert holders.tick(54.0) == [AskHolder(1)]
    assert holders.handle(HolderReady(1, "gamma"), 60.0) == [StartAgent(1)]  # nothing begins a second time
    assert holders.machine(1) == "gamma"


def test_a_run_whose_first_agents_cannot_start_is_refused() -> None:
    holders = Holders(2, WHERE)
    holders.tick(0.0)
    holders.handle(HolderReady(0, "alpha"), 1.0)
    [refused] = holders.handle(HolderLost(1, "No module named 'realrl'"), 1.0)
    assert isinstance(refused, Refuse)
    assert "the agent of machine 1 in the cluster at 10.0.0.1:6379: No module named 'realrl'" in refused.message
    assert holders.tick(100.0) == []

"""Requests and the replies that belong to them."""

from __future__ import annotations

from realrl.sched.events import Send
from realrl.sched.messages import FreeSamples, LoadSamples, SamplesFreed, SamplesLoaded
from realrl.sched.outbox import Outbox, Owner
from tests.sched.simulator import meta


def test_a_reply_leads_to_the_request_and_its_owner() -> None:
    outbox = Outbox(2)
    load, free = LoadSamples(0, ("1/a",), (0,)), FreeSamples(1, ("eval/a",))
    assert outbox.send(1, load, Owner.MAIN) == Send(1, load)
    assert outbox.send(1, free, Owner.EVALUATION) == Send(1, free)
    assert [outbox.next_seq(rank) for rank in (0, 1)] == [0, 2]
    assert list(outbox.of_rank(1, Owner.MAIN)) == [load]
    assert outbox.oldest(1) is load
    assert outbox.problem_with(SamplesFreed(1, 0)) == "worker 1 answered request 0, a LoadSamples, with SamplesFreed"
    assert outbox.problem_with(SamplesFreed(0, 0)) == "worker 0 sent SamplesFreed for request 0, which was never sent"
    assert outbox.problem_with(SamplesLoaded(1, 0, meta(["1/a"], ["k"]))) is None
    assert outbox.close(1, 0) == (load, Owner.MAIN)
    assert outbox.close(1, 1) == (free, Owner.EVALUATION)
    assert outbox.is_empty


def test_dispatches_and_parts_are_numbered_over_all_tracks() -> None:
    outbox = Outbox(1)
    assert [outbox.next_dispatch() for _ in range(3)] == [0, 1, 2]
    assert [outbox.next_part() for _ in range(2)] == [0, 1]

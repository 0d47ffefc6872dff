"""Pipeline schedules: every list is complete, in order, bounded in memory, and cannot block."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.plan.memory.buffers import PIPELINE_PENDING
from realrl.plan.pipeline import (
    InFlight,
    Schedule,
    Step,
    StepKind,
    backward_step,
    forward_step,
    generation,
    in_flight,
    inference,
    interleaved,
    most_received,
    one_f_one_b,
    place_messages,
)
from tests.plan.pipeline_simulator import DeadlockError, Timeline, simulate
from tests.plan.schedules import random_orders

STAGES = st.integers(1, 8)
MICRO_BATCHES = st.integers(1, 14)
CHUNKS = st.integers(1, 4)


def computations(schedule: Schedule, kind: StepKind) -> list[tuple[int, int, int, int]]:
    """(stage, micro-batch, chunk, round) of every computation of a kind."""
    return [
        (stage, step.micro_batch, step.chunk, step.round)
        for stage, steps in enumerate(schedule)
        for step in steps
        if step.kind is kind
    ]


def assert_invariants(schedule: Schedule, *, n_micro_batches: int, n_chunks: int, n_rounds: int = 0) -> Timeline:
    """All of them but the bound on memory; training where `n_rounds` is 0."""
    n_stages = len(schedule)
    wanted = Counter(
        (chunk % n_stages, i, chunk, turn)
        for i in range(n_micro_batches)
        for chunk in range(n_chunks)
        for turn in range(n_rounds or 1)
    )
    assert Counter(computations(schedule, StepKind.FORWARD)) == wanted
    assert Counter(computations(schedule, StepKind.BACKWARD)) == (Counter() if n_rounds else wanted)
    messages = Counter(step for steps in schedule for step in steps if step.kind.is_message)
    assert set(messages.values()) <= {1}
    assert sum(step.kind.is_send for step in messages) == sum(step.kind.is_receive for step in messages)
    timeline = simulate(schedule)  # order, matching of messages, no deadlock
    assert [tuple(sorted(map(str, (s.step for s in spans)))) for spans in timeline.stages] == [
        tuple(sorted(map(str, steps))) for steps in schedule
    ]
    ends = {(s.step.computation): s.end for spans in timeline.stages for s in spans if not s.step.kind.is_message}
    for spans in timeline.stages:
        for span in spans:
            if span.step.source is not None and not span.step.kind.is_message:
                assert ends[span.step.source] <= span.start
            if span.step.kind is StepKind.BACKWARD:
                assert ends[StepKind.FORWARD, *span.step.computation[1:]] <= span.start
    assert simulate(schedule, eager=True).duration <= timeline.duration
    return timeline


@given(STAGES, MICRO_BATCHES)
def test_one_f_one_b(n_stages: int, n_micro_batches: int) -> None:
    timeline = assert_invariants(
        one_f_one_b(n_stages, n_micro_batches), n_micro_batches=n_micro_batches, n_chunks=n_stages
    )
    for stage in range(n_stages):
        assert timeline.peak_in_flight(stage) == min(n_stages - stage, n_micro_batches)
        assert timeline.bubble(stage) == (n_stages - 1) * 3  # forward and backward of one micro-batch


@given(STAGES, MICRO_BATCHES, CHUNKS)
def test_interleaved(n_stages: int, n_micro_batches: int, n_chunks: int) -> None:
    schedule = interleaved(n_stages, n_micro_batches, n_chunks)
    assert_invariants(schedule, n_micro_batches=n_micro_batches, n_chunks=n_stages * n_chunks)
    timeline = simulate(schedule, eager=True)
    for stage in range(n_stages):
        # Narayanan et al. 2021: warm-up of 2 (p - s - 1) + (v - 1) p chunks, and the one being computed
        most = 2 * (n_stages - stage - 1) + (n_chunks - 1) * n_stages + 1 if n_chunks > 1 else n_stages - stage
        assert timeline.peak_in_flight(stage) <= most
        if n_micro_batches % n_stages == 0:
            assert timeline.bubble(stage) == (n_stages - 1) * 3  # of chunks, n_chunks times smaller


@given(STAGES, MICRO_BATCHES, CHUNKS)
def test_inference(n_stages: int, n_micro_batches: int, n_chunks: int) -> None:
    schedule = inference(n_stages, n_micro_batches, n_chunks)
    timeline = assert_invariants(schedule, n_micro_batches=n_micro_batches, n_chunks=n_stages * n_chunks, n_rounds=1)
    if n_chunks == 1:
        assert schedule == inference(n_stages, n_micro_batches)
        assert timeline.duration == n_micro_batches + n_stages - 1


@given(STAGES, MICRO_BATCHES, st.integers(1, 6))
def test_generation(n_stages: int, n_micro_batches: int, n_rounds: int) -> None:
    schedule = generation(n_stages, n_micro_batches, n_rounds)
    timeline = assert_invariants(schedule, n_micro_batches=n_micro_batches, n_chunks=n_stages, n_rounds=n_rounds)
    period = max(n_micro_batches, n_stages)  # full pipelines never wait
    assert timeline.duration == (n_rounds - 1) * period + n_micro_batches + n_stages - 1
    if n_stages > 1:
        tokens = [s for s in schedule[0] if s.kind is StepKind.RECEIVE_FORWARD]
        assert [s.other for s in tokens] == [n_stages - 1] * (n_micro_batches * (n_rounds - 1))


@given(STAGES, MICRO_BATCHES, st.randoms(use_true_random=False))
def test_lists_never_block_whatever_the_real_costs_are(n_stages: int, n_micro_batches: int, random) -> None:  # type: ignore[no-untyped-def]
    for schedule in (one_f_one_b(n_stages, n_micro_batches), generation(n_stages, n_micro_batches, 3)):
        simulate(schedule, lambda _: random.random())


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_messages_of_two_models_in_any_possible_order(n_stages: int, n_first: int, n_second: int, random) -> None:  # type: ignore[no-untyped-def]
    orders = random_orders(n_stages, (n_first, n_second), random)
    costs = {step: random.random() + 0.01 for order in orders for step in order}
    schedule = place_messages(orders, costs.__getitem__)
    assert [[s for s in steps if not s.kind.is_message] for steps in schedule] == orders
    simulate(schedule, lambda _: random.random())


# ---------------------------------------------------------------- what stages hold


@given(STAGES, MICRO_BATCHES, CHUNKS)
def test_what_a_stage_holds(n_stages: int, n_micro_batches: int, vpp: int) -> None:
    """The states cover all that a walk along the list finds, and nothing more than one of them found."""
    schedule = interleaved(n_stages, n_micro_batches, vpp)
    for stage, steps in enumerate(schedule):
        if n_stages == 1:  # its chunks feed each other without messages
            continue
        states = in_flight(n_stages, n_micro_batches, vpp, stage)
        found: list[InFlight] = []
        for i, step in enumerate(steps):
            if step.kind is not StepKind.BACKWARD:
                continue
            before, held = steps[: i + 1], Counter[int]()
            for other in before[:-1]:
                place = other.chunk // n_stages
                held[place] += (other.kind is StepKind.FORWARD) - (other.kind is StepKind.BACKWARD)
            used = {other.computation for other in before if not other.kind.is_message}
            waiting = sum(other.kind.is_receive and other.computation not in used for other in before)
            found.append(InFlight(tuple(held[c] for c in range(vpp)), step.chunk // n_stages, waiting))
        assert sum(max(states, key=lambda state: sum(state.held)).held) == max(sum(one.held) for one in found)
        if vpp == 1:
            assert states == (InFlight((min(n_stages - stage, n_micro_batches),), 0),)
            continue
        assert {(state.held, state.place) for state in states} <= {(one.held, one.place) for one in found}
        assert all(any(state.covers(one) for state in states) for one in found)
        # and gradients on their way: at most those of so many batches of messages, of two neighbours each
        assert all(
            any(state.n_messages - one.n_messages in range(2 * PIPELINE_PENDING + 1) for one in found)
            for state in states
        )
        timeline = simulate(schedule, eager=True)
        assert max(sum(state.held) for state in states) <= timeline.peak_in_flight(stage)


def test_messages_are_waited_for_batch_by_batch() -> None:
    """A batch that nobody needs stays until four others have followed, though later ones were waited for."""
    # of the first micro-batch a gradient and an output, of the second one an output
    assert InFlight((3, 2), 0, n_messages=3) in in_flight(2, 4, 2, 0)


@given(st.integers(2, 8), MICRO_BATCHES, CHUNKS)
def test_messages_that_wait(n_stages: int, n_micro_batches: int, vpp: int) -> None:
    most = [most_received(n_stages, n_micro_batches, vpp, stage) for stage in range(n_stages)]
    if vpp == 1:
        assert most == [0] + [1] * (n_stages - 1)
    else:
        assert all(1 <= n <= n_stages * vpp for n in most)


# ---------------------------------------------------------------- lists that are wrong


def test_separate_messages_block() -> None:
    """1F1B where both stages send before they post what they receive."""
    send, receive = StepKind.SEND_FORWARD, StepKind.RECEIVE_FORWARD
    back, take_back = StepKind.SEND_BACKWARD, StepKind.RECEIVE_BACKWARD
    first = (
        Step(StepKind.FORWARD, 0, 0),
        Step(send, 0, 0, other=1, peer=1),
        Step(StepKind.FORWARD, 1, 0),
        Step(send, 1, 0, other=1, peer=1),
        Step(take_back, 0, 0, other=1, peer=1),
        Step(StepKind.BACKWARD, 0, 0, other=1),
        Step(take_back, 1, 0, other=1, peer=1),
        Step(StepKind.BACKWARD, 1, 0, other=1),
    )
    last = (
        Step(receive, 0, 1, other=0, peer=0),
        Step(StepKind.FORWARD, 0, 1, other=0),
        Step(StepKind.BACKWARD, 0, 1),
        Step(back, 0, 1, other=0, peer=0),
        Step(receive, 1, 1, other=0, peer=0),
        Step(StepKind.FORWARD, 1, 1, other=0),
        Step(StepKind.BACKWARD, 1, 1),
        Step(back, 1, 1, other=0, peer=0),
    )
    simulate((first, last))  # the two messages of each side are neighbours: one batch
    between = Step(StepKind.FORWARD, 7, 9)  # makes two batches of them
    with pytest.raises(DeadlockError, match="wait for each other") as caught:
        simulate(((*first[:4], between, *first[4:]), (*last[:4], between, *last[4:])))
    assert caught.value.stuck == {0: (first[3],), 1: (last[3],)}
    assert "stage 0 in send_forward(micro-batch 1, chunk 0, round 0) to stage 1" in str(caught.value)
    assert "stage 1 in send_backward(micro-batch 0, chunk 1, round 0) to stage 0" in str(caught.value)


@given(st.integers(2, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_lost_message_is_found(n_stages: int, n_micro_batches: int, random) -> None:  # type: ignore[no-untyped-def]
    lists = [list(steps) for steps in one_f_one_b(n_stages, n_micro_batches)]
    stage = random.randrange(n_stages)
    lists[stage].remove(random.choice([step for step in lists[stage] if step.kind.is_message]))
    with pytest.raises(ValueError, match=r"wait for each other|takes that message for|without what feeds it"):
        simulate(tuple(map(tuple, lists)))


@given(st.integers(2, 5), st.integers(2, 6), st.randoms(use_true_random=False))
def test_exchanged_messages_are_found(n_stages: int, n_micro_batches: int, random) -> None:  # type: ignore[no-untyped-def]
    """Two receives of one stage from one peer in the wrong order: the tensors would be taken for each other."""
    lists = [list(steps) for steps in inference(n_stages, n_micro_batches)]
    stage = random.randrange(1, n_stages)
    places = [i for i, step in enumerate(lists[stage]) if step.kind.is_receive]
    i, j = random.sample(places, 2)
    lists[stage][i], lists[stage][j] = lists[stage][j], lists[stage][i]
    with pytest.raises(ValueError, match=r"takes that message for|without what feeds it"):
        simulate(tuple(map(tuple, lists)))


def test_what_a_stage_cannot_do() -> None:
    forward, backward = forward_step(0, 0), backward_step(0, 0, 1)
    send = Step(StepKind.SEND_FORWARD, 0, 0, other=1, peer=1)
    for steps, message in [
        ((forward, forward), r"stage 0 does forward\(micro-batch 0, chunk 0, round 0\) twice"),
        ((backward,), "before the forward"),
        ((forward_step(0, 1),), "without what feeds it"),
        ((send,), "before it has computed that"),
        ((forward, replace(send, peer=0)), "a message without another stage"),
    ]:
        with pytest.raises(ValueError, match=message):
            simulate((steps, ()))


def test_orders_that_cannot_be_placed() -> None:
    with pytest.raises(ValueError, match=r"stages wait for each other: stage 0 in backward.*, stage 1 in forward"):
        place_messages(
            [
                [backward_step(0, 0, 2), forward_step(0, 0)],
                [forward_step(0, 1), backward_step(0, 1, 2)],
            ]
        )
    with pytest.raises(ValueError, match=r"nothing feeds forward\(micro-batch 0, chunk 1, round 0\) of stage 1"):
        place_messages([[], [forward_step(0, 1)]])
    with pytest.raises(ValueError, match="is computed twice: on stages 0 and 1"):
        place_messages([[forward_step(0, 0)], [forward_step(0, 0)]])
    with pytest.raises(ValueError, match="a computation takes time"):
        place_messages([[forward_step(0, 0)]], lambda _: 0.0)


def test_sizes() -> None:
    for make in (lambda: one_f_one_b(0, 1), lambda: inference(1, 0)):
        with pytest.raises(ValueError, match=r"a pipeline schedule has n_\w+=0; use 1 or more"):
            make()

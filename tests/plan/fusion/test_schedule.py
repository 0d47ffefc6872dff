"""Instances and schedules: what is accepted, what follows from orders, what is refused with which reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from realrl.errors import UsageError
from realrl.plan.fusion.instance import Instance, Model, Pipeline, Stage, on_block
from realrl.plan.fusion.messages import computations_of, in_order_latency, steps_of
from realrl.plan.fusion.problem import problem_of
from realrl.plan.fusion.quick import fused_orders
from realrl.plan.fusion.schedule import FusedSchedule, Letter
from realrl.plan.fusion.schedule_file import for_instance, read_schedule, schedule_text
from realrl.plan.pipeline import Schedule, Step, place_messages
from tests.plan.fusion.checker import check
from tests.plan.fusion.instances import random_instance, row
from tests.plan.pipeline_simulator import simulate

F, B = (lambda p, s: Letter(p, s, False)), (lambda p, s: Letter(p, s, True))


def two_stages(n_micro_batches: int = 1) -> Instance:
    """One model on two devices, another one the other way."""
    first = Model("A", 2, n_micro_batches, 1, 2, 1)
    return on_block([first, Model("B", 2, 1, 1, 1, 1, is_reversed=True)])


# ---------------------------------------------------------------- instances


def test_copies_fill_a_block_side_by_side() -> None:
    instance = on_block([Model("A", 4, 2, 1, 2, 1), Model("B", 2, 3, 1, 2, 1, is_reversed=True)])
    assert instance.n_devices == 4
    assert [p.name for p in instance.pipelines] == ["A", "B.0", "B.1"]
    assert [[s.devices for s in p.stages] for p in instance.pipelines] == [
        [(0,), (1,), (2,), (3,)],
        [(1,), (0,)],
        [(3,), (2,)],
    ]


def test_a_wide_stage_lies_on_several_devices() -> None:
    instance = on_block([Model("A", 4, 2, 1, 2, 1), Model("B", 2, 3, 1, 2, 1, width=2)])
    assert [s.devices for s in instance.pipelines[1].stages] == [(0, 1), (2, 3)]
    assert instance.least_caps == (1.0, 1.0, 1.0, 1.0)


def stage(**changes: Any) -> Stage:
    return Stage(**{"devices": (0,), "forward": 1.0, "backward": 1.0, "activation": 1.0, **changes})


def instance_with(**changes: Any) -> Instance:
    pipelines = (Pipeline("A", 1, (stage(),)),)
    return Instance(**{"n_devices": 1, "pipelines": pipelines, **changes})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: instance_with(n_devices=0), "pipelines cannot run on 0 devices"),
        (lambda: instance_with(pipelines=()), "there is no pipeline to schedule"),
        (lambda: instance_with(transport="pigeon"), "there is no transport 'pigeon'"),
        (lambda: instance_with(pipelines=(Pipeline("A", 1, (stage(),)),) * 2), "two pipelines have the name 'A'"),
        (lambda: instance_with(pipelines=(Pipeline("A", 1, ()),)), "pipeline 'A' has no stages"),
        (lambda: instance_with(pipelines=(Pipeline("A", 0, (stage(),)),)), "pipeline 'A' has 0 micro-batches"),
        (lambda: instance_with(pipelines=(Pipeline("A", 1 << 20, (stage(),)),)), "have 2,097,152 tasks"),
        (lambda: instance_with(pipelines=(Pipeline("A", 1, (stage(devices=()),)),)), r"is on the devices \(\)"),
        (lambda: instance_with(pipelines=(Pipeline("A", 1, (stage(devices=(0, 0)),)),)), r"is on the devices \(0, 0\)"),
        (lambda: instance_with(pipelines=(Pipeline("A", 1, (stage(devices=(1,)),)),)), "is on device 1"),
        (
            lambda: instance_with(pipelines=(Pipeline("A", 1, (stage(forward=0.0),)),)),
            "forward of stage 0 .* takes 0.0",
        ),
        (
            lambda: instance_with(pipelines=(Pipeline("A", 1, (stage(backward=float("nan")),)),)),
            "backward of stage 0 .* takes nan",
        ),
        (lambda: instance_with(pipelines=(Pipeline("A", 1, (stage(activation=-1.0),)),)), "keeps -1.0 of activations"),
        (lambda: instance_with(memory_caps=(1.0, 1.0)), "2 memory caps for 1 devices"),
        (lambda: instance_with(memory_caps=(0.9,)), "may hold 0.9 of activations, but one micro-batch takes 1"),
        (lambda: instance_with(memory_caps=(float("nan"),)), "may hold nan"),
        (lambda: on_block([Model("A", 3, 1, 1, 1, 1)], 4), "3 stages of model 'A' take 3 devices"),
        (lambda: on_block([Model("A", 0, 1, 1, 1, 1)]), "'A' has 0 stages"),
        (lambda: on_block([Model("A", 2, 1, [1, 1, 1], 1, 1)]), "3 numbers for forward, and 2 stages"),
    ],
)
def test_what_cannot_be_fused_is_refused(make: Callable[[], Instance], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


# ---------------------------------------------------------------- schedules


def test_times_memory_and_bubbles_of_a_schedule() -> None:
    words = [[F(0, 0), F(1, 1), B(1, 1), B(0, 0)], [F(1, 0), F(0, 1), B(0, 1), B(1, 0)]]
    schedule = FusedSchedule.of_words(two_stages(), words)
    assert schedule.latency == 6
    assert schedule.memory(0) == (1, 2, 1, 0)
    assert schedule.peaks == (2, 2)
    assert schedule.bubble_share == pytest.approx(1 - 10 / 12)
    assert check(schedule) == (6, [2, 2])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([[F(0, 0)]], "orders for 1 devices, and the pipelines are on 2"),
        ([[F(0, 1)], []], "forward of micro-batch 0 at stage 1 of pipeline 'A', which is not its own"),
        ([[F(7, 1)], []], "stage 1 of pipeline number 7, which is not its own"),
        ([[F(0, 0), F(0, 0)], []], "has more micro-batches than there are, up to the forward of micro-batch 2"),
        ([[F(0, 0)], []], "device 0 has no the backward|device 0 has no"),
        (
            [[B(0, 0), F(0, 0), F(1, 1), B(1, 1)], [F(0, 1), B(0, 1), F(1, 0), B(1, 0)]],
            "the orders of the devices are cyclic: device 0 waits for ever in the backward of micro-batch 0 at stage 0",
        ),
    ],
)
def test_orders_that_are_no_schedule_are_refused(words: list[list[Letter]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        FusedSchedule.of_words(two_stages(), words)


def test_micro_batches_are_taken_first_in_first_out() -> None:
    schedule = fused_orders(row(4))
    swapped = [list(order) for order in schedule.orders]
    at = [i for i, task in enumerate(swapped[0]) if (task.pipeline, task.is_backward) == (0, False)]
    swapped[0][at[0]], swapped[0][at[1]] = swapped[0][at[1]], swapped[0][at[0]]
    with pytest.raises(UsageError, match=r"has the forward of micro-batch 1 .* where micro-batch 0 is next"):
        FusedSchedule(schedule.instance, tuple(map(tuple, swapped)))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("seed", range(4))
def test_a_file_holds_the_whole_schedule(seed: int) -> None:
    schedule = fused_orders(random_instance(Random(seed)))
    assert read_schedule(schedule_text(schedule)) == schedule


def changed(**fields: Any) -> str:
    content = json.loads(schedule_text(fused_orders(two_stages())))
    return json.dumps({**content, **fields})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "x.json is not JSON"),
        ("[" * 100_000, "x.json is not JSON"),
        ("[]", "x.json is not a fused schedule"),
        (changed(format="other"), "is not a fused schedule"),
        (changed(version=2), "has version 2, and this reads 1"),
        (changed(more=1), "has the fields"),
        (changed(words=["F0", 3]), "a part of the wrong kind"),
        (changed(words=["F0 X1", "F1"]), "'X1' is no letter of a stage"),
        (changed(words=["F9", "F1"]), "'F9' is no letter of a stage"),
        (changed(words=["F0", "F1"]), "x.json: the order of device 0 has no"),
        (changed(pipelines=[{}]), "a part of the wrong kind"),
        (changed(pipelines=7), "a part of the wrong kind: '7' is not a list"),
        (changed(n_devices=2.5), "2.5 is not a whole number"),
        (changed(memory_caps=[0.1, 0.1]), "may hold 0.1 of activations"),
    ],
)
def test_files_that_are_none_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_schedule(text, where="x.json")


def test_a_schedule_for_another_shape_is_refused_with_the_reason() -> None:
    schedule = fused_orders(two_stages())
    other_times = on_block([Model("A", 2, 1, 3, 4, 5), Model("C", 2, 1, 1, 1, 1, is_reversed=True)])
    assert for_instance(schedule, other_times).orders == schedule.orders
    for instance, said in (
        (two_stages(2), "the schedule has 1 micro-batches of 'A', and 'A' has 2"),
        (on_block([Model("A", 3, 1, 1, 1, 1), Model("B", 3, 1, 1, 1, 1)]), "for 2 devices, and there are 3"),
        (on_block([Model("A", 2, 1, 1, 1, 1)]), "for 2 pipelines, and there are 1"),
        (on_block([Model("A", 2, 1, 1, 1, 1), Model("B", 2, 1, 1, 1, 1)]), "has stage 0 of 'B' on the devices"),
        (other_times.with_caps(5), "holds 6 of activations on device 0, and 5 fit"),
    ):
        with pytest.raises(UsageError, match=said):
            for_instance(schedule, instance)


# ---------------------------------------------------------------- messages


def lists_of(schedule: FusedSchedule) -> tuple[Schedule, Schedule, list[dict[Step, float]]]:
    """Return lists with early and with late messages, and times of computations."""
    computations = computations_of(schedule)
    durations = [
        {step: schedule.duration(task) for step, task in zip(steps, order, strict=True)}
        for steps, order in zip(computations, schedule.orders, strict=True)
    ]
    cost = {step: time for own in durations for step, time in own.items()}
    return steps_of(schedule), place_messages(computations, cost.__getitem__), durations


@pytest.mark.parametrize("number", [1, 4])
def test_in_order_messages_that_are_posted_early_cost_nothing(number: int) -> None:
    schedule = fused_orders(row(number))
    early, late, durations = lists_of(schedule)
    assert in_order_latency(early, durations, batched=False) == schedule.latency
    assert in_order_latency(late, durations, batched=True) > schedule.latency


@pytest.mark.parametrize("seed", range(6))
def test_lists_of_a_schedule_cannot_block_whatever_tasks_take(seed: int) -> None:
    random = Random(seed)
    instance = random_instance(random)
    if problem_of(instance).has_gangs:
        with pytest.raises(UsageError, match="which have no list in common"):
            steps_of(fused_orders(instance))
        return
    schedule = fused_orders(instance)
    early, late, durations = lists_of(schedule)
    nominal = {step: time for own in durations for step, time in own.items()}
    assert simulate(late, lambda s: nominal.get(s, 0.0), eager=True).duration == pytest.approx(schedule.latency)
    drawn = [{step: time * random.uniform(0.1, 3.0) for step, time in own.items()} for own in durations]
    slow = in_order_latency(early, drawn, batched=False)
    assert slow >= in_order_latency(early, drawn, batched=False) > 0
    assert_never_blocks(early)


def assert_never_blocks(lists: Schedule) -> None:
    """Run lists whose every message blocks until the other side is there."""
    at = [0] * len(lists)

    def pair_of(device: int) -> int | None:
        step = lists[device][at[device]]
        peer = step.peer
        assert peer is not None
        if at[peer] == len(lists[peer]):
            return None
        other = lists[peer][at[peer]]
        is_pair = other.peer == device and other.kind.is_message and other.kind.is_send != step.kind.is_send
        return peer if is_pair and other.other == step.chunk and other.micro_batch == step.micro_batch else None

    progress = True
    while progress:
        progress = False
        for device, steps in enumerate(lists):
            while at[device] < len(steps):
                if steps[at[device]].kind.is_message:
                    peer = pair_of(device)
                    if peer is None:
                        break
                    at[peer] += 1
                at[device] += 1
                progress = True
    assert at == [len(steps) for steps in lists]


def test_lists_that_wait_for_each_other_are_noticed() -> None:
    early, _, durations = lists_of(fused_orders(two_stages()))
    with pytest.raises(ValueError, match="wait for each other for ever"):
        in_order_latency((early[0][::-1], early[1]), durations, batched=False)

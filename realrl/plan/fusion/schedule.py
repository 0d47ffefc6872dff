"""Fused schedules: the order of each device's tasks, and what follows from it.

Micro-batches of a pipeline are alike, so each stage takes them first in, first out, which loses nothing. An order is
then a word: a sequence of letters that each stand for a stage's forward or backward of its next micro-batch.

Invariants of a `FusedSchedule`:
    - a device's order has each of its tasks once, the micro-batches of each letter ascending;
    - no tasks wait for each other in a circle: following the orders, every task starts as soon as the one before it on
      each of its devices and the ones that feed it have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from realrl.errors import UsageError
from realrl.plan.fusion.instance import Instance


class Task(NamedTuple):
    """The forward or the backward of a micro-batch at a stage; all are numbers from 0."""

    pipeline: int
    micro_batch: int
    stage: int
    is_backward: bool


class Letter(NamedTuple):
    """A stage's forward or backward, of whichever micro-batch is next."""

    pipeline: int
    stage: int
    is_backward: bool


Word = tuple[Letter, ...]


@dataclass(frozen=True)
class FusedSchedule:
    """Orders of an instance's tasks.

    Attributes:
        orders: for each device its tasks.

    Raises:
        UsageError: an order lacks a task, has one that is not its own or too early, or the orders are cyclic.
    """

    instance: Instance
    orders: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        instance = self.instance
        if len(self.orders) != instance.n_devices:
            raise UsageError(
                f"a schedule has orders for {len(self.orders)} devices, and the pipelines are on {instance.n_devices}"
            )
        for device, order in enumerate(self.orders):
            _check_order(instance, device, order)
        assert self.starts  # the orders are not cyclic

    @classmethod
    def of_words(cls, instance: Instance, words: Sequence[Sequence[Letter]]) -> FusedSchedule:
        """Return the schedule whose devices have these words."""
        return cls(instance, tuple(_tasks_of(word) for word in words))

    @property
    def words(self) -> tuple[Word, ...]:
        """The orders without numbers of micro-batches."""
        return tuple(tuple(Letter(t.pipeline, t.stage, t.is_backward) for t in order) for order in self.orders)

    @cached_property
    def starts(self) -> dict[Task, float]:
        """Start of every task, if messages take no time and overtake each other.

        A communicator that keeps the order of messages changes nothing, if they are posted as
        `realrl.plan.fusion.messages` says.
        """
        return _starts(self.instance, self.orders)

    def duration(self, task: Task) -> float:
        """Return the time of a task."""
        stage = self.instance.pipelines[task.pipeline].stages[task.stage]
        return stage.backward if task.is_backward else stage.forward

    def end(self, task: Task) -> float:
        """Return when a task is done."""
        return self.starts[task] + self.duration(task)

    @cached_property
    def latency(self) -> float:
        """Time until the last task is done."""
        return max(map(self.end, self.starts))

    def memory(self, device: int) -> tuple[float, ...]:
        """Return the activations on a device after each task of its order; they count from the start of a forward."""
        held: list[float] = []
        n_held: Counter[tuple[int, int]] = Counter()
        for task in self.orders[device]:
            n_held[task.pipeline, task.stage] += -1 if task.is_backward else 1
            pipelines = self.instance.pipelines
            held.append(sum(n * pipelines[p].stages[s].activation for (p, s), n in n_held.items()))
        return tuple(held)

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """The most activations of each device."""
        return tuple(max(self.memory(device), default=0.0) for device in range(self.instance.n_devices))

    @property
    def peak(self) -> float:
        """The most activations of any device."""
        return max(self.peaks)

    @property
    def bubble_share(self) -> float:
        """The share of the devices' time until the end in which they do not compute."""
        busy = sum(self.duration(task) for order in self.orders for task in order)
        return 1 - busy / (self.latency * self.instance.n_devices)


def _tasks_of(word: Sequence[Letter]) -> tuple[Task, ...]:
    done: Counter[Letter] = Counter()
    tasks = []
    for letter in word:
        tasks.append(Task(letter.pipeline, done[letter], letter.stage, letter.is_backward))
        done[letter] += 1
    return tuple(tasks)


def _check_order(instance: Instance, device: int, order: Sequence[Task]) -> None:
    wanted = {
        Letter(p, i, is_backward): instance.pipelines[p].n_micro_batches
        for p, i, _ in instance.stages_on(device)
        for is_backward in (False, True)
    }
    done = dict.fromkeys(wanted, 0)
    for task in order:
        letter = Letter(task.pipeline, task.stage, task.is_backward)
        if letter not in wanted:
            raise UsageError(f"the order of device {device} has {task_text(instance, task)}, which is not its own")
        if task.micro_batch != done[letter]:
            raise UsageError(
                f"the order of device {device} has {task_text(instance, task)} where micro-batch {done[letter]} is next"
            )
        done[letter] += 1
    for letter, n_done in done.items():
        if n_done != wanted[letter]:
            what = task_text(instance, Task(letter.pipeline, n_done, letter.stage, letter.is_backward))
            has = "more micro-batches than there are, up to" if n_done > wanted[letter] else "no"
            raise UsageError(f"the order of device {device} has {has} {what}")


def task_text(instance: Instance, task: Task) -> str:
    """Return a task in words, or in numbers if the instance has no such pipeline."""
    kind = "backward" if task.is_backward else "forward"
    known = 0 <= task.pipeline < len(instance.pipelines)
    name = repr(instance.pipelines[task.pipeline].name) if known else f"number {task.pipeline}"
    return f"the {kind} of micro-batch {task.micro_batch} at stage {task.stage} of pipeline {name}"


def feeds(instance: Instance, task: Task) -> tuple[Task, ...]:
    """Return the tasks whose results a task needs."""
    pipeline, micro_batch, stage, is_backward = task
    if not is_backward:
        return (Task(pipeline, micro_batch, stage - 1, False),) if stage else ()
    own = Task(pipeline, micro_batch, stage, False)
    if stage + 1 == len(instance.pipelines[pipeline].stages):
        return (own,)
    return own, Task(pipeline, micro_batch, stage + 1, True)


def _starts(instance: Instance, orders: Sequence[Sequence[Task]]) -> dict[Task, float]:
    """Run the orders on a clock: devices take turns, each until it has to wait."""
    devices_of = {
        (p, i): stage.devices
        for p, pipeline in enumerate(instance.pipelines)
        for i, stage in enumerate(pipeline.stages)
    }
    durations = {
        (p, i, is_backward): stage.backward if is_backward else stage.forward
        for p, pipeline in enumerate(instance.pipelines)
        for i, stage in enumerate(pipeline.stages)
        for is_backward in (False, True)
    }
    starts: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    at, free = [0] * len(orders), [0.0] * len(orders)
    progress = True
    while progress:
        progress = False
        for device, order in enumerate(orders):
            while at[device] < len(order):
                task = order[at[device]]
                needs = feeds(instance, task)
                devices = devices_of[task.pipeline, task.stage]
                if not all(need in ends for need in needs):
                    break
                if any(at[d] == len(orders[d]) or orders[d][at[d]] != task for d in devices):
                    break
                start = max(*(free[d] for d in devices), *(ends[need] for need in needs), 0.0)
                end = start + durations[task.pipeline, task.stage, task.is_backward]
                starts[task], ends[task] = start, end
                for d in devices:
                    at[d] += 1
                    free[d] = end
                progress = True
    for device, order in enumerate(orders):
        if at[device] < len(order):
            raise UsageError(
                f"the orders of the devices are cyclic: device {device} waits for ever in "
                f"{task_text(instance, order[at[device]])}",
                remedy="Change the order, or search for a schedule with `realrl fuse`.",
            )
    return starts

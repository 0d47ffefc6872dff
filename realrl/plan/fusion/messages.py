"""Messages of a fused schedule, as lists of steps that the pipeline executor runs.

All messages stand in one order: by the time at which the schedule computes them. A stage's list has its computations
at their end and its messages in that order among them. So a message is sent right after it was computed, and its
receive is posted before the computation during which it arrives.

Each message has to be posted and waited for by itself, not in a batch with its neighbours. Then

- nothing blocks, for any durations, even if a stage that posts a message waits until it is through: computations by
  their end and messages by their time form one order that all lists follow and that every dependence follows;
- on one communicator that completes messages in the order in which they were posted, every message is through when it
  was computed, if tasks take as long as the schedule says: whatever was posted before it on either side was computed
  before it. So such a communicator costs no time. Where receives are posted only when a device is free, as
  `realrl.plan.pipeline.place_messages` does, a sender's next message waits until a busy receiver has taken this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from realrl.errors import UsageError
from realrl.plan.fusion.instance import Instance
from realrl.plan.fusion.schedule import FusedSchedule, Task, feeds
from realrl.plan.pipeline import Schedule, Step, StepKind


def first_chunks(instance: Instance) -> tuple[int, ...]:
    """Return for each pipeline the number of its first chunk in lists of steps; its stages are chunks in order."""
    return tuple(accumulate((len(p.stages) for p in instance.pipelines), initial=0))[:-1]


def computations_of(schedule: FusedSchedule) -> list[list[Step]]:
    """Return the computations of each device without messages, for `realrl.plan.pipeline.place_messages`.

    Raises:
        UsageError: a stage lies on several devices, which have no such lists.
    """
    _check_single(schedule.instance)
    return [[_step_of(schedule.instance, task) for task in order] for order in schedule.orders]


def steps_of(schedule: FusedSchedule) -> Schedule:
    """Return the list of each device, with messages that are each a batch of their own.

    Raises:
        UsageError: a stage lies on several devices.
    """
    instance = schedule.instance
    _check_single(instance)
    device_of = {
        (p, i): stage.devices[0]
        for p, pipeline in enumerate(instance.pipelines)
        for i, stage in enumerate(pipeline.stages)
    }
    # per device: (time, 0 of computations and 1 of messages, a number that settles ties), step
    entries: list[list[tuple[tuple[float, int, int], Step]]] = [[] for _ in schedule.orders]
    for device, order in enumerate(schedule.orders):
        entries[device] = [((schedule.end(t), 0, i), _step_of(instance, t)) for i, t in enumerate(order)]
    number = 0
    for device, order in enumerate(schedule.orders):
        for task in order:
            for source in feeds(instance, task):
                sender = device_of[source.pipeline, source.stage]
                if sender != device:
                    key = (schedule.end(source), 1, number)
                    send, receive = _message(_step_of(instance, source), _step_of(instance, task), sender, device)
                    entries[sender].append((key, send))
                    entries[device].append((key, receive))
                    number += 1
    return tuple(tuple(step for _, step in sorted(own, key=_key)) for own in entries)


def _key(entry: tuple[tuple[float, int, int], Step]) -> tuple[float, int, int]:
    return entry[0]


def _check_single(instance: Instance) -> None:
    for pipeline in instance.pipelines:
        for i, stage in enumerate(pipeline.stages):
            if len(stage.devices) > 1:
                raise UsageError(
                    f"stage {i} of pipeline {pipeline.name!r} is on {len(stage.devices)} devices, which have no "
                    "list in common",
                    remedy="Give all models the same tensor-parallel size.",
                )


def _step_of(instance: Instance, task: Task) -> Step:
    first = first_chunks(instance)[task.pipeline]
    chunk, last = first + task.stage, first + len(instance.pipelines[task.pipeline].stages) - 1
    if task.is_backward:
        return Step(StepKind.BACKWARD, task.micro_batch, chunk, 0, chunk + 1 if chunk < last else None)
    return Step(StepKind.FORWARD, task.micro_batch, chunk, 0, chunk - 1 if chunk > first else None)


def _message(source: Step, target: Step, sender: int, receiver: int) -> tuple[Step, Step]:
    is_forward = target.kind is StepKind.FORWARD
    send = StepKind.SEND_FORWARD if is_forward else StepKind.SEND_BACKWARD
    receive = StepKind.RECEIVE_FORWARD if is_forward else StepKind.RECEIVE_BACKWARD
    return (
        Step(send, source.micro_batch, source.chunk, 0, target.chunk, receiver),
        Step(receive, target.micro_batch, target.chunk, 0, source.chunk, sender),
    )


# ---------------------------------------------------------------- time on one communicator


def in_order_latency(lists: Schedule, durations: Sequence[dict[Step, float]], *, batched: bool) -> float:
    """Return the latency of lists whose messages each device completes in the order in which it posts them.

    A device posts a message when it comes to it, computes on, and waits only for what its next computation needs.
    A message is through when both sides have posted it and all their earlier ones are.

    Args:
        durations: for each device the time of its computations.
        batched: True if neighbouring messages are one batch, which is through as a whole, as those of
            `realrl.plan.pipeline.place_messages` are.

    Raises:
        ValueError: the lists wait for each other for ever.
    """
    run = _InOrder(lists, durations, batched)
    while run.advance():
        pass
    if not run.is_done:
        raise ValueError("messages in this order wait for each other for ever")
    return max(run.time)


class _InOrder:
    """Devices on their way through their lists."""

    def __init__(self, lists: Schedule, durations: Sequence[dict[Step, float]], batched: bool) -> None:
        self._lists, self._durations = lists, durations
        self.time = [0.0] * len(lists)
        self._at = [0] * len(lists)
        self._batches: list[list[list[Step]]] = [[] for _ in lists]  # posted, in order
        self._posted: list[list[float]] = [[] for _ in lists]
        self._through: list[list[float]] = [[] for _ in lists]  # of the first batches
        self._begun: dict[tuple[Step, bool], float] = {}  # (receive, whose side) -> when its batch could start
        self._place: list[dict[Step, int]] = [{} for _ in lists]  # message's computation -> batch
        self._batched = batched

    @property
    def is_done(self) -> bool:
        return all(at == len(steps) for at, steps in zip(self._at, self._lists, strict=True))

    def advance(self) -> bool:
        """Go on on every device as far as possible; return True if anything happened."""
        return sum(self._advance(device) for device in range(len(self._lists))) > 0

    def _advance(self, device: int) -> bool:
        steps, did = self._lists[device], self._complete(device)
        while self._at[device] < len(steps):
            step = steps[self._at[device]]
            if step.kind.is_message:
                self._post(device, step)
            elif not self._compute(device, step):
                break
            self._at[device] += 1
            did = True
        return self._complete(device) or did

    def _post(self, device: int, step: Step) -> None:
        steps, at, batches = self._lists[device], self._at[device], self._batches[device]
        if self._batched and at and steps[at - 1].kind.is_message:
            batches[-1].append(step)
        else:
            batches.append([step])
            self._posted[device].append(self.time[device])
        if step.kind.is_receive:
            self._place[device][step] = len(batches) - 1

    def _compute(self, device: int, step: Step) -> bool:
        receives = [batch for message, batch in self._place[device].items() if message.computation == step.computation]
        if receives and receives[0] >= len(self._through[device]):
            return False
        start = max([self.time[device], *(self._through[device][batch] for batch in receives)])
        for message in [m for m in self._place[device] if m.computation == step.computation]:
            del self._place[device][message]
        self.time[device] = start + self._durations[device][step]
        return True

    def _complete(self, device: int) -> bool:
        """Complete the batches whose partners have begun theirs."""
        through, batches, did = self._through[device], self._batches[device], False
        while len(through) < len(batches):
            number = len(through)
            begins = max([self._posted[device][number], *through[-1:]])
            is_open = self._is_open(device, number)
            for step in batches[number]:
                self._begun[_receive_of(step, device), step.kind.is_send] = begins
            others = [self._begun.get((_receive_of(s, device), not s.kind.is_send)) for s in batches[number]]
            if is_open or any(other is None for other in others):
                break
            through.append(max([begins, *(other for other in others if other is not None)]))
            did = True
        return did

    def _is_open(self, device: int, number: int) -> bool:
        """Return True while a batch may grow."""
        at, steps = self._at[device], self._lists[device]
        return (
            self._batched and number == len(self._batches[device]) - 1 and at < len(steps) and steps[at].kind.is_message
        )


def _receive_of(step: Step, device: int) -> Step:
    """Return the receive of a message, of which a step is one side."""
    if step.kind.is_receive:
        return step
    assert step.other is not None
    kind = StepKind.RECEIVE_FORWARD if step.kind is StepKind.SEND_FORWARD else StepKind.RECEIVE_BACKWARD
    return Step(kind, step.micro_batch, step.other, step.round, step.chunk, device)

"""Simulation of a pipeline schedule: checks each list, checks that they fit together, and measures waiting.

The semantics are at least as strict as those of any real transport. A stage does its list in order. Neighbouring
messages are posted together. A send is done when its receive is posted, not before. The stage goes on when all of them
are done. Messages between two stages carry no names: the n-th sent meets the n-th received.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from realrl.plan.pipeline import Computation, Cost, Schedule, Step, StepKind, default_cost

_Message = tuple[Computation | None, int]


class DeadlockError(ValueError):
    """Stages wait for each other for ever.

    Attributes:
        stuck: stage -> messages that it waits for.
    """

    def __init__(self, stuck: dict[int, tuple[Step, ...]]) -> None:
        lines = [f"stage {stage} in {', '.join(map(str, steps))}" for stage, steps in sorted(stuck.items())]
        super().__init__("pipeline stages wait for each other: " + "; ".join(lines))
        self.stuck = stuck


@dataclass(frozen=True)
class Span:
    """Start and end of one step of a stage."""

    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The simulated run of every stage.

    Attributes:
        stages: the spans of each stage, in the order of its list.
    """

    stages: tuple[tuple[Span, ...], ...]

    @property
    def duration(self) -> float:
        """Time until the last stage is done."""
        return max((span.end for spans in self.stages for span in spans), default=0.0)

    def busy(self, stage: int) -> float:
        """Return the time that a stage computes."""
        return sum(span.end - span.start for span in self.stages[stage] if not span.step.kind.is_message)

    def bubble(self, stage: int) -> float:
        """Return the time that a stage does not compute."""
        return self.duration - self.busy(stage)

    def peak_in_flight(self, stage: int) -> int:
        """Return the largest number of forwards whose backward has not been computed yet."""
        now = peak = 0
        for span in self.stages[stage]:
            now += (span.step.kind is StepKind.FORWARD) - (span.step.kind is StepKind.BACKWARD)
            peak = max(peak, now)
        return peak


def simulate(schedule: Schedule, cost: Cost = default_cost, *, eager: bool = False) -> Timeline:
    """Simulate the lists of all stages.

    Args:
        cost: time of each step.
        eager: a stage goes on with steps that need no message still under way, as `engine.train.pipeline` does; this
            estimates time. Otherwise the strictest rules hold, which proves that nothing blocks.

    Raises:
        DeadlockError: stages wait for each other, or for a message that no stage sends or receives.
        ValueError: a list uses or sends data that its stage does not have, computes something twice, or two stages take
            one message for different things.
    """
    stages = [_Stage(index, list(steps), cost, eager) for index, steps in enumerate(schedule)]
    posted: _Posted = defaultdict(lambda: (deque(), deque()))
    progress = True
    while progress:
        progress = False
        for stage in stages:
            progress |= stage.advance(posted)
        for (source, target), (sends, receives) in posted.items():
            while sends and receives:
                _meet(source, target, sends.popleft(), receives.popleft(), cost)
                progress = True
    stuck = {stage.index: tuple(post.step for post in stage.waiting if not post.is_done) for stage in stages}
    if any(stuck.values()):
        raise DeadlockError({stage: steps for stage, steps in stuck.items() if steps})
    return Timeline(tuple(tuple(stage.spans) for stage in stages))


@dataclass
class _Post:
    """A message that one side has posted."""

    step: Step
    start: float
    end: float = 0.0
    is_done: bool = False


_Posted = dict[tuple[int, int], tuple[deque[_Post], deque[_Post]]]  # (source, target) -> sends, receives


def _meet(source: int, target: int, send: _Post, receive: _Post, cost: Cost) -> None:
    if _message(send.step) != _message(receive.step):
        raise ValueError(f"stage {source} does {send.step}, but stage {target} takes that message for {receive.step}")
    end = max(send.start, receive.start) + max(cost(send.step), cost(receive.step))
    for post in (send, receive):
        post.end, post.is_done = end, True


def _message(step: Step) -> _Message:
    """Return a message's identity, equal on both sides: the computation that made it, and its target chunk."""
    assert step.other is not None
    if step.kind.is_send:
        return step.computation, step.other
    return step.source, step.chunk


class _Stage:
    """One stage on its way through its list."""

    def __init__(self, index: int, steps: Sequence[Step], cost: Cost, eager: bool) -> None:
        self.index = index
        self.spans: list[Span] = []
        self.waiting: list[_Post] = []
        self._batches = deque(_batches(steps))
        self._cost = cost
        self._eager = eager
        self._time = 0.0
        self._computed: set[Computation] = set()
        self._received: dict[Computation, float] = {}

    def advance(self, posted: _Posted) -> bool:
        """Go on until the stage has to wait; return True if it did anything."""
        did_anything = self._finish_messages()
        while self._batches and self._can_do(self._batches[0]):
            batch = self._batches.popleft()
            if batch[0].kind.is_message:
                self._post(batch, posted)
            else:
                self._compute(batch[0])
            did_anything = True
        return did_anything

    def _can_do(self, batch: Sequence[Step]) -> bool:
        if not self._eager:
            return not self.waiting
        needed = batch[0].computation
        return batch[0].kind.is_message or all(post.step.computation != needed for post in self.waiting)

    def _post(self, batch: Sequence[Step], posted: _Posted) -> None:
        for step in batch:
            if step.peer is None or step.other is None or step.peer == self.index:
                raise ValueError(f"stage {self.index} has a message without another stage: {step}")
            post = _Post(step, self._time)
            self.waiting.append(post)
            if step.kind.is_receive:
                posted[step.peer, self.index][1].append(post)
                continue
            if step.computation not in self._computed:
                raise ValueError(f"stage {self.index} does {step} before it has computed that")
            posted[self.index, step.peer][0].append(post)

    def _finish_messages(self) -> bool:
        done = [post for post in self.waiting if post.is_done]
        self.waiting = [post for post in self.waiting if not post.is_done]
        for post in done:
            self.spans.append(Span(post.step, post.start, post.end))
            if not self._eager:
                self._time = max(self._time, post.end)
            if post.step.kind.is_receive:
                self._received[post.step.computation] = post.end
        return bool(done)

    def _compute(self, step: Step) -> None:
        made = step.computation
        if made in self._computed:
            raise ValueError(f"stage {self.index} does {step} twice")
        if step.kind is StepKind.BACKWARD and (StepKind.FORWARD, *made[1:]) not in self._computed:
            raise ValueError(f"stage {self.index} does {step} before the forward")
        if step.source is not None and made not in self._received and step.source not in self._computed:
            raise ValueError(f"stage {self.index} does {step} without what feeds it")
        self._computed.add(made)
        start = max(self._time, self._received.get(made, 0.0))
        self._time = start + self._cost(step)
        self.spans.append(Span(step, start, self._time))


def _batches(steps: Sequence[Step]) -> Iterator[tuple[Step, ...]]:
    """Yield single computations, and runs of neighbouring messages."""
    run: list[Step] = []
    for step in steps:
        if step.kind.is_message:
            run.append(step)
            continue
        if run:
            yield tuple(run)
            run = []
        yield (step,)
    if run:
        yield tuple(run)

"""A run on a simulated cluster: the real scheduler on a clock of its own.

    replies in the order of their arrival ─► MasterState ─► requests ─► Workers ─┐
        ▲                                                                        │
        └────────────────────────────── replies, with their times ◄──────────────┘

The master handles one event at a time. Deaths of workers and the clock of checkpoints are events among the others.
Equal input gives equal output.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec

from realrl.errors import RunError
from realrl.sched.events import (
    Abort,
    BeginEvaluation,
    CheckpointCommitted,
    CommitCheckpoint,
    Event,
    Failure,
    Finish,
    Instruction,
    OpenCheckpoint,
    RankSpan,
    ReportEvaluation,
    ReportStart,
    ReportStep,
    SaveIntervalPassed,
    Send,
    Start,
    WorkerLost,
)
from realrl.sched.master.master_plan import MasterPlan
from realrl.sched.master.master_state import MasterState
from realrl.sched.messages import Hello
from realrl.sched.step_clock import StepClock
from realrl.sched.track.track_plan import ResumePoint
from realrl.sim.durations import Durations, SampleSizes
from realrl.sim.samples import Samples
from realrl.sim.workers import NO_CAUSE, Activity, Workers

_INVENTED = "eval/"  # metrics of an evaluation, which only data can give


@dataclass(frozen=True)
class StepEnd:
    """A step that was reported.

    Attributes:
        at_s: time of the report.
        activity: index of the activity that completed the step.
        report: the master's report with the metrics that the clock gives.
    """

    at_s: float
    activity: int
    report: ReportStep


@dataclass(frozen=True)
class Committed:
    """A checkpoint that is in its place."""

    at_s: float
    point: ResumePoint


@dataclass(frozen=True)
class SimulatedRun:
    """One attempt of a run.

    Attributes:
        n_ranks: number of workers.
        start_s, end_s: time of its begin and its end.
        steps: in order.
        activities: in an order in which causes come first.
        spans: those that no step reported.
        failure: its reason to end early; None if it did not.
        committed: checkpoints, in order.
        scatter_s: seconds by which a step is longer on average; see `realrl.sim.scatter`.
    """

    n_ranks: int
    start_s: float
    end_s: float
    steps: tuple[StepEnd, ...]
    activities: tuple[Activity, ...]
    spans: tuple[RankSpan, ...]
    failure: Failure | None
    committed: tuple[Committed, ...]
    scatter_s: float = 0.0

    @property
    def steady(self) -> tuple[float, tuple[StepEnd, ...]]:
        """Begin and steps of the steady state: those after the first; if that is the only one, it."""
        if len(self.steps) > 1:
            return self.steps[0].at_s, self.steps[1:]
        return self.start_s, self.steps


@dataclass
class _Clock:
    """Events that are to come, in the order of time, then of their making."""

    events: list[tuple[float, int, int, Event]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    def push(self, at_s: float, event: Event, cause: int = NO_CAUSE) -> None:
        heapq.heappush(self.events, (at_s, next(self.numbers), cause, event))


class SimulatedCluster:
    """Runs a master's plan once, from its start to its end.

    Args:
        durations: seconds of everything.
        draw: sample id -> lengths of its prompt and responses, the same whenever asked.
        n_rows: usable rows of the dataset; None: as many as the run can take.
        dropped_share: call that may drop samples -> share that it drops.
        lost: rank -> time at which its process is killed.
        start_s: time of the begin.
    """

    def __init__(
        self,
        plan: MasterPlan,
        durations: Durations,
        draw: Callable[[str], SampleSizes],
        *,
        n_rows: int | None = None,
        dropped_share: Mapping[str, float] | None = None,
        lost: Mapping[int, float] | None = None,
        start_s: float = 0.0,
    ) -> None:
        self._plan = plan
        self._durations = durations
        self._master = MasterState(plan)
        samples = Samples(plan, draw, dropped_share or {})
        rows = plan.main.steps * plan.main.step_size if n_rows is None else n_rows
        self._workers = Workers(plan, durations, samples, n_rows=rows)
        self._clock = _Clock()
        self._start_s = self._now_s = start_s
        self._lost = lost or {}
        self._step_clock = StepClock(start_s)
        self._next_save_s: float | None = None
        self._steps: list[StepEnd] = []
        self._committed: list[Committed] = []
        self._end: Finish | Abort | None = None

    def run(self, n_steps: int | None = None) -> SimulatedRun:
        """Run to the end.

        Args:
            n_steps: reports after which nobody looks on; None for all.

        Raises:
            RunError: nothing can happen any more, and the run is not over.
        """
        self._clock.push(self._start_s, Start())
        for rank in range(self._plan.main.n_ranks):
            self._clock.push(self._start_s, Hello(rank, rank, f"worker {rank}"))
        for rank, at_s in self._lost.items():
            self._clock.push(max(at_s, self._start_s), WorkerLost(rank, -signal.SIGKILL, "killed by SIGKILL"))
        with _without_collector():
            while self._end is None and (n_steps is None or len(self._steps) < n_steps):
                if not self._clock.events:
                    told = "; ".join(f"'{c.name}' {self._master.explain(c.name)}" for c in self._plan.main.calls)
                    raise RunError(f"the simulated run is stuck at {self._now_s:.1f} s: {told}")
                at_s, _, cause, event = heapq.heappop(self._clock.events)
                self._now_s = max(self._now_s, at_s)
                self._handle(event, cause)
        failure = self._end.failure if isinstance(self._end, Abort) else None
        return SimulatedRun(
            n_ranks=self._plan.main.n_ranks,
            start_s=self._start_s,
            end_s=self._now_s,
            steps=tuple(self._steps),
            activities=tuple(self._workers.activities),
            spans=() if self._end is None else self._end.spans,
            failure=failure,
            committed=tuple(self._committed),
        )

    def decide(self, event: Event) -> list[Instruction]:
        """Return what the master makes of an event."""
        return self._master.handle(event)

    def _handle(self, event: Event, cause: int) -> None:
        """Let the master handle an event, which takes it some time, and perform its instructions."""
        if isinstance(event, SaveIntervalPassed):
            if self._next_save_s is None or self._now_s < self._next_save_s:  # a checkpoint came between
                return
            self._next_save_s = None
        instructions = self.decide(event)
        self._now_s += self._durations.handling(1)
        sends: list[Send] = []
        for instruction in instructions:
            if isinstance(instruction, Send):
                sends.append(instruction)
            else:
                self._perform(instruction, cause)
        for answer in self._workers.send(sends, now_s=self._now_s, cause=cause) if sends else ():
            self._clock.push(answer.at_s, answer.reply, answer.activity)

    def _perform(self, instruction: Instruction, cause: int) -> None:
        match instruction:
            case ReportStart():
                self._step_clock.start(self._now_s)
                self._plan_next_save()
            case BeginEvaluation():
                self._step_clock.begin_evaluation(self._now_s)
            case ReportStep():
                self._report(instruction, cause)
            case ReportEvaluation():
                self._step_clock.end_evaluation(instruction.metrics)
            case OpenCheckpoint():
                self._plan_next_save()
            case CommitCheckpoint(step=step):
                point = ResumePoint(step, instruction.cursor, instruction.versions, instruction.in_flight)
                self._committed.append(Committed(self._now_s, point))
                self._clock.push(self._now_s, CheckpointCommitted(step), cause)
            case Finish() | Abort():
                self._end = instruction

    def _report(self, report: ReportStep, cause: int) -> None:
        """Add what the master's shell adds to a report; leave out what only data can give."""
        timed = self._step_clock.end_step(self._now_s, report.metrics)
        metrics = {name: value for name, value in timed.items() if not name.startswith(_INVENTED)}
        self._steps.append(StepEnd(self._now_s, cause, msgspec.structs.replace(report, metrics=metrics)))

    def _plan_next_save(self) -> None:
        every_s = self._plan.save.interval_s
        if every_s:
            self._next_save_s = self._now_s + every_s
            self._clock.push(self._next_save_s, SaveIntervalPassed())


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the garbage collector from looking, again and again, at what is kept until the end: a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(
    plan: MasterPlan,
    durations: Durations,
    draw: Callable[[str], SampleSizes],
    *,
    n_rows: int | None = None,
    dropped_share: Mapping[str, float] | None = None,
    lost: Mapping[int, float] | None = None,
    restart_s: float = 0.0,
) -> tuple[SimulatedRun, ...]:
    """Simulate a run, and after the death of a worker its restart from the newest checkpoint; return the attempts.

    Args:
        durations, draw, n_rows, dropped_share: as for `SimulatedCluster`.
        lost: rank -> time at which its process is killed, once.
        restart_s: seconds from a death to the begin of the next attempt.
    """
    attempts: list[SimulatedRun] = []
    deaths, start_s = dict(lost or {}), 0.0
    while True:
        cluster = SimulatedCluster(
            plan, durations, draw, n_rows=n_rows, dropped_share=dropped_share, lost=deaths, start_s=start_s
        )
        attempts.append(cluster.run())
        last = attempts[-1]
        if last.failure is None or last.failure.rank not in deaths or last.end_s < deaths[last.failure.rank]:
            return tuple(attempts)
        deaths = {rank: at_s for rank, at_s in deaths.items() if at_s > last.end_s}
        start_s = last.end_s + restart_s
        if last.committed:
            plan = replace(plan, main=replace(plan.main, resume=last.committed[-1].point))

"""The master's logic: a pure state machine that turns events into instructions.

    Start, Hello from every rank ──► Initialize ──► Ready from every rank           `Workers`
                                                        │
        ┌───────────────────────────────────────────────┘
        └─► samples through calls, step after step; evaluations; checkpoints        `Run`, with its tracks
                   │
                   ▼ last step; when interrupted, the step under way, or none if no step is saved
               Shutdown ──► Goodbye from every rank ──► Finish                      `Farewell`

    a failure anywhere: Abort

It owns no socket, no clock and no file. Only `handle` changes it, and the instructions that `handle` returns are to be
performed in their order. Events after the end of the run are ignored, for messages may still be on their way. Before
the end, a reply that answers no open request is a bug, since no transport repeats or invents messages.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial

from realrl.errors import InvalidTransitionError, UsageError
from realrl.plan.samples.cursor import CursorState
from realrl.sched.events import (
    Abort,
    CheckpointCommitted,
    CheckpointFailed,
    Event,
    Failure,
    FailureKind,
    Finish,
    Instruction,
    Interrupted,
    SaveIntervalPassed,
    Start,
    WorkerLost,
    WorkerSilent,
)
from realrl.sched.master import diagnosis
from realrl.sched.master.closing import Farewell, interrupted_twice
from realrl.sched.master.master_plan import MasterPlan
from realrl.sched.master.run import Run, nobody_asked
from realrl.sched.master.workers import Workers
from realrl.sched.messages import (
    PROTOCOL_VERSION,
    CallDone,
    CheckpointSaved,
    Goodbye,
    Heartbeat,
    Hello,
    Ready,
    SamplesFreed,
    WorkerFailed,
)
from realrl.sched.story import Stories
from realrl.sched.track.dispatch import Dispatch
from realrl.sched.track.faults import Fatal


class RunPhase(Enum):
    """Progress of the run."""

    CONNECTING = "connecting"  # workers start and say Hello
    INITIALIZING = "initializing"  # workers build groups, models and the dataset
    RUNNING = "running"
    CLOSING = "closing"  # workers were told to shut down
    FINISHED = "finished"
    ABORTED = "aborted"


NEXT_RUN_PHASES = {
    RunPhase.CONNECTING: {
        RunPhase.INITIALIZING,  # Start came and every rank said Hello: Initialize goes to all of them
        RunPhase.CLOSING,  # interrupted before all were there
        RunPhase.ABORTED,  # a worker was lost, or is of another version
    },
    RunPhase.INITIALIZING: {
        RunPhase.RUNNING,  # every rank is ready, and the dataset is large enough for a step
        RunPhase.CLOSING,  # interrupted
        RunPhase.ABORTED,  # a worker failed, was lost or fell silent; or the dataset is too small
    },
    RunPhase.RUNNING: {
        RunPhase.CLOSING,  # the last step is complete and every checkpoint in place
        RunPhase.FINISHED,  # the same in an interrupted run, where workers are still busy with later steps
        RunPhase.ABORTED,  # a worker failed, was lost or fell silent; a checkpoint failed; or interrupted twice
    },
    RunPhase.CLOSING: {
        RunPhase.FINISHED,  # every worker said Goodbye (when interrupted: or was lost)
        RunPhase.ABORTED,  # a worker failed while the run was ending on its own; or interrupted a second time
    },
    RunPhase.FINISHED: set[RunPhase](),
    RunPhase.ABORTED: set[RunPhase](),
}


Trouble = Interrupted | CheckpointFailed | WorkerFailed | WorkerLost | WorkerSilent


class MasterState:
    """The whole run, as the master sees it."""

    def __init__(self, plan: MasterPlan) -> None:
        self.plan = plan
        self.phase = RunPhase.CONNECTING
        evaluating = () if plan.evaluation is None else plan.evaluation.calls
        self._stories = Stories(call.name for call in (*plan.main.calls, *evaluating))
        self._workers = Workers(plan.main.n_ranks, plan.main.dataset_rank, self._stories)
        self._run: Run | None = None  # from RUNNING on
        self._interrupted = ""  # the reason, from then on
        self._handle: Callable[[Event], list[Instruction]] = self._start_up  # of the phase

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event and return the instructions to perform, in their order.

        Raises:
            InvalidTransitionError: the event cannot happen in this state; the message tells the story so far.
        """
        self._stories.n_events += 1
        if self.is_over:
            return []
        try:
            return self._handle(event)
        except Fatal as fatal:
            self._enter(RunPhase.ABORTED, fatal.failure.message)
            return [Abort(fatal.failure, self._workers.take_spans())]
        except InvalidTransitionError as err:
            if err.story:
                raise
            raise InvalidTransitionError(err.message, self._stories.lines()) from err

    # ------------------------------------------------------------ questions

    @property
    def is_over(self) -> bool:
        """True if `handle` will never again return an instruction."""
        return self.phase in (RunPhase.FINISHED, RunPhase.ABORTED)

    @property
    def step(self) -> int:
        """The oldest step that is not complete."""
        return self.plan.main.first_step if self._run is None else self._run.main.scheduler.step

    @property
    def n_living_samples(self) -> int:
        """Samples of the main track that are loaded, or being loaded, and not freed."""
        return 0 if self._run is None else self._run.main.scheduler.n_living_samples

    @property
    def dispatches(self) -> list[Dispatch]:
        """Batches of calls that are under way."""
        return [] if self._run is None else self._run.dispatches

    def cursor_state(self, step: int) -> CursorState:
        """Return the loader's position after `step`; a `ResumePoint` with it continues with the same samples.

        Raises:
            InvalidTransitionError: the dataset is not known yet.
        """
        if self._run is None:
            raise InvalidTransitionError("the dataset's rows are not known before every worker is ready")
        return self._run.main.cursor_state(step)

    def story(self, call: str | None = None) -> list[str]:
        """Return the last things that happened to one call, or to the run."""
        return self._stories.lines(call)

    def explain(self, call: str) -> str:
        """Return the activity of a call of the main track, or its reason to wait."""
        if self._run is None:
            return f"waits for the run, which is {self.phase.value}"
        return self._run.main.scheduler.explain(call)

    def validate(self) -> None:
        """Check invariants, which hold between any two events.

        Raises:
            InvalidTransitionError: one of them is broken.
        """
        if self.phase is RunPhase.RUNNING and self._run is not None:
            self._run.validate()

    # ------------------------------------------------------------ one phase after another

    def _start_up(self, event: Event) -> list[Instruction]:
        """Handle an event in CONNECTING or INITIALIZING."""
        match event:
            case Start():
                self._workers.add_start(event)
            case Hello():
                self._workers.add(event)
                if event.protocol_version != PROTOCOL_VERSION:
                    raise Fatal(diagnosis.wrong_version(event))
            case Ready():
                self._workers.add_ready(event)
            case SaveIntervalPassed() | Heartbeat():
                return []
            case CheckpointCommitted():
                raise nobody_asked(event)
            case Interrupted() | CheckpointFailed() | WorkerFailed() | WorkerLost() | WorkerSilent():
                return self._on_trouble(event)
            case _:
                self._workers.answered(event)
        if self._workers.is_ready:
            return self._begin_running()
        if self.phase is RunPhase.CONNECTING and self._workers.is_connected:
            self._enter(RunPhase.INITIALIZING, f"all {self._workers.n_ranks} workers said Hello")
            return self._workers.initialize()
        return []

    def _begin_running(self) -> list[Instruction]:
        dataset, first_step = self._workers.dataset, self.plan.main.first_step
        try:
            self._run = run = Run(self.plan, dataset, workers=self._workers, stories=self._stories)
        except UsageError as err:
            raise Fatal(diagnosis.unusable_dataset(err)) from err
        last_step = run.main.scheduler.last_step
        self._enter(RunPhase.RUNNING, f"{len(dataset.row_ids)} rows, steps {first_step} to {last_step}")
        self._handle = partial(self._go_on, run)
        return [self._workers.report(first_step, last_step), *run.begin()]

    def _go_on(self, run: Run, event: Event) -> list[Instruction]:
        """Handle an event in RUNNING."""
        match event:
            case CallDone():  # first, as most events are of this kind
                instructions = run.handle(event)
            case Start():
                self._workers.add_start(event)
                return []
            case Hello():
                self._workers.add(event)
                return []
            case Heartbeat():  # the shell watches for those that stop
                return []
            case Ready() | SamplesFreed() | Goodbye():
                self._workers.answered(event)
                return []
            case CheckpointFailed() | WorkerFailed() | WorkerLost() | WorkerSilent():
                return self._on_trouble(event)
            case Interrupted(reason) if self._interrupted:
                raise interrupted_twice(reason)
            case Interrupted(reason) if not self.plan.save.writes:
                return self._close(reason)
            case Interrupted(reason):
                self._interrupted = reason
                instructions = run.stop()
            case _:
                instructions = run.handle(event)
        if run.is_complete:
            instructions += [*run.conclude(), *self._close(self._interrupted)]
        return instructions

    def _close(self, interrupted: str) -> list[Instruction]:
        if interrupted and self.dispatches:  # of later steps, which nobody will see
            self._enter(RunPhase.FINISHED, f"interrupted: {interrupted}")
            return [Finish(interrupted, self._workers.take_spans())]
        self._enter(RunPhase.CLOSING, f"interrupted: {interrupted}" if interrupted else "the last step is complete")
        farewell = Farewell(self._workers, interrupted)
        self._handle = partial(self._wind_up, farewell)
        return [*farewell.begin(), *self._finish_if_alone(farewell)]

    def _wind_up(self, farewell: Farewell, event: Event) -> list[Instruction]:
        """Handle an event in CLOSING: replies count only for a checkpoint that the ranks are saving."""
        instructions: list[Instruction] = []
        match event:
            case Start() | SaveIntervalPassed() | Heartbeat():
                return []
            case Hello():
                instructions = farewell.add(event)
            case Goodbye():
                farewell.take_leave(event)
            case Interrupted(reason):
                farewell.interrupt(reason)
            case CheckpointCommitted():
                if self._run is None:
                    raise nobody_asked(event)
                self._run.add_committed(event)
            case CheckpointFailed():
                return self._on_trouble(event)
            case WorkerFailed() | WorkerLost() | WorkerSilent():
                if not farewell.excuses(event):
                    return self._on_trouble(event)
            case _:
                asked = self._workers.answered_late(event)
                if isinstance(event, CheckpointSaved) and asked is not None and self._run is not None:
                    instructions = self._run.add_saved(event, asked[0])
        return [*instructions, *self._finish_if_alone(farewell)]

    def _finish_if_alone(self, farewell: Farewell) -> list[Instruction]:
        is_committing = self._run is not None and self._run.is_committing
        if not farewell.is_over or is_committing:
            return []
        self._enter(RunPhase.FINISHED, "every worker has left")
        return [Finish(farewell.interrupted, self._workers.take_spans())]

    def _on_trouble(self, event: Trouble) -> list[Instruction]:
        """End the run early."""
        match event:
            case Interrupted(reason):
                return self._close(reason)
            case CheckpointFailed(step, message):
                raise Fatal(Failure(kind=FailureKind.CHECKPOINT, message=message, step=step))
            case WorkerFailed():
                is_closing = self.phase is RunPhase.CLOSING
                asked = self._workers.answered_late(event) if is_closing else self._workers.answered(event)
                raise Fatal(diagnosis.worker_failed(event, self.dispatches, asked[0] if asked else None))
        if event.rank not in self._workers.hellos:
            raise Fatal(diagnosis.never_appeared(event))
        request = self._workers.outbox.oldest(event.rank)
        if isinstance(event, WorkerLost):
            raise Fatal(diagnosis.worker_lost(event, self.dispatches, request))
        raise Fatal(diagnosis.worker_silent(event, self.dispatches, request))

    def _enter(self, phase: RunPhase, why: str) -> None:
        if phase not in NEXT_RUN_PHASES[self.phase]:
            raise InvalidTransitionError(f"the run cannot go from {self.phase.value} to {phase.value}: {why}")
        self._stories.note(f"{self.phase.value} -> {phase.value}: {why}")
        self.phase = phase

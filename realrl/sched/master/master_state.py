"""The master's logic: a pure state machine that turns what happened into what to do next.

    Start, Hello from every rank ──► Initialize ──► Ready from every rank
        │                                               │
        │         `Scheduler`: samples through calls ◄──┘
        │                          │
        │                          ▼ every call is done with a step: ReportStep, SaveCheckpoint ──► CommitCheckpoint
        │                     last step ──► Shutdown ──► Goodbye from every rank ──► Finish
        ▼
    a failure anywhere: Abort

It owns no socket, no clock and no file: `handle` is the only thing that changes it, and what `handle` returns is to be
performed in that order. Whatever happens after the run is aborted or finished is ignored, for messages may still be on
their way; before that, a reply that answers no open request is a bug, since no transport repeats or invents messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from realrl.errors import InvalidTransitionError, UsageError
from realrl.plan.samples.cursor import CursorState, DatasetCursor
from realrl.sched.events import (
    Abort,
    BeginEvaluation,
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
    Event,
    Failure,
    FailureKind,
    Finish,
    Instruction,
    Interrupted,
    OpenCheckpoint,
    ReportEvaluation,
    ReportSamples,
    ReportStart,
    ReportStep,
    SampleContents,
    SaveIntervalPassed,
    Send,
    Start,
    WorkerLost,
    WorkerSilent,
)
from realrl.sched.master import diagnosis
from realrl.sched.master.closing import Farewell
from realrl.sched.master.diagnosis import Fatal
from realrl.sched.master.evaluation_times import EvaluationTimes
from realrl.sched.master.master_plan import MasterPlan
from realrl.sched.master.run_phase import NEXT_RUN_PHASES, RunPhase
from realrl.sched.master.saving import CheckpointTracker
from realrl.sched.messages import (
    PROTOCOL_VERSION,
    CallDone,
    CheckpointSaved,
    Goodbye,
    Heartbeat,
    Hello,
    HooksDone,
    Initialize,
    LoadSamples,
    MoveRows,
    Ready,
    Request,
    RowsMoved,
    RunCall,
    RunHooks,
    SamplesFreed,
    SamplesLoaded,
    SamplesRead,
    SaveCheckpoint,
    Shutdown,
    WorkerFailed,
)
from realrl.sched.outbox import NumberedReply, Outbox
from realrl.sched.story import Story
from realrl.sched.track.call_phase import Counters
from realrl.sched.track.dispatch import Dispatch
from realrl.sched.track.evaluator import Evaluator
from realrl.sched.track.readout import SampleReader
from realrl.sched.track.scheduler import Scheduler
from realrl.sched.track.scores import score
from realrl.sched.track.step_log import StepLog

_INTERRUPTED_EXIT_CODE = 130


class MasterState:
    """The whole run, as the master sees it.

    Args:
        plan: what to run.
    """

    def __init__(self, plan: MasterPlan) -> None:
        self.plan = plan
        self.phase = RunPhase.CONNECTING
        self._n_events = 0
        self._outbox = Outbox(plan.main.n_ranks)
        self._log = StepLog(plan.main.calls)
        self._story = Story()
        self._stories = {call.name: Story() for track in plan.tracks for call in track.calls}
        self._start: Start | None = None
        self._hellos: dict[int, Hello] = {}
        self._readies: dict[int, Ready] = {}
        self._cursor: DatasetCursor | None = None
        self._scheduler: Scheduler | None = None
        self._checkpoints = CheckpointTracker(1, 0, every_steps=0, at_end=False)
        self._reader = SampleReader(plan.main.readout)
        self._evaluator: Evaluator | None = None
        self._times = EvaluationTimes(1, 0, every_steps=0, at_start=False)
        self._held_back: ReportStep | None = None  # waits for the evaluation of its step
        self._contents: list[SampleContents] = []  # of a run that only evaluates
        self._farewell: Farewell | None = None
        self._handlers: dict[type[Event], Callable[[Any], list[Instruction]]] = {
            Start: self._on_start,
            Hello: self._on_hello,
            Ready: self._on_ready,
            SamplesLoaded: self._on_samples_loaded,
            CallDone: self._on_call_done,
            RowsMoved: self._on_part_done,
            HooksDone: self._on_part_done,
            SamplesRead: self._on_samples_read,
            SamplesFreed: self._on_samples_freed,
            CheckpointSaved: self._on_checkpoint_saved,
            SaveIntervalPassed: self._on_save_interval_passed,
            CheckpointCommitted: self._on_checkpoint_committed,
            CheckpointFailed: self._on_checkpoint_failed,
            Goodbye: self._on_goodbye,
            WorkerFailed: self._on_worker_failed,
            WorkerLost: self._on_worker_lost,
            WorkerSilent: self._on_worker_silent,
            Interrupted: self._on_interrupted,
            Heartbeat: lambda reply: [],  # the shell watches for heartbeats that stop; those that come change nothing
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event and return what to do, in this order.

        Raises:
            InvalidTransitionError: the event cannot happen in this state; the message tells the story so far.
        """
        self._n_events += 1
        if self.phase in (RunPhase.FINISHED, RunPhase.ABORTED):
            return []
        if self._scheduler is not None:
            self._scheduler.n_events = self._n_events
        try:
            return self._handlers[type(event)](event)
        except Fatal as fatal:
            self._enter(RunPhase.ABORTED, fatal.failure.message)
            return [Abort(fatal.failure, self._log.take_spans())]
        except InvalidTransitionError as err:
            if err.story:
                raise
            raise InvalidTransitionError(err.message, self._story.lines()) from err

    # ------------------------------------------------------------ questions

    @property
    def is_over(self) -> bool:
        """Whether `handle` will never again return an instruction."""
        return self.phase in (RunPhase.FINISHED, RunPhase.ABORTED)

    @property
    def step(self) -> int:
        """The oldest step that is not complete."""
        return self.plan.main.first_step if self._scheduler is None else self._scheduler.step

    @property
    def n_living_samples(self) -> int:
        """Samples that are loaded, or being loaded, and not freed."""
        return 0 if self._scheduler is None else self._scheduler.n_living_samples

    def cursor_state(self, step: int) -> CursorState:
        """Return where the loader is after `step`: a `ResumePoint` with it continues with the same samples.

        Raises:
            InvalidTransitionError: the dataset is not known yet.
        """
        if self._cursor is None:
            raise InvalidTransitionError("the dataset's rows are not known before every worker is ready")
        n_consumed = 0 if self._scheduler is None else self._scheduler.n_consumed(step)
        return self._cursor.state(self._cursor.start + n_consumed)

    def story(self, call: str | None = None) -> list[str]:
        """Return the last things that happened to one call, or to the run."""
        return (self._story if call is None else self._stories[call]).lines()

    def explain(self, call: str) -> str:
        """Return what a call is doing, or what it waits for."""
        if self._scheduler is None:
            return f"waits for the run, which is {self.phase.value}"
        return self._scheduler.explain(call)

    def validate(self) -> None:
        """Check what must hold between any two events.

        Raises:
            InvalidTransitionError: it does not.
        """
        if self.phase is not RunPhase.RUNNING:
            return
        assert self._scheduler is not None
        self._scheduler.validate()
        if self._evaluator is not None:
            self._evaluator.validate()
        if self._is_complete(self._scheduler):
            raise InvalidTransitionError("everything is done, but the run goes on")

    # ------------------------------------------------------------ start

    def _on_start(self, event: Start) -> list[Instruction]:
        if self.phase is RunPhase.CLOSING:
            return []
        if self._start is not None:
            raise InvalidTransitionError("the run was started twice")
        self._start = event
        return self._initialize_if_all_there()

    def _on_hello(self, reply: Hello) -> list[Instruction]:
        if not 0 <= reply.rank < self.plan.main.n_ranks:
            raise InvalidTransitionError(f"a worker calls itself rank {reply.rank}; there are {self.plan.main.n_ranks}")
        if reply.rank in self._hellos:
            raise InvalidTransitionError(f"worker {reply.rank} said Hello twice")
        self._hellos[reply.rank] = reply
        if self._farewell is not None:
            self._farewell.add(reply.rank)
            return [self._send(reply.rank, Shutdown(self._outbox.next_seq(reply.rank)))]
        if reply.protocol_version != PROTOCOL_VERSION:
            raise Fatal(diagnosis.wrong_version(reply))
        return self._initialize_if_all_there()

    def _initialize_if_all_there(self) -> list[Instruction]:
        if self._start is None or len(self._hellos) < self.plan.main.n_ranks:
            return []
        self._enter(RunPhase.INITIALIZING, f"all {self.plan.main.n_ranks} workers said Hello")
        peers = tuple(self._hellos[rank].data_address for rank in range(self.plan.main.n_ranks))
        start = self._start
        return [
            self._send(
                rank,
                Initialize(self._outbox.next_seq(rank), start.run, peers, start.rendezvous, start.resume_from),
            )
            for rank in range(self.plan.main.n_ranks)
        ]

    def _on_ready(self, reply: Ready) -> list[Instruction]:
        self._log.add_spans(reply.rank, reply.spans)
        if self._answered(reply) is None or self._farewell is not None:
            return []
        self._readies[reply.rank] = reply
        if len(self._readies) < self.plan.main.n_ranks:
            return []
        return self._begin_running()

    def _begin_running(self) -> list[Instruction]:
        plan, evaluated = self.plan.main, self.plan.evaluation
        ready, counters = self._readies[plan.dataset_rank], Counters()
        row_ids = ready.row_ids
        try:
            self._cursor = plan.cursor(row_ids, ready.content)
            last_step = plan.last_step(self._cursor)
            if evaluated is not None:
                self._evaluator = Evaluator(
                    evaluated,
                    ready.held_out_ids,
                    outbox=self._outbox,
                    stories=self._stories,
                    counters=counters,
                )
        except UsageError as err:
            raise Fatal(diagnosis.unusable_dataset(err)) from err
        is_evaluated_first = evaluated is not None and plan.config.eval.at_start and plan.resume is None
        every_steps = 0 if evaluated is None else plan.config.eval.every_steps
        self._times = EvaluationTimes(plan.first_step, last_step, every_steps=every_steps, at_start=is_evaluated_first)
        self._checkpoints = CheckpointTracker(
            plan.first_step,
            last_step,
            every_steps=self.plan.save.every_steps,
            at_end=self.plan.save.at_end,
            ends_epoch=self._is_saved_epoch,
        )
        self._scheduler = Scheduler(
            plan,
            cursor=self._cursor,
            last_step=last_step,
            checkpoints=self._checkpoints,
            outbox=self._outbox,
            log=self._log,
            stories=self._stories,
            reader=self._reader,
            counters=counters,
            evaluations=self._times,
        )
        self._enter(RunPhase.RUNNING, f"{len(row_ids)} rows, steps {plan.first_step} to {last_step}")
        replies = [self._readies[rank] for rank in sorted(self._readies)]
        report = ReportStart(
            first_step=plan.first_step,
            last_step=last_step,
            n_rows=len(row_ids),
            n_dropped=sum(reply.n_dropped for reply in replies),
            notes=tuple(dict.fromkeys(note for reply in replies for note in reply.notes)),
        )
        first = self._evaluate(plan.first_step - 1) if is_evaluated_first else []
        return [report, *first, *self._advance(self._scheduler)]

    # ------------------------------------------------------------ steps

    def _on_samples_loaded(self, reply: SamplesLoaded) -> list[Instruction]:
        request = self._answered(reply)
        self._log.add_spans(reply.rank, reply.spans)
        if request is None or self._scheduler is None or self._farewell is not None:
            return []
        assert isinstance(request, LoadSamples)
        if self._evaluator is not None and self._evaluator.owns(request):
            return self._go_on_evaluating(self._evaluator.handle(reply, request))
        self._scheduler.handle_loaded(reply, request)
        return self._advance(self._scheduler)

    def _on_call_done(self, reply: CallDone) -> list[Instruction]:
        request = self._answered(reply, call=reply.call)
        self._log.add_spans(reply.rank, reply.spans)
        if request is None or self._scheduler is None or self._farewell is not None:
            return []
        assert isinstance(request, RunCall)
        self._check_part(reply, request)
        if self._evaluator is not None and self._evaluator.owns(request):
            return self._go_on_evaluating(self._evaluator.handle(reply, request))
        return self._scheduler.handle_call_done(reply, request) + self._advance(self._scheduler)

    def _on_part_done(self, reply: RowsMoved | HooksDone) -> list[Instruction]:
        request = self._answered(reply, call=reply.call)
        self._log.add_spans(reply.rank, reply.spans)
        if request is None or self._scheduler is None or self._farewell is not None:
            return []
        assert isinstance(request, MoveRows | RunHooks)
        self._check_part(reply, request)
        if self._evaluator is not None and self._evaluator.owns(request):
            return self._go_on_evaluating(self._evaluator.handle(reply, request))
        return self._scheduler.handle_part_done(reply, request) + self._advance(self._scheduler)

    def _check_part(self, reply: CallDone | RowsMoved | HooksDone, request: RunCall | MoveRows | RunHooks) -> None:
        if (reply.dispatch_id, reply.call, reply.step) != (request.dispatch_id, request.call, request.step):
            raise InvalidTransitionError(
                f"worker {reply.rank} answered dispatch {request.dispatch_id} of '{request.call}', step {request.step},"
                f" with dispatch {reply.dispatch_id} of '{reply.call}', step {reply.step}",
                self.story(request.call),
            )

    def _on_samples_read(self, reply: SamplesRead) -> list[Instruction]:
        if self._answered(reply) is None or self._scheduler is None or self._farewell is not None:
            return []
        if self._evaluator is not None and self._evaluator.take(reply):
            return self._go_on_evaluating([])
        assert self._reader is not None
        self._reader.add(reply)
        return self._report_samples() + self._advance(self._scheduler)

    def _report_samples(self) -> list[Instruction]:
        """The steps whose samples are complete and read."""
        if self._reader is None or self._cursor is None:
            return []
        reports: list[Instruction] = []
        for step, samples in self._reader.take():
            epoch = self._cursor.epoch_of(self.cursor_state(step).rows_consumed - 1)
            reports.append(ReportSamples(step, epoch, samples))
            if self.plan.main.config.eval.only:
                self._contents += samples
        return reports

    def _on_samples_freed(self, reply: SamplesFreed) -> list[Instruction]:
        self._answered(reply)
        return []

    def _advance(self, scheduler: Scheduler) -> list[Instruction]:
        instructions: list[Instruction] = []
        while (step := scheduler.finish_step()) is not None:
            instructions += self._report(step)
        instructions += [*self._save_if_ready(scheduler), *scheduler.advance()]
        if self._is_complete(scheduler):
            if self.plan.main.config.eval.only:
                columns = [contents.columns for contents in self._contents]
                metrics = score(columns, pass_threshold=self.plan.main.config.eval.pass_threshold)
                instructions.append(ReportEvaluation(self.plan.main.first_step - 1, metrics))
            instructions += self._close("")
        return instructions

    def _is_complete(self, scheduler: Scheduler) -> bool:
        is_evaluating = self._evaluator is not None and self._evaluator.step is not None
        is_read = self._reader is None or self._reader.is_idle
        return scheduler.is_done and self._checkpoints.is_idle and is_read and not is_evaluating

    def _report(self, step: int) -> list[Instruction]:
        """A step is complete: evaluate it when that is due, then report it."""
        assert self._cursor is not None
        position = self.cursor_state(step).rows_consumed
        versions = self.plan.main.versions_after(step)
        metrics = self._log.finish_step(step, versions)
        self._story.note(self._n_events, f"step {step} is complete")
        report = ReportStep(step, self._cursor.epoch_of(position - 1), metrics, self._log.take_spans())
        reads: list[Instruction] = []
        if self._reader is not None:
            self._reader.close(step)
            reads = self._report_samples()
        if self._times.is_due(step):
            self._held_back = report
            return [*reads, *self._evaluate(step)]
        return [*reads, *self._conclude(report)]

    def _conclude(self, report: ReportStep) -> list[Instruction]:
        """A step is complete and evaluated, if it had to be: report it, and save it when that is due."""
        assert self._scheduler is not None
        if not self._checkpoints.is_due(report.step):
            self._checkpoints.pass_by(report.step)
            return [report]
        self._checkpoints.hold(report.step, self._scheduler.reading_before(report.step))
        return [report, *self._save_if_ready(self._scheduler)]

    # ------------------------------------------------------------ evaluation

    def _evaluate(self, step: int) -> list[Instruction]:
        """Begin to evaluate the parameters as they are after `step`."""
        assert self._evaluator is not None
        self._story.note(self._n_events, f"the evaluation after step {step} begins")
        return [BeginEvaluation(step, self._evaluator.n_samples), *self._evaluator.begin(step)]

    def _go_on_evaluating(self, instructions: list[Instruction]) -> list[Instruction]:
        """Report the evaluation when it is complete, and let training go on."""
        assert self._evaluator is not None
        assert self._scheduler is not None
        step = self._evaluator.step
        metrics = self._evaluator.finish()
        if step is None or metrics is None:
            return instructions
        self._story.note(self._n_events, f"the evaluation after step {step} is over")
        self._times.add_done(step)
        report, self._held_back = self._held_back, None
        if report is None:
            instructions.append(ReportEvaluation(step, metrics))
        else:
            evaluated = msgspec.structs.replace(report, metrics={**report.metrics, **metrics})
            instructions += self._conclude(evaluated)
        self._scheduler.wake()
        return instructions + self._advance(self._scheduler)

    # ------------------------------------------------------------ checkpoints

    def _is_saved_epoch(self, step: int) -> bool:
        """Whether one of the epochs after which to save ends in `step`, which has all its samples."""
        assert self._cursor is not None
        first, stop = (self.cursor_state(s).rows_consumed for s in (step - 1, step))
        return self._cursor.ends_epochs(first, stop, self.plan.save.every_epochs)

    def _on_save_interval_passed(self, event: SaveIntervalPassed) -> list[Instruction]:
        if self._scheduler is not None and self._farewell is None:
            self._checkpoints.want(self._scheduler.step_to_save)
        return []

    def _save_if_ready(self, scheduler: Scheduler) -> list[Instruction]:
        """Ask every rank for its share of the checkpoint that is due, unless it must wait."""
        step = self._checkpoints.ready(scheduler.dispatches)
        if step is None:
            return []
        in_flight, ranks = scheduler.in_flight(step), range(self.plan.main.n_ranks)
        rows = scheduler.rows_in_flight(in_flight)
        self._checkpoints.begin(step, ranks, in_flight)
        scheduler.wake()
        directory, next_seq = self.plan.checkpoint_directory_of(step), self._outbox.next_seq
        is_last = step == scheduler.last_step
        asks = [self._send(r, SaveCheckpoint(next_seq(r), step, directory, rows.get(r, {}), is_last)) for r in ranks]
        return [OpenCheckpoint(step, directory), *asks]

    def _on_checkpoint_saved(self, reply: CheckpointSaved) -> list[Instruction]:
        request = self._answered(reply)
        self._log.add_spans(reply.rank, reply.spans)
        if request is None:
            return []
        assert isinstance(request, SaveCheckpoint)
        step = request.step
        save = self._checkpoints.add_saved(step, reply)
        if save is None:
            return []
        cursor, versions, told = self.cursor_state(step), self.plan.main.versions_after(step), (save.files, save.roles)
        return [CommitCheckpoint(step, request.directory, cursor, versions, save.in_flight, *told, request.is_last)]

    def _on_checkpoint_committed(self, event: CheckpointCommitted) -> list[Instruction]:
        if not self._checkpoints.is_committing(event.step):
            raise InvalidTransitionError(f"the checkpoint of step {event.step} is in place, but nobody asked for it")
        self._checkpoints.add_committed(event.step)
        self._story.note(self._n_events, f"the checkpoint of step {event.step} is in place")
        if self._farewell is not None:
            return self._finish_if_alone(self._farewell)
        assert self._scheduler is not None
        return self._advance(self._scheduler)

    def _on_checkpoint_failed(self, event: CheckpointFailed) -> list[Instruction]:
        raise Fatal(Failure(kind=FailureKind.CHECKPOINT, message=event.message, step=event.step))

    # ------------------------------------------------------------ failures and the end

    def _on_worker_failed(self, reply: WorkerFailed) -> list[Instruction]:
        if self._farewell is not None and self._farewell.is_patient:
            request = self._answered(reply)
            return self._leave(self._farewell, reply.rank) if isinstance(request, Shutdown) else []
        request = self._answered(reply, call=reply.call)
        raise Fatal(diagnosis.worker_failed(reply, self._dispatches(), request))

    def _on_worker_lost(self, event: WorkerLost) -> list[Instruction]:
        if self._farewell is not None and (self._farewell.is_patient or event.exit_code == 0):
            return self._leave(self._farewell, event.rank)
        if self._farewell is not None and self._farewell.has_left(event.rank):
            return []
        if event.rank not in self._hellos:
            raise Fatal(diagnosis.never_appeared(event))
        raise Fatal(diagnosis.worker_lost(event, self._dispatches(), self._outbox.oldest(event.rank)))

    def _on_worker_silent(self, event: WorkerSilent) -> list[Instruction]:
        if self._farewell is not None and self._farewell.is_patient:
            return self._leave(self._farewell, event.rank)
        if self._farewell is not None and self._farewell.has_left(event.rank):
            return []
        if event.rank not in self._hellos:
            raise Fatal(diagnosis.never_appeared(event))
        raise Fatal(diagnosis.worker_silent(event, self._dispatches(), self._outbox.oldest(event.rank)))

    def _on_interrupted(self, event: Interrupted) -> list[Instruction]:
        if self._farewell is None:
            return self._close(event.reason)
        if self._farewell.is_patient:
            raise Fatal(
                Failure(
                    kind=FailureKind.INTERRUPTED,
                    message=f"interrupted twice: {event.reason}; workers that had not left yet were stopped",
                    exit_code=_INTERRUPTED_EXIT_CODE,
                )
            )
        self._farewell.interrupted = event.reason
        return []

    def _on_goodbye(self, reply: Goodbye) -> list[Instruction]:
        self._answered(reply)
        return [] if self._farewell is None else self._leave(self._farewell, reply.rank)

    def _close(self, interrupted: str) -> list[Instruction]:
        self._enter(RunPhase.CLOSING, f"interrupted: {interrupted}" if interrupted else "the last step is complete")
        self._farewell = Farewell(self._hellos, interrupted)
        sends: list[Instruction] = [
            self._send(rank, Shutdown(self._outbox.next_seq(rank))) for rank in sorted(self._hellos)
        ]
        return sends + self._finish_if_alone(self._farewell)

    def _leave(self, farewell: Farewell, rank: int) -> list[Instruction]:
        farewell.remove(rank)
        return self._finish_if_alone(farewell)

    def _finish_if_alone(self, farewell: Farewell) -> list[Instruction]:
        if not farewell.is_over or self._checkpoints.is_any_committing:
            return []
        self._enter(RunPhase.FINISHED, "every worker has left")
        return [Finish(farewell.interrupted, self._log.take_spans())]

    # ------------------------------------------------------------ small things

    def _answered(self, reply: NumberedReply, *, call: str | None = None) -> Request | None:
        """Return the request that a reply answers; None for a late reply of a run that is being closed."""
        if not 0 <= reply.rank < self.plan.main.n_ranks:
            raise InvalidTransitionError(f"{type(reply).__name__} came from rank {reply.rank}, which does not exist")
        problem = self._outbox.problem_with(reply)
        if problem is None:
            return self._outbox.close(reply.rank, reply.seq)
        if self._farewell is not None:
            return None
        raise InvalidTransitionError(problem, self.story(call if call in self._stories else None))

    def _dispatches(self) -> list[Dispatch]:
        training = [] if self._scheduler is None else list(self._scheduler.dispatches.values())
        return training if self._evaluator is None else training + self._evaluator.dispatches

    def _send(self, rank: int, request: Request) -> Send:
        self._outbox.add(rank, request)
        return Send(rank, request)

    def _enter(self, phase: RunPhase, why: str) -> None:
        if phase not in NEXT_RUN_PHASES[self.phase]:
            raise InvalidTransitionError(f"the run cannot go from {self.phase.value} to {phase.value}: {why}")
        self._story.note(self._n_events, f"{self.phase.value} -> {phase.value}: {why}")
        self.phase = phase

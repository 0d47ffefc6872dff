"""The run itself: its tracks, and the reports, evaluations and checkpoints that follow their steps.

    main track: a step is complete ─► evaluate it, if that is due ─► ReportStep ─► save it, if that is due
                                          │ Evaluation, a track                       │ OpenCheckpoint, SaveCheckpoint
                                          ▼                                           ▼
                                      its metrics                    CommitCheckpoint ─► CheckpointCommitted

Both hold calls back that would change parameters (`realrl.sched.master.saving`); everything else goes on.
"""

from __future__ import annotations

import msgspec

from realrl.errors import InvalidTransitionError
from realrl.sched.events import (
    AnnounceStop,
    BeginEvaluation,
    CheckpointCommitted,
    CommitCheckpoint,
    Instruction,
    OpenCheckpoint,
    ReportEvaluation,
    ReportSamples,
    ReportStep,
    SampleContents,
    SaveIntervalPassed,
)
from realrl.sched.master.master_plan import STEP_PLACEHOLDER, MasterPlan
from realrl.sched.master.saving import CheckpointTracker, EvaluationTimes
from realrl.sched.master.workers import Workers
from realrl.sched.messages import CallDone, CheckpointSaved, Ready, Request, SaveCheckpoint
from realrl.sched.outbox import Owner
from realrl.sched.story import Stories
from realrl.sched.track.dispatch import Dispatch
from realrl.sched.track.evaluation import Evaluation
from realrl.sched.track.scores import score
from realrl.sched.track.step_log import StepLog
from realrl.sched.track.track import Track, TrackReply


class Run:
    """Steps, evaluations and checkpoints, from the moment all workers are ready.

    Args:
        dataset: the reply of the worker that holds the dataset.
        workers: the receivers of requests.
        stories: accounts for error messages.

    Raises:
        UsageError: the dataset cannot feed the run.
    """

    def __init__(self, plan: MasterPlan, dataset: Ready, *, workers: Workers, stories: Stories) -> None:
        main = plan.main
        cursor = main.cursor(dataset.row_ids, dataset.content)
        first_step, last_step = main.first_step, main.last_step(cursor)
        self._held_out = None if plan.evaluation is None else plan.evaluation.cursor(dataset.held_out_ids)
        self._plan = plan
        self._workers = workers
        self._stories = stories
        self._checkpoints = CheckpointTracker(
            first_step,
            last_step,
            every_steps=plan.save.every_steps,
            at_end=plan.save.at_end,
            ends_epoch=lambda step: self.main.ends_epochs(step, plan.save.every_epochs),
        )
        self._times = EvaluationTimes(
            first_step,
            last_step,
            every_steps=0 if plan.evaluation is None else main.config.eval.every_steps,
            at_start=plan.evaluation is not None and main.config.eval.at_start and main.resume is None,
        )
        self.main = Track(
            main,
            cursor,
            outbox=workers.outbox,
            stories=stories,
            log=StepLog(main.calls),
            holds=(self._checkpoints, self._times),
        )
        self._evaluation: Evaluation | None = None  # under way
        self._held_back: ReportStep | None = None  # waits for the evaluation of its step
        self._contents: list[SampleContents] = []  # of a run that only evaluates
        self._stop_step: int | None = None  # the last one of an interrupted run

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to do."""
        return self.main.is_done and self._checkpoints.is_idle and self._evaluation is None

    @property
    def is_committing(self) -> bool:
        """True if every rank has saved some checkpoint, and its outcome is not known yet."""
        return self._checkpoints.is_any_committing

    @property
    def tracks(self) -> list[Track]:
        """Tracks that are under way."""
        return [self.main] if self._evaluation is None else [self.main, self._evaluation]

    @property
    def dispatches(self) -> list[Dispatch]:
        """Batches of calls that are under way."""
        return [dispatch for track in self.tracks for dispatch in track.scheduler.dispatches.values()]

    def begin(self) -> list[Instruction]:
        """Load the first samples, and evaluate first if that is wanted."""
        before = self._plan.main.first_step - 1
        first = self._evaluate(before) if self._times.is_due(before) else []
        return [*first, *self._advance()]

    def handle(
        self, event: TrackReply | CheckpointSaved | CheckpointCommitted | SaveIntervalPassed
    ) -> list[Instruction]:
        """Take in a worker's answer, progress of a checkpoint, or the wish for one.

        Raises:
            Fatal: the event ends the run.
            InvalidTransitionError: the event cannot happen now.
        """
        match event:
            case SaveIntervalPassed():
                if self._stop_step is None:  # else the last step is saved anyway
                    self._checkpoints.want(self.main.scheduler.step_to_save)
                return []
            case CheckpointCommitted():
                self.add_committed(event)
                return self._advance()
            case CheckpointSaved():
                return self.add_saved(event, self._workers.answered(event)[0])
        request, owner = self._workers.answered(event)
        if owner is Owner.MAIN:
            instructions = self.main.handle(event, request)
            if isinstance(event, CallDone) and not instructions and not self.main.scheduler.has_news:
                return []  # as a rule for all ranks of a mesh but the last one, and most events are of this kind
            return [*instructions, *self._report_samples(), *self._advance()]
        assert self._evaluation is not None
        return [*self._evaluation.handle(event, request), *self._go_on_evaluating(self._evaluation)]

    def stop(self) -> list[Instruction]:
        """Let the run end with the step under way, and save that.

        It is the oldest one that is not reported, or a later one if that has begun to change parameters.
        """
        scheduler = self.main.scheduler
        step = scheduler.step_to_save if self._held_back is None else self._held_back.step
        self._stop_step = step = min(step, scheduler.last_step)
        self._checkpoints.want(step)
        scheduler.stop_after(step)
        self._stories.note(f"the run is to end after step {step}")
        return [AnnounceStop(step), *self._advance()]

    def conclude(self) -> list[Instruction]:
        """Return the report that follows when everything is done."""
        config = self._plan.main.config
        if not config.eval.only:
            return []
        columns = [contents.columns for contents in self._contents]
        metrics = score(columns, pass_threshold=config.eval.pass_threshold)
        return [ReportEvaluation(self._plan.main.first_step - 1, metrics)]

    def validate(self) -> None:
        """Check invariants, which hold between any two events.

        Raises:
            InvalidTransitionError: one of them is broken.
        """
        for track in self.tracks:
            track.scheduler.validate()
        if self.is_complete:
            raise InvalidTransitionError("everything is done, but the run goes on")

    # ------------------------------------------------------------ steps

    def _advance(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        while (step := self.main.finish_step()) is not None:
            instructions += self._report(step)
        return [*instructions, *self._save_if_ready(), *self.main.scheduler.advance()]

    def _report(self, step: int) -> list[Instruction]:
        """Evaluate a complete step if that is due, then report it."""
        metrics = self.main.log.finish_step(step, self._plan.main.versions_after(step))
        self._stories.note(f"step {step} is complete")
        report = ReportStep(step, self.main.epoch(step), metrics, self._workers.take_spans())
        reads = self._report_samples()
        if self._times.is_due(step):
            self._held_back = report
            return [*reads, *self._evaluate(step)]
        return [*reads, *self._conclude_step(report)]

    def _report_samples(self) -> list[Instruction]:
        """Report the steps whose samples are complete and read."""
        reports: list[Instruction] = []
        for step, samples in self.main.reader.take():
            reports.append(ReportSamples(step, self.main.epoch(step), samples))
            if self._plan.main.config.eval.only:
                self._contents += samples
        return reports

    def _conclude_step(self, report: ReportStep) -> list[Instruction]:
        """Report a step that needs no further evaluation, and save it if that is due."""
        if not self._checkpoints.is_due(report.step):
            self._checkpoints.pass_by(report.step)
            return [report]
        self._checkpoints.hold(report.step, self.main.scheduler.reading_before(report.step))
        return [report, *self._save_if_ready()]

    # ------------------------------------------------------------ evaluations

    def _evaluate(self, step: int) -> list[Instruction]:
        """Begin to evaluate the parameters as they are after `step`."""
        plan, rows = self._plan.evaluation, self._held_out
        assert plan is not None
        assert rows is not None
        self._stories.note(f"the evaluation after step {step} begins")
        self._evaluation = Evaluation(step, plan, rows, outbox=self._workers.outbox, stories=self._stories)
        return [BeginEvaluation(step, rows.n_rows), *self._evaluation.advance()]

    def _go_on_evaluating(self, evaluation: Evaluation) -> list[Instruction]:
        """Report the evaluation when it is complete, and let training go on."""
        instructions = evaluation.advance()
        if not evaluation.is_done:
            return instructions
        step, metrics = evaluation.step, evaluation.metrics()
        self._stories.note(f"the evaluation after step {step} is over")
        self._times.add_done(step)
        self._evaluation = None
        report, self._held_back = self._held_back, None
        if report is None:
            instructions.append(ReportEvaluation(step, metrics))
        else:
            evaluated = msgspec.structs.replace(report, metrics={**report.metrics, **metrics})
            instructions += self._conclude_step(evaluated)
        self.main.scheduler.wake()
        return instructions + self._advance()

    # ------------------------------------------------------------ checkpoints

    def _save_if_ready(self) -> list[Instruction]:
        """Ask every rank for its share of the checkpoint that is due, unless it must wait."""
        scheduler = self.main.scheduler
        step = self._checkpoints.ready(scheduler.dispatches)
        if step is None:
            return []
        in_flight = scheduler.in_flight(step)
        rows = scheduler.rows_in_flight(in_flight)
        self._checkpoints.begin(step, self._workers.hellos, in_flight)
        scheduler.wake()
        directory = self._plan.checkpoint_directory.replace(STEP_PLACEHOLDER, str(step))
        is_last = step == scheduler.last_step
        waits = step == self._stop_step or self._plan.save.is_clocked_by_default
        asks = self._workers.ask_all(
            lambda rank, seq: SaveCheckpoint(seq, step, directory, rows.get(rank, {}), is_last, waits)
        )
        return [OpenCheckpoint(step, directory), *asks]

    def add_saved(self, reply: CheckpointSaved, request: Request) -> list[Instruction]:
        """Note that a worker wrote its share of a checkpoint; after the last share, commit it."""
        assert isinstance(request, SaveCheckpoint)
        step = request.step
        save = self._checkpoints.add_saved(step, reply)
        if save is None:
            return []
        cursor, versions = self.main.cursor_state(step), self._plan.main.versions_after(step)
        told = (save.files, save.roles)
        return [CommitCheckpoint(step, request.directory, cursor, versions, save.in_flight, *told, request.is_last)]

    def add_committed(self, event: CheckpointCommitted) -> None:
        """Note that a checkpoint is in place.

        Raises:
            InvalidTransitionError: it was not asked for.
        """
        if not self._checkpoints.is_committing(event.step):
            raise nobody_asked(event)
        self._checkpoints.add_committed(event.step)
        self._stories.note(f"the checkpoint of step {event.step} is in place")


def nobody_asked(event: CheckpointCommitted) -> InvalidTransitionError:
    """Return the error for a checkpoint that no worker saved."""
    return InvalidTransitionError(f"the checkpoint of step {event.step} is in place, but nobody asked for it")

"""The MasterWorker: one process without accelerator that drives a run.

    transport ──reply──►┐                        ┌──► transport   Send
    launcher  ──death──►├─► MasterState.handle ──┼──► disk        OpenCheckpoint, CommitCheckpoint
    clock     ──silence►┘    (all the policy)    ├──► sinks       ReportStart, ReportStep
              ──save───►┤                        │
    signals   ──stop───►┘                        │
                                                 └──► exit code   Finish, Abort

The loop handles replies as they come and looks at the launcher, the clock and signals every `_POLL_S` seconds. Before
the first step, and in a run that is not saved, a signal is an exception, upon which the session stops the workers.
"""

from __future__ import annotations

import gc
import math
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from realrl.errors import CheckpointError, TransportError, did_you_mean
from realrl.experiment.discovery import load_run
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.runtime.checkpoints.resume import make_master_plan
from realrl.runtime.checkpoints.store import CHECKPOINTS, CheckpointStore, checkpoint_store
from realrl.runtime.launchers.base import WorkerEnd
from realrl.runtime.master.timeline import Timeline
from realrl.runtime.output import failure_report as report
from realrl.runtime.output.evaluation_file import FILE_NAME as EVALUATION_FILE
from realrl.runtime.output.evaluation_file import evaluation_line, evaluation_table, write_evaluation
from realrl.runtime.output.generations import FILE_NAME as GENERATIONS_FILE
from realrl.runtime.output.generations import GenerationsFile, files_of
from realrl.runtime.output.logs import log_size
from realrl.runtime.processes.load import CoreWaits
from realrl.runtime.processes.recovery import write_failure
from realrl.runtime.processes.session import Session
from realrl.runtime.processes.signals import interrupted_exit_code
from realrl.sched.events import (
    Abort,
    AnnounceStop,
    BeginEvaluation,
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
    Event,
    Finish,
    Instruction,
    Interrupted,
    OpenCheckpoint,
    ReportEvaluation,
    ReportSamples,
    ReportStart,
    ReportStep,
    SaveIntervalPassed,
    Send,
    Start,
    WorkerLost,
    WorkerSilent,
)
from realrl.sched.master.master_state import MasterState
from realrl.sched.master.recovery import UNLESS_OFTEN, is_loss
from realrl.sched.messages import CallDone, Heartbeat, Hello, Reply, Request, RunCall, WorkerFailed
from realrl.sched.silence import Silences
from realrl.sched.step_clock import StepClock

COLLECTOR = (50_000, 20, 10)
"""Thresholds of the garbage collector in the master's process.

With Python's own (700, 10, 10) it looks, again and again, at what a step keeps until its end, which has no circles:
with 1,024 workers that adds 15% to the scheduler's time.
"""
_POLL_S = 0.2
_STACK_DUMP_S = 0.5
_DEATH_NOTICE_S = 2.0
_MUCH_WAITING = 0.2  # share of the time


class MasterWorker:
    """Feeds events to a `MasterState` and carries out its instructions.

    Args:
        plan: plan of the run.
        state: source of all decisions.
        session: transport, launcher and sinks.
        checkpoints: store that checkpoints are committed to.
    """

    def __init__(self, plan: RunPlan, state: MasterState, session: Session, checkpoints: CheckpointStore) -> None:
        self.state = state
        self._plan = plan
        self._session = session
        self._checkpoints = checkpoints
        self._generations = GenerationsFile(
            Path(plan.config.save.generations_path or session.run_dir / GENERATIONS_FILE),
            state.plan.main.readout,
            last_step=state.plan.main.first_step - 1,
            files=files_of(plan.config),
        )
        self._silences = Silences[int](math.inf, (), now_s=time.monotonic())  # of no worker until they start
        self._activity: dict[int, str] = {}
        self._exit_code: int | None = None
        self._last_step = 0
        self._results: dict[str, str] = {}  # filled if the run only evaluates
        self._started_s = self._work_started_s = time.monotonic()
        self._step_clock = StepClock(self._started_s)
        self._next_save_s: float | None = None  # time at which the clock asks for a checkpoint
        self._opened_s = self._save_took_s = 0.0  # begin of the last checkpoint, and the time that one took
        self._stop_step: int | None = None  # the last one of an interrupted run
        self._is_stopping = False
        self._scores: dict[int, float | None] = {}  # step -> value of the metric save.keep_best
        self._pids: dict[int, int] = {}  # rank -> process
        self._core_waits = CoreWaits()
        self._log_begins: dict[int, int] = {}  # rank -> byte of its log where this attempt begins
        self._timeline = Timeline(session.trace, session.launcher)

    def run(self, start: Start) -> int:
        """Run to the end; returns the exit code."""
        n_workers = self._plan.n_workers
        self._session.progress.phase(f"starting {n_workers} worker{'s' if n_workers > 1 else ''}")
        launcher = self._session.launcher
        self._log_begins = {rank: log_size(launcher.log_path(rank)) for rank in range(n_workers)}
        launcher.start(n_workers, self._session.admission)
        limit_s = math.inf if self._plan.config.launcher == "inline" else self._plan.config.cluster.worker_timeout_s
        self._silences = Silences(limit_s, range(n_workers), now_s=time.monotonic())
        self._dispatch(start)
        next_look_s = time.monotonic() + _POLL_S
        while self._exit_code is None:
            reply = self._session.transport.receive(max(0.0, next_look_s - time.monotonic()))
            if reply is not None:
                self._note(reply)
                if isinstance(reply, WorkerFailed):
                    self._on_failure(reply)
                elif not isinstance(reply, Heartbeat):
                    self._dispatch(reply)
            # With replies waiting, the look is put off, but not for long.
            if self._exit_code is None and time.monotonic() >= next_look_s + (0 if reply is None else _POLL_S):
                self._look_around(has_heard_all=reply is None)
                next_look_s = time.monotonic() + _POLL_S
        return self._exit_code

    def _look_around(self, *, has_heard_all: bool) -> None:
        """Turn signals, deaths and silence of workers, and the time of a checkpoint, into events; tell that we live."""
        self._session.beat()
        received = self._session.signals.received
        if received is not None and not self._is_stopping:
            self._is_stopping = True
            self._dispatch(Interrupted(signal.Signals(received).name))
        for lost in self._deaths():
            self._dispatch(lost)
        if self._next_save_s is not None and time.monotonic() > self._next_save_s:
            self._next_save_s = None  # until that checkpoint is begun
            self._dispatch(SaveIntervalPassed())
        for rank, silent_s in self._silences.look(time.monotonic()) if has_heard_all else ():
            if self._exit_code is None:
                self._session.launcher.dump_stack(rank)
                time.sleep(_STACK_DUMP_S)  # the stack must be in the log before the log is quoted
                self._dispatch(WorkerSilent(rank, self._activity.get(rank, ""), silent_s))

    def _note(self, reply: Reply) -> None:
        self._silences.hear(reply.rank)
        if isinstance(reply, Heartbeat):
            self._activity[reply.rank] = reply.activity
            self._session.progress.activity(reply.rank, reply.activity)
        elif isinstance(reply, CallDone):
            self._session.progress.activity(reply.rank, "idle")
            self._timeline.memory(reply.rank, reply.memory_gb)
        elif isinstance(reply, Hello):
            machine = self._session.launcher.machine(reply.rank)
            if not machine:  # numbers of processes say nothing about another machine's
                self._pids[reply.rank] = reply.pid
            where = f" on {machine}" if machine else ""
            self._session.progress.phase(f"worker {reply.rank} is up (process {reply.pid}{where})")

    def _dispatch(self, event: Event) -> None:
        """Hand one event to the state and perform its instructions, which may cause further events."""
        events = deque([event])
        with self._timeline.scheduling():
            while events and self._exit_code is None:
                for instruction in _sends_first(self.state.handle(events.popleft())):
                    caused = self._perform(instruction)
                    if caused is not None:
                        events.append(caused)

    def _perform(self, instruction: Instruction) -> Event | None:
        match instruction:
            case Send(rank, request):
                return self._send(rank, request)
            case ReportStart():
                self._report_start(instruction)
            case ReportStep():
                self._report_step(instruction)
            case ReportSamples():
                if self._plan.config.save.n_generations != 0:  # an evaluation reads them anyway
                    with self._timeline.writing("write responses"):
                        self._generations.write(instruction)
            case BeginEvaluation():
                self._begin_evaluation(instruction)
            case ReportEvaluation():
                self._report_evaluation(instruction)
            case AnnounceStop(step):
                self._stop_step = step
                name = signal.Signals(self._session.signals.received or signal.SIGINT).name
                told = (
                    f"{name}: step {step} is finished and saved, then the run stops; a second signal stops it at once"
                )
                self._session.progress.phase(told)
            case OpenCheckpoint(step):
                return self._open_checkpoint(step)
            case CommitCheckpoint():
                return self._commit(instruction)
            case Finish():
                self._finish(instruction)
            case Abort():
                self._abort(instruction)
        return None

    def _send(self, rank: int, request: Request) -> WorkerLost | None:
        try:
            self._session.transport.send(rank, request)
        except TransportError as error:
            return self._death_behind(rank, error)
        if isinstance(request, RunCall):
            self._session.progress.activity(rank, request.call)
        return None

    def _on_failure(self, reply: WorkerFailed) -> None:
        """Dispatch a failure after the deaths of other workers, which may have caused it and be noticed later."""
        lost = self._deaths(_DEATH_NOTICE_S if reply.needs_peers else 0.0)
        events: list[Event] = [reply, *(death for death in lost if death.rank == reply.rank)]
        for event in [*(death for death in lost if death.rank != reply.rank), *events]:
            self._dispatch(event)

    def _death_behind(self, rank: int, error: TransportError) -> WorkerLost:
        """Find the death behind a lost connection, which usually means a process that just died."""
        return next(iter(self._deaths(_DEATH_NOTICE_S)), WorkerLost(rank, None, error.message))

    def _deaths(self, patience_s: float = 0.0) -> list[WorkerLost]:
        """Workers whose end was not reported yet; waits `patience_s` for one."""
        deadline_s = time.monotonic() + patience_s
        while not (ended := self._session.launcher.poll()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for end in ended:
            self._silences.forget(end.rank)
        return [WorkerLost(end.rank, end.exit_code, _manner(end)) for end in ended]

    def _report_start(self, instruction: ReportStart) -> None:
        config = self._plan.config
        what = "eval " if config.eval.only else ""
        title = f"{what}{self._plan.experiment.name}" + (f" preset={config.preset}" if config.preset else "")
        self._work_started_s = time.monotonic()
        self._step_clock.start(self._work_started_s)
        self._core_waits.since_last(self._pids.values())
        self._plan_next_save()
        if self.state.plan.save.writes:
            self._session.signals.wait_for_step()
        self._last_step = instruction.last_step
        self._timeline.ends("start")
        self._session.progress.started(title, instruction.last_step, str(self._session.run_dir), instruction.notes)

    def _report_step(self, instruction: ReportStep) -> None:
        now_s, eval_s = time.monotonic(), instruction.metrics.get("time_s/eval")
        metrics = self._step_clock.end_step(now_s, instruction.metrics)
        core_wait = self._core_waits.since_last(self._pids.values())
        metrics |= {} if core_wait is None else {"perf/core_wait": core_wait}
        self._scores[instruction.step] = self._score(metrics)
        if eval_s is not None:
            self._timeline.took("evaluation", now_s - self._step_clock.evaluation_s)
        self._timeline.ends(f"step {instruction.step}", instruction.step)
        with self._timeline.writing("write metrics and trace"):
            self._session.metrics.write(instruction.step, instruction.epoch, metrics)
            self._timeline.write(instruction.spans, instruction.step, metrics)
        self._session.progress.step_done(instruction.step, instruction.epoch, metrics)
        if eval_s is not None:
            self._session.progress.phase(f"eval {evaluation_line(metrics)}  {eval_s:.1f} s")
        self._check_best(instruction.step, metrics)

    def _check_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell if the first step, or an evaluation, lacks the metric `save.keep_best`."""
        best, is_evaluated = self._plan.config.save.keep_best, "time_s/eval" in metrics
        must_have = is_evaluated if best.startswith("eval/") else step == self.state.plan.main.first_step
        if must_have and best not in ("", *metrics):
            told = f"save.keep_best={best}: step {step} has no such metric.{did_you_mean(best, metrics)}"
            self._session.progress.phase(told)

    def _begin_evaluation(self, instruction: BeginEvaluation) -> None:
        self._step_clock.begin_evaluation(time.monotonic())
        what = f"step {instruction.step}" if instruction.step else "the start"
        self._session.progress.phase(f"evaluating {what} on {instruction.n_samples} samples")

    def _report_evaluation(self, instruction: ReportEvaluation) -> None:
        self._timeline.ends("evaluation")
        if self._plan.config.eval.only:
            write_evaluation(self._session.run_dir / EVALUATION_FILE, self._plan, instruction.metrics)
            self._results = evaluation_table(instruction.metrics)
            return
        metrics = instruction.metrics
        self._step_clock.end_evaluation(metrics)
        self._session.metrics.write(instruction.step, 0, metrics)
        self._session.progress.phase(f"eval {evaluation_line(metrics)}  {metrics['time_s/eval']:.1f} s")
        self._check_best(instruction.step, metrics)

    def _plan_next_save(self) -> None:
        every_s = self.state.plan.save.interval_after(self._save_took_s)
        self._next_save_s = time.monotonic() + every_s if every_s else None

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        """The step's value of the metric `save.keep_best`; None if it is missing or not finite."""
        value = metrics.get(self._plan.config.save.keep_best)
        return value if value is not None and math.isfinite(value) else None

    def _open_checkpoint(self, step: int) -> Event | None:
        self._plan_next_save()
        self._opened_s = time.monotonic()
        try:
            self._checkpoints.open_partial(step)
        except OSError as err:
            return CheckpointFailed(step, str(self._checkpoints.save_failed(err, step)))
        return None

    def _commit(self, instruction: CommitCheckpoint) -> Event:
        score, best = self._scores.get(instruction.step), self._plan.config.save.keep_best
        self._scores = {step: score for step, score in self._scores.items() if step > instruction.step}
        try:
            with self._timeline.writing("commit checkpoint"):
                folder = self._checkpoints.commit(instruction, score)
        except CheckpointError as err:
            return CheckpointFailed(instruction.step, str(err))
        self._save_took_s = time.monotonic() - self._opened_s
        if self.state.plan.save.is_clocked_by_default:
            self._plan_next_save()
        if best and score is None:
            self._session.progress.phase(f"step {instruction.step} has no metric '{best}': it cannot be the best one")
        self._session.progress.phase(f"checkpoint of step {instruction.step} saved in {folder}")
        return CheckpointCommitted(instruction.step)

    def _finish(self, instruction: Finish) -> None:
        self._timeline.write(instruction.spans)
        run_dir = self._session.run_dir
        latest = self._checkpoints.latest()
        results = {**self._results, "results": str(run_dir / EVALUATION_FILE)} if self._results else {}
        summary = {
            **(results or {"steps": self._steps_text() + self._resumed_text()}),
            "time": self._time_text(time.monotonic()),
            "metrics": str(run_dir / "metrics.jsonl"),
            "trace": f"{run_dir / 'trace.json'} (open it in https://ui.perfetto.dev)",
        }
        if self._generations.path.exists():
            summary["responses"] = str(self._generations.path)
        if latest is not None:
            summary["checkpoint"] = str(latest)
        if self._core_waits.share > _MUCH_WAITING:
            told = f"workers waited {self._core_waits.share:.0%} of the time for a core, which others had"
            self._session.progress.phase(told)
        self._session.progress.finished(summary)
        self._exit_code = 0
        if instruction.interrupted:
            told = f"realrl: interrupted by {instruction.interrupted} after step {self._steps_text()}"
            self._session.progress.failed(told)
            is_apart = self._plan.config.is_on_machines
            if not is_apart or self._stop_step != self._last_step:  # a job with no step left is not queued again
                signum = signal.Signals[instruction.interrupted]
                self._exit_code = interrupted_exit_code(signum, is_on_machines=is_apart)

    def _steps_text(self) -> str:
        config = self._plan.config
        if self._stop_step is not None and self._stop_step < self._last_step:
            return f"{self._stop_step} of {self._last_step}"
        ended = f" of {config.steps}, where epochs={config.epochs} ended" if self._last_step < config.steps else ""
        return f"{self._last_step}{ended if any(mfc.is_train for mfc in self._plan.mfcs) else ''}"

    def _resumed_text(self) -> str:
        """Return the steps done now, if others were done before the run was resumed."""
        first, last = self.state.plan.main.first_step, self._stop_step or self._last_step
        if first == 1:
            return ""
        return f" ({_steps(1, first - 1)} before, {_steps(first, last)} now)"

    def _time_text(self, now_s: float) -> str:
        start_s, work_s = self._work_started_s - self._started_s, now_s - self._work_started_s
        what = "to evaluate" if self._results else "for the steps"
        return f"{start_s:.1f} s until workers and models were ready, then {work_s:.1f} s {what}"

    def _abort(self, instruction: Abort) -> None:
        failure = instruction.failure
        log, begin = None, 0
        if failure.rank is not None:
            log, begin = self._session.launcher.log_path(failure.rank), self._log_begins.get(failure.rank, 0)
        may_go_on = self._session.restarts_left > 0 and is_loss(failure)
        again = f"the run starts again by itself{UNLESS_OFTEN}" if may_go_on else ""
        text = report.render(report.from_failure(failure, log=log, log_begin=begin, again=again))
        self._checkpoints.discard_unfinished()  # on a full disk, that makes room for the rest
        self._session.progress.failed(text)
        self._timeline.write(instruction.spans)
        write_failure(self._session.run_dir, failure)
        self._exit_code = failure.exit_code


def _steps(first: int, last: int) -> str:
    return f"{first} to {last}" if last > first else f"{last}"


def _sends_first(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """Yield instructions in order, but requests before reports, whose files no worker has to wait for."""
    reports: list[Instruction] = []
    for instruction in instructions:
        if isinstance(instruction, ReportStep | ReportSamples):
            reports.append(instruction)
            continue
        if not isinstance(instruction, Send):
            yield from reports
            reports.clear()
        yield instruction
    yield from reports


def _manner(end: WorkerEnd) -> str:
    """Return the manner of a worker's end, in words."""
    return end.detail if end.exit_code is None else report.signal_name(end.exit_code) + end.detail


def run_master(session: Session) -> int:
    """The master program of a session: plan the run that it carries and drive it to the end.

    Raises:
        UsageError: the run cannot be planned, or the checkpoint to resume from cannot be used.
    """
    session.beat()
    experiment, config = load_run(session.run)
    plan = plan_run(config, experiment)
    store = replace(checkpoint_store(plan, session.run_dir / CHECKPOINTS), n_threads=session.n_threads)
    resume_from = Path(session.resume_from) if session.resume_from else None
    master_plan = make_master_plan(plan, store, resume_from, overlap=session.overlap)
    store.discard_unfinished()
    for folder in store.set_aside(master_plan.main.first_step - 1):
        session.progress.phase(f"{folder} is of a step that is done again")
    session.metrics.begin_after(-1 if resume_from is None else master_plan.main.first_step - 1)
    if resume_from is not None:
        session.progress.phase(f"resuming from {resume_from}")
    gc.freeze()  # a full collection over everything imported would stall hundreds of workers for tens of milliseconds
    if config.launcher != "inline":  # else the worker's tensors, some of them in circles, are of this process too
        gc.set_threshold(*COLLECTOR)
    start = Start(run=session.run, resume_from=session.resume_from)
    return MasterWorker(plan, MasterState(master_plan), session, store).run(start)

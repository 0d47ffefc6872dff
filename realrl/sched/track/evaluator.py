"""Evaluations of a training run, one at a time, on the workers that train.

    a step is complete and to be evaluated ─► begin: a scheduler of its own, over all held-out samples
                                                 │ its calls queue on the devices among those of the next step
    the scheduler is done, contents are read ◄───┘
        └─► metrics; training may go on (`realrl.sched.master.evaluation_times`)

Nothing of it is left behind: samples are freed, no call of it changes parameters, and the training's loader stands
where it stood. Its calls are named apart from those of the training graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from realrl.sched.events import Instruction, SampleContents
from realrl.sched.master.saving import CheckpointTracker
from realrl.sched.messages import (
    CallDone,
    HooksDone,
    LoadSamples,
    MoveRows,
    RowsMoved,
    RunCall,
    RunHooks,
    SamplesLoaded,
    SamplesRead,
)
from realrl.sched.outbox import Outbox
from realrl.sched.story import Story
from realrl.sched.track.call_phase import Counters
from realrl.sched.track.dispatch import Dispatch
from realrl.sched.track.readout import SampleReader
from realrl.sched.track.scheduler import Scheduler
from realrl.sched.track.scores import score
from realrl.sched.track.step_log import WholeLog
from realrl.sched.track.track_plan import TrackPlan

PartReply = CallDone | RowsMoved | HooksDone
PartRequest = RunCall | MoveRows | RunHooks


class Evaluator:
    """Runs evaluations.

    Args:
        plan: of one evaluation.
        row_ids: of the validation data.
        outbox: numbers the requests.
        stories: call name -> its story.
        counters: shared with the training's scheduler.
    """

    def __init__(
        self,
        plan: TrackPlan,
        row_ids: Sequence[str],
        *,
        outbox: Outbox,
        stories: Mapping[str, Story],
        counters: Counters,
    ) -> None:
        self.step: int | None = None  # after which the evaluation under way is
        self._plan = plan
        self._cursor = plan.cursor(row_ids)
        self._outbox = outbox
        self._stories = stories
        self._counters = counters
        self._names = frozenset(call.name for call in plan.calls)
        self._scheduler: Scheduler | None = None
        self._reader: SampleReader | None = None
        self._log = WholeLog(plan.calls)
        self._contents: list[SampleContents] = []

    @property
    def n_samples(self) -> int:
        """Samples of one evaluation."""
        return self._cursor.n_rows

    @property
    def dispatches(self) -> list[Dispatch]:
        """Dispatches under way."""
        return [] if self._scheduler is None else list(self._scheduler.dispatches.values())

    def owns(self, request: PartRequest | LoadSamples) -> bool:
        """Whether a request was sent for an evaluation."""
        return request.is_held_out if isinstance(request, LoadSamples) else request.call in self._names

    def begin(self, step: int) -> list[Instruction]:
        """Evaluate the parameters as they are after `step`."""
        assert self.step is None
        self.step = step
        self._log, self._contents = WholeLog(self._plan.calls), []
        self._reader = SampleReader(self._plan.readout)
        last_step = self._plan.last_step(self._cursor)
        self._scheduler = Scheduler(
            self._plan,
            cursor=self._cursor,
            last_step=last_step,
            checkpoints=CheckpointTracker(1, last_step, every_steps=0, at_end=False),
            outbox=self._outbox,
            log=self._log,
            stories=self._stories,
            reader=self._reader,
            counters=self._counters,
        )
        return self._advance(self._scheduler)

    def handle(self, reply: PartReply | SamplesLoaded, request: PartRequest | LoadSamples) -> list[Instruction]:
        """A worker did something for the evaluation."""
        scheduler = self._scheduler
        assert scheduler is not None
        instructions: list[Instruction] = []
        if isinstance(reply, SamplesLoaded):
            assert isinstance(request, LoadSamples)
            scheduler.handle_loaded(reply, request)
        elif isinstance(reply, CallDone):
            assert isinstance(request, RunCall)
            instructions = scheduler.handle_call_done(reply, request)
        else:
            assert isinstance(request, MoveRows | RunHooks)
            instructions = scheduler.handle_part_done(reply, request)
        return instructions + self._advance(scheduler)

    def take(self, reply: SamplesRead) -> bool:
        """Contents of samples came; return whether they are of an evaluation."""
        if self._reader is None or not self._reader.expects(reply):
            return False
        self._reader.add(reply)
        self._collect(self._reader)
        return True

    def finish(self) -> dict[str, float] | None:
        """The metrics of the evaluation, if it is complete; then it is over."""
        if self._scheduler is None or self._reader is None or not self._scheduler.is_done or not self._reader.is_idle:
            return None
        scores = score(
            [contents.columns for contents in self._contents], pass_threshold=self._plan.config.eval.pass_threshold
        )
        recorded = {f"eval/{name}": value for name, value in self._log.recorded().items()}
        self.step = self._scheduler = self._reader = None
        return {**recorded, **scores}

    def validate(self) -> None:
        """Check what must hold between any two events.

        Raises:
            InvalidTransitionError: it does not.
        """
        if self._scheduler is not None:
            self._scheduler.validate()

    def _advance(self, scheduler: Scheduler) -> list[Instruction]:
        assert self._reader is not None
        while (step := scheduler.finish_step()) is not None:
            self._reader.close(step)
        instructions = scheduler.advance()
        self._collect(self._reader)
        return instructions

    def _collect(self, reader: SampleReader) -> None:
        for _, contents in reader.take():
            self._contents += contents

"""A track: samples on their way through the calls of one graph, with the metrics and contents that they yield.

    replies to its requests ──► Track.handle ──► Scheduler: the next requests to its workers
                                    ├──────────► StepLog: metrics of its calls, by step
                                    └──────────► SampleReader: contents of its samples, by step

A run has a main track; another one may evaluate it (see `evaluation`). Tracks feed the same workers, each with requests
of its own, and know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from realrl.errors import InvalidTransitionError
from realrl.plan.samples.cursor import CursorState, DatasetCursor
from realrl.sched.events import Instruction
from realrl.sched.messages import (
    CallDone,
    HooksDone,
    LoadSamples,
    MoveRows,
    Request,
    RowsMoved,
    RunCall,
    RunHooks,
    SamplesLoaded,
    SamplesRead,
)
from realrl.sched.outbox import Outbox
from realrl.sched.story import Stories
from realrl.sched.track.readout import SampleReader
from realrl.sched.track.scheduler import Scheduler
from realrl.sched.track.step_log import StepLog
from realrl.sched.track.track_plan import TrackPlan
from realrl.sched.track.waits import Hold

TrackReply = SamplesLoaded | CallDone | RowsMoved | HooksDone | SamplesRead


class Track:
    """Takes the samples of a cursor through the calls of a plan.

    Args:
        cursor: order of the samples.
        stories: accounts of the calls for error messages.
        log: collects metrics.
        holds: keep calls from changing parameters that a checkpoint or an evaluation still needs.
    """

    def __init__(
        self,
        plan: TrackPlan,
        cursor: DatasetCursor,
        *,
        outbox: Outbox,
        stories: Stories,
        log: StepLog,
        holds: Sequence[Hold] = (),
    ) -> None:
        self.log = log
        self.reader = SampleReader(plan.readout)
        self.scheduler = Scheduler(
            plan, cursor, outbox=outbox, log=log, reader=self.reader, stories=stories, holds=holds
        )
        self._cursor = cursor
        self._stories = stories

    @property
    def is_done(self) -> bool:
        """True if every step is complete, and read."""
        return self.scheduler.is_done and self.reader.is_idle

    def cursor_state(self, step: int) -> CursorState:
        """Return the loader's position after `step`; a `ResumePoint` with it continues with the same samples."""
        return self._cursor.state(self._cursor.start + self.scheduler.n_consumed(step))

    def epoch(self, step: int) -> int:
        """Return the epoch of the last sample of `step`."""
        return self._cursor.epoch_of(self.cursor_state(step).rows_consumed - 1)

    def ends_epochs(self, step: int, every: int) -> bool:
        """Return True if an epoch whose number is a multiple of `every` ends in `step`, which has all its samples."""
        first, stop = (self.cursor_state(s).rows_consumed for s in (step - 1, step))
        return self._cursor.ends_epochs(first, stop, every)

    def handle(self, reply: TrackReply, request: Request) -> list[Instruction]:
        """Take in a worker's answer to a request of this track.

        Raises:
            Fatal: the answer ends the run.
            InvalidTransitionError: it belongs to something else.
        """
        if isinstance(reply, SamplesRead):
            self.reader.add(reply)
            return []
        if isinstance(reply, SamplesLoaded):
            assert isinstance(request, LoadSamples)
            self.scheduler.handle_loaded(reply, request)
            return []
        assert isinstance(request, RunCall | MoveRows | RunHooks)
        if (reply.dispatch_id, reply.call, reply.step) != (request.dispatch_id, request.call, request.step):
            raise InvalidTransitionError(
                f"worker {reply.rank} answered dispatch {request.dispatch_id} of '{request.call}', step {request.step},"
                f" with dispatch {reply.dispatch_id} of '{reply.call}', step {reply.step}",
                self._stories.lines(request.call),
            )
        if isinstance(reply, CallDone):
            assert isinstance(request, RunCall)
            self.reader.note(reply.notes)
            return self.scheduler.handle_call_done(reply, request)
        assert isinstance(request, MoveRows | RunHooks)
        return self.scheduler.handle_part_done(reply, request)

    def finish_step(self) -> int | None:
        """Go on to the next step if every call is done with the oldest one; return the step that is now complete."""
        step = self.scheduler.finish_step()
        if step is not None:
            self.reader.close(step)
        return step

"""An evaluation of a training run, on the workers that train.

    a step is complete and to be evaluated ─► a track of its own, over all held-out samples
                                                 │ its calls queue on the devices among those of the next step
    the track is done, contents are read ◄───────┘
        └─► metrics; training may go on (`realrl.sched.master.saving.EvaluationTimes`)

Nothing of it is left behind: samples are freed, no call of it changes parameters, and the training's loader stands
where it stood. Its calls are named apart from those of the training graph.
"""

from __future__ import annotations

from realrl.plan.samples.cursor import DatasetCursor
from realrl.sched.events import Instruction, SampleContents
from realrl.sched.messages import Request
from realrl.sched.outbox import Outbox
from realrl.sched.story import Stories
from realrl.sched.track.scores import score
from realrl.sched.track.step_log import WholeLog
from realrl.sched.track.track import Track, TrackReply
from realrl.sched.track.track_plan import TrackPlan

_BUSY = frozenset({"load", "transfer", "realloc", "offload", "call", "read"})  # spans of a worker, one after the other


class Evaluation(Track):
    """One evaluation.

    Args:
        step: the training step that precedes it.
        cursor: order of the held-out samples.
    """

    def __init__(self, step: int, plan: TrackPlan, cursor: DatasetCursor, *, outbox: Outbox, stories: Stories) -> None:
        self._whole_log = WholeLog(plan.calls)
        super().__init__(plan, cursor, outbox=outbox, stories=stories, log=self._whole_log)
        self.step = step
        self._pass_threshold = plan.config.eval.pass_threshold
        self._contents: list[SampleContents] = []
        self._busy_s: dict[int, float] = {}  # by rank

    def handle(self, reply: TrackReply, request: Request) -> list[Instruction]:
        busy_s = sum(span.end_s - span.start_s for span in reply.spans if span.kind in _BUSY)
        self._busy_s[reply.rank] = self._busy_s.get(reply.rank, 0.0) + busy_s
        return super().handle(reply, request)

    def advance(self) -> list[Instruction]:
        """Start every call that can start; return the instructions."""
        while self.finish_step() is not None:
            pass
        instructions = self.scheduler.advance()
        self._contents += [contents for _, samples in self.reader.take() for contents in samples]
        return instructions

    def metrics(self) -> dict[str, float]:
        """Return the metrics, once all is done; `time_s/eval` is the time for which it kept its busiest worker."""
        scores = score([contents.columns for contents in self._contents], pass_threshold=self._pass_threshold)
        recorded = {f"eval/{name}": value for name, value in self._whole_log.recorded().items()}
        return {**recorded, **scores, "time_s/eval": max(self._busy_s.values(), default=0.0)}

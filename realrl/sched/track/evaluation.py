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
from realrl.sched.outbox import Outbox
from realrl.sched.story import Stories
from realrl.sched.track.scores import score
from realrl.sched.track.step_log import WholeLog
from realrl.sched.track.track import Track
from realrl.sched.track.track_plan import TrackPlan


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

    def advance(self) -> list[Instruction]:
        """Start every call that can start; return the instructions."""
        while self.finish_step() is not None:
            pass
        instructions = self.scheduler.advance()
        self._contents += [contents for _, samples in self.reader.take() for contents in samples]
        return instructions

    def metrics(self) -> dict[str, float]:
        """Return the metrics, once all is done."""
        scores = score([contents.columns for contents in self._contents], pass_threshold=self._pass_threshold)
        return {**{f"eval/{name}": value for name, value in self._whole_log.recorded().items()}, **scores}

"""Times of checkpoints and evaluations, the progress of each checkpoint, and how both hold training back.

a step is complete and due ─► hold: dispatches that read older parameters end ─► begin: every rank is asked
                                                                                    │ their files are written
                              committed ◄─ the master moves the folder ◄── all saved ◄─┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from realrl.sched.messages import CheckpointSaved, SavedFile, SavedRole
from realrl.sched.samples.in_flight import InFlight


@dataclass
class Save:
    """A checkpoint that ranks are writing.

    Attributes:
        missing: ranks that have not reported.
        in_flight: work done for later steps when the ranks were asked.
        files: rank -> its files, of the ranks that reported so far.
        roles: what they told so far.
    """

    missing: set[int]
    in_flight: InFlight
    files: dict[int, Mapping[str, SavedFile]] = field(default_factory=dict)
    roles: dict[str, SavedRole] = field(default_factory=dict)


class CheckpointTracker:
    """Decides when checkpoints are due and keeps train_step calls behind them.

    A checkpoint of step i holds exactly i steps of training: the ranks are asked for it once step i is complete, and
    since they execute requests in order, a train_step of a later step may be sent from then on, not earlier.

    Args:
        first_step, last_step: range of the run, inclusive.
        every_steps: 0 means none on the way.
        at_end: the last step is saved.
        ends_epoch: True for a step that is saved because epochs end in it; asked of steps that have all their samples.
    """

    def __init__(
        self,
        first_step: int,
        last_step: int,
        *,
        every_steps: int,
        at_end: bool,
        ends_epoch: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._last_step = last_step
        self._every_steps = every_steps
        self._at_end = at_end
        self._ends_epoch = ends_epoch
        self._next = first_step  # the oldest step that is neither saved nor passed by
        self._wanted = 0  # the latest step that `want` asked for
        self._held: tuple[int, frozenset[int]] | None = None  # a step that is due, and the dispatches it waits for
        self._saves: dict[int, Save] = {}  # by step

    def want(self, step: int) -> None:
        """Note that the clock, or the end of an interrupted run, asks for a checkpoint of `step`, still unreported."""
        self._wanted = max(self._wanted, step)

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint of `step` is to be written."""
        if step > self._last_step:
            return False
        is_regular = self._every_steps > 0 and step % self._every_steps == 0
        is_end = self._at_end and step == self._last_step
        return is_regular or is_end or step == self._wanted or self._ends_epoch(step)

    def blocks_training(self, step: int) -> bool:
        """Return True if a train_step of `step` would change weights that an earlier step's checkpoint needs."""
        return any(self.is_due(earlier) for earlier in range(self._next, step))

    def explain(self, step: int) -> str:
        """Return the reason why a blocked train_step of `step` waits."""
        return f"the checkpoint of a step before {step}, which needs the old weights"

    def pass_by(self, step: int) -> None:
        """Note that `step` is complete, and not due."""
        self._next = step + 1

    def hold(self, step: int, dispatches: Iterable[int]) -> None:
        """Let the checkpoint of `step`, which is complete and due, wait for these dispatches."""
        self._held = (step, frozenset(dispatches))

    def ready(self, under_way: Mapping[int, object]) -> int | None:
        """Return the step that is due and waits for none of the dispatches under way, or None."""
        if self._held is None or not self._held[1].isdisjoint(under_way):
            return None
        return self._held[0]

    def begin(self, step: int, ranks: Iterable[int], in_flight: InFlight) -> None:
        """Note that all `ranks` are asked for their share of the checkpoint of `step`."""
        self._saves[step] = Save(set(ranks), in_flight)
        self._held = None
        self._next = step + 1

    def add_saved(self, step: int, reply: CheckpointSaved) -> Save | None:
        """Note that a rank wrote its share of `step`; return the checkpoint if this was the last share."""
        save = self._saves[step]
        save.missing.discard(reply.rank)
        save.files[reply.rank] = reply.files
        save.roles |= reply.roles
        return None if save.missing else save

    def is_committing(self, step: int) -> bool:
        """Return True if every rank saved its share of `step`, and the outcome is not known yet."""
        return step in self._saves and not self._saves[step].missing

    def add_committed(self, step: int) -> None:
        """Note that the checkpoint of `step` is in its final place."""
        del self._saves[step]

    @property
    def is_idle(self) -> bool:
        """True if no checkpoint is on its way."""
        return not self._saves and self._held is None

    @property
    def is_any_committing(self) -> bool:
        """True if every rank has saved some checkpoint, and its outcome is not known yet."""
        return any(not save.missing for save in self._saves.values())


class EvaluationTimes:
    """Decides when evaluations are due and keeps train_step calls behind them.

    An evaluation after step i sees exactly i steps of training: no train_step of a later step is sent before its end.

    Args:
        first_step, last_step: range of the run, inclusive.
        every_steps: 0 means none on the way.
        at_start: an evaluation precedes the first step.
    """

    def __init__(self, first_step: int, last_step: int, *, every_steps: int, at_start: bool) -> None:
        self._last_step = last_step
        self._every_steps = every_steps
        self._due = first_step - 1 if at_start else self._due_from(first_step)

    def is_due(self, step: int) -> bool:
        """Return True if an evaluation follows `step`."""
        return step == self._due

    def blocks_training(self, step: int) -> bool:
        """Return True if a train_step of `step` would change weights that are still to be evaluated."""
        return self._due is not None and step > self._due

    def explain(self, step: int) -> str:
        """Return the reason why a blocked train_step of `step` waits."""
        return f"the evaluation before step {step}, which needs the old weights"

    def add_done(self, step: int) -> None:
        """Note that the evaluation after `step` is over."""
        self._due = self._due_from(step + 1)

    def _due_from(self, step: int) -> int | None:
        if not self._every_steps:
            return None
        due = -(-step // self._every_steps) * self._every_steps
        return due if due <= self._last_step else None

"""Which steps are saved, and how far each checkpoint is."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointTracker:
    """Decides when checkpoints are due and keeps train_step calls behind them.

    A checkpoint of step i holds exactly i steps of training: the ranks are asked for it as soon as step i is complete,
    and since they execute requests in order, a train_step of a later step may be sent from then on, not earlier.

    Args:
        first_step, last_step: of the run.
        every_steps: 0 means none on the way.
        at_end: whether to save after the last step.
    """

    def __init__(self, first_step: int, last_step: int, *, every_steps: int, at_end: bool) -> None:
        self._last_step = last_step
        self._every_steps = every_steps
        self._at_end = at_end
        self._next_due = self._due_from(first_step)
        self._unsaved_ranks: dict[int, set[int]] = {}  # by step; empty while the checkpoint is being committed

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of `step`, which is complete, must be asked for now."""
        return step == self._next_due

    def blocks_training(self, step: int) -> bool:
        """Whether a train_step of `step` would change weights that an earlier step's checkpoint needs."""
        return self._next_due is not None and step > self._next_due

    def begin(self, step: int, ranks: Iterable[int]) -> None:
        """All `ranks` are asked for their share of the checkpoint of `step`."""
        self._unsaved_ranks[step] = set(ranks)
        self._next_due = self._due_from(step + 1)

    def add_saved(self, step: int, rank: int) -> bool:
        """`rank` wrote its share; return whether it was the last one."""
        self._unsaved_ranks[step].discard(rank)
        return self.is_committing(step)

    def is_committing(self, step: int) -> bool:
        """Whether every rank saved its share of `step`, and the outcome is not known yet."""
        return self._unsaved_ranks.get(step) == set()

    def add_committed(self, step: int) -> None:
        """The checkpoint of `step` is in its final place."""
        del self._unsaved_ranks[step]

    @property
    def is_idle(self) -> bool:
        """Whether no checkpoint is on its way."""
        return not self._unsaved_ranks

    @property
    def is_any_committing(self) -> bool:
        """Whether the outcome of some checkpoint is not known, but will be."""
        return any(not ranks for ranks in self._unsaved_ranks.values())

    def _due_from(self, step: int) -> int | None:
        """The first step from `step` on that is saved."""
        due = -(-step // self._every_steps) * self._every_steps if self._every_steps else None
        if due is not None and due <= self._last_step:
            return due
        return self._last_step if self._at_end and step <= self._last_step else None

"""After which steps a run is evaluated."""

from __future__ import annotations


class EvaluationTimes:
    """Decides when evaluations are due and keeps train_step calls behind them.

    An evaluation after step i sees exactly i steps of training: no train_step of a later step is sent before its end.

    Args:
        first_step, last_step: of the run.
        every_steps: 0 means none on the way.
        at_start: whether to evaluate before the first step.
    """

    def __init__(self, first_step: int, last_step: int, *, every_steps: int, at_start: bool) -> None:
        self._last_step = last_step
        self._every_steps = every_steps
        self._due = first_step - 1 if at_start else self._due_from(first_step)

    def is_due(self, step: int) -> bool:
        """Whether to evaluate now that `step` is complete."""
        return step == self._due

    def blocks_training(self, step: int) -> bool:
        """Whether a train_step of `step` would change weights that are still to be evaluated."""
        return self._due is not None and step > self._due

    def add_done(self, step: int) -> None:
        """The evaluation after `step` is over."""
        self._due = self._due_from(step + 1)

    def _due_from(self, step: int) -> int | None:
        if not self._every_steps:
            return None
        due = -(-step // self._every_steps) * self._every_steps
        return due if due <= self._last_step else None

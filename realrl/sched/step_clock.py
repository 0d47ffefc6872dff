"""The time that steps take, of which evaluations are no part."""

from __future__ import annotations

from collections.abc import Mapping


class StepClock:
    """Begin and end of steps and evaluations, in seconds of any clock.

    A step that is evaluated ends where its evaluation begins, and the next one begins as much later as the evaluation
    took of its busiest worker: calls of the next step run beside an evaluation.

    Attributes:
        evaluation_s: when the last evaluation began.
    """

    def __init__(self, now_s: float) -> None:
        self._step_s = self.evaluation_s = now_s

    def start(self, now_s: float) -> None:
        """Let the first step begin now."""
        self._step_s = now_s

    def begin_evaluation(self, now_s: float) -> None:
        """Let an evaluation begin now."""
        self.evaluation_s = now_s

    def end_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Let the next step begin behind an evaluation that precedes all steps.

        Args:
            metrics: of the evaluation.
        """
        self._step_s = self.evaluation_s + metrics.get("time_s/eval", 0.0)

    def end_step(self, now_s: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Let a step end now, and the next one begin.

        Args:
            metrics: of the step and its evaluation.

        Returns:
            The metrics, with `time_s/step` and `perf/tokens_per_s`.
        """
        began_s, ended_s = self._step_s, now_s
        self._step_s = now_s
        if "time_s/eval" in metrics:
            ended_s = self.evaluation_s
            self.end_evaluation(metrics)
        step_s = ended_s - began_s
        rate = metrics.get("n_tokens", 0.0) / step_s if step_s else 0.0
        return {**metrics, "time_s/step": step_s, "perf/tokens_per_s": rate}

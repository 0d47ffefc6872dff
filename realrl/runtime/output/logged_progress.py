"""Progress that the log keeps too, with the seconds of each call, so that ``master.log`` tells the story of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from realrl.errors import did_you_mean
from realrl.runtime.output.progress import Progress, metric_texts

_TIME = "time_s/"
_log = logging.getLogger("realrl.run")


class LoggedProgress:
    """Shows everything on another display, and logs it but for what each worker does.

    Args:
        shown: metrics that the log shows too. The first step tells of those that it lacks.
    """

    def __init__(self, display: Progress, shown: Sequence[str] = ()) -> None:
        self._display = display
        self._shown, self._untold = shown, list(shown)
        self._n_steps = 0

    def started(self, title: str, n_steps: int, run_dir: str, notes: Sequence[str] = ()) -> None:
        self._n_steps = n_steps
        _log.info("%s: %d steps, run folder %s", title, n_steps, run_dir)
        for note in notes:
            _log.info("note: %s", note)
        self._display.started(title, n_steps, run_dir, notes)

    def phase(self, text: str) -> None:
        _log.info("%s", text)
        self._display.phase(text)

    def activity(self, rank: int, text: str) -> None:
        self._display.activity(rank, text)

    def step_done(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        calls = [
            f"{name.removeprefix(_TIME)} {seconds:.3g} s"
            for name, seconds in metrics.items()
            if name.startswith(_TIME) and name != f"{_TIME}step"
        ]
        texts = [f"step {step}/{self._n_steps}", f"epoch {epoch}", *metric_texts(metrics, self._shown)]
        _log.info("%s: %s", "  ".join(texts), ", ".join(calls))
        self._display.step_done(step, epoch, metrics)
        for name in self._untold:
            if name not in metrics:
                self.phase(f"realrl: note: show: step {step} has no metric {name!r}.{did_you_mean(name, metrics)}")
        self._untold.clear()

    def finished(self, summary: Mapping[str, str]) -> None:
        for name, value in summary.items():
            _log.info("%s: %s", name, value)
        self._display.finished(summary)

    def failed(self, report: str) -> None:
        _log.error("%s", report)
        self._display.failed(report)

    def close(self) -> None:
        self._display.close()

"""Progress of a run for the user: a live display on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO, cast

from realrl.errors import counted

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_FIRST = ("reward/mean", "kl/mean")
_QUALITY = ("loss", "accuracy", "reward", "margin")  # last part of a metric's name
_PARTS = re.compile(r"reward/[^/]+/mean")  # rewards of several, before their weights
_MAX_PARTS = 6
_COUNTERS = ("version/", "time_s/", "eval/")  # a name of a role or call follows, or a metric with a line of its own
_THROUGHPUT = "perf/tokens_per_s"
_MAX_HEADLINES = 4
_HISTORY = 24
_BARS = "▁▂▃▄▅▆▇█"
_REFRESH_PER_S = 4


class Progress(Protocol):
    """Display of a run's progress. `activity` is safe from any thread."""

    def started(self, title: str, n_steps: int, run_dir: str, notes: Sequence[str] = ()) -> None:
        """Show the run's title, number of the last step, folder, and notes for the user."""

    def phase(self, text: str) -> None:
        """Show what the whole run does outside of steps: "waiting for 2 workers", "loading models"."""

    def activity(self, rank: int, text: str) -> None:
        """Show what one worker does now."""

    def step_done(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Show a completed step."""

    def finished(self, summary: Mapping[str, str]) -> None:
        """Show `summary` as names and values, when all steps are done."""

    def failed(self, report: str) -> None:
        """Show the report of a run that failed."""

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""


def make_progress(
    *, live: bool | None = None, out: TextIO | None = None, err: TextIO | None = None, shown: Sequence[str] = ()
) -> Progress:
    """The live display if `out` (default stdout) is a terminal, else plain lines; `live` overrides this.

    Args:
        shown: metrics that it shows besides `headline_metrics`.
    """
    out, err = out or sys.stdout, err or sys.stderr
    is_live = out.isatty() if live is None else live
    return LiveProgress(out, err, shown) if is_live else PlainProgress(out, err, shown)


def headline_metrics(metrics: Mapping[str, float], shown: Sequence[str] = ()) -> list[str]:
    """Names of the few metrics that show if training works, most telling first.

    These are reward, its parts and KL if the algorithm has them, else metrics named loss, accuracy, reward or margin.
    Those of `shown` follow. Nonzero shares of responses whose reward function failed come last.
    """
    failed = sorted(name for name, value in metrics.items() if name.endswith("/failed") and value > 0)
    chosen = [name for name in _FIRST if name in metrics]
    if not chosen:
        chosen = sorted((name for name in metrics if _quality(name)), key=_quality)
    parts = [name for name in metrics if name not in chosen and _PARTS.fullmatch(name)][:_MAX_PARTS]
    asked = [name for name in shown if name in metrics]
    return list(dict.fromkeys((*chosen[:1], *parts, *chosen[1:_MAX_HEADLINES], *asked, *failed)))


def _quality(name: str) -> int:
    """Position, from 1, in `_QUALITY` of the word that a name ends in ("actor/pg_loss": "loss"); 0 for none."""
    if name.startswith(_COUNTERS):
        return 0
    word = name.removesuffix("/mean").rpartition("/")[2].rpartition("_")[2]
    return _QUALITY.index(word) + 1 if word in _QUALITY else 0


class Pace:
    """Estimate of the time left from recent steps. The first step, a slow one, counts only while it is the only one."""

    def __init__(self, n_steps: int, *, now_s: float) -> None:
        self._n_steps = n_steps
        self._start_s = now_s
        self._done: deque[tuple[int, float]] = deque(maxlen=20)

    def step_done(self, step: int, *, now_s: float) -> None:
        """Record that `step` was completed at `now_s`."""
        self._done.append((step, now_s))

    def left_s(self) -> float | None:
        """Seconds until the last step is done, or None before the first."""
        if not self._done:
            return None
        (first, first_s), (last, last_s) = self._done[0], self._done[-1]
        per_step_s = last_s - self._start_s if last <= first else (last_s - first_s) / (last - first)
        return (self._n_steps - last) * per_step_s


class PlainProgress:
    """One line for each thing that happens; no colours, no cursor movement."""

    def __init__(self, out: TextIO, err: TextIO, shown: Sequence[str] = ()) -> None:
        self._out, self._err = _Quiet(out), _Quiet(err)
        self._shown = shown
        self._n_steps = 0
        self._pace: Pace | None = None
        self._last_phase = ""

    def started(self, title: str, n_steps: int, run_dir: str, notes: Sequence[str] = ()) -> None:
        self._n_steps = n_steps
        self._pace = Pace(n_steps, now_s=time.monotonic())
        self._out.line(f"{title}: {counted(n_steps, 'step')}, run folder {run_dir}")
        for note in notes:
            self._out.line(f"realrl: note: {note}")

    def phase(self, text: str) -> None:
        if text != self._last_phase:
            self._last_phase = text
            self._out.line(text)

    def activity(self, rank: int, text: str) -> None:
        """Do nothing: a log file would drown in it."""

    def step_done(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        parts = [f"step {step}/{self._n_steps}", *metric_texts(metrics, self._shown)]
        if self._pace is not None:
            self._pace.step_done(step, now_s=time.monotonic())
            left_s = self._pace.left_s()
            parts += [] if left_s is None else [f"left {_duration(left_s)}"]
        self._out.line("  ".join(parts))

    def finished(self, summary: Mapping[str, str]) -> None:
        for name, value in summary.items():
            self._out.line(f"{name}: {value}")

    def failed(self, report: str) -> None:
        self._err.line(report)

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""


class LiveProgress:
    """A display that stays in place: step bar, headline metrics with their history, activity of each worker."""

    def __init__(self, out: TextIO, err: TextIO, shown: Sequence[str] = ()) -> None:
        from rich.console import Console
        from rich.live import Live

        self._err = _Quiet(err)
        self._console = Console(file=cast(TextIO, _Quiet(out)), force_terminal=True, highlight=False)
        self._lock = threading.Lock()
        self._shown = shown
        self._title, self._run_dir = "realrl", ""
        self._phase = ""
        self._step, self._n_steps, self._epoch = 0, 0, 0
        self._start_s = self._phase_start_s = time.monotonic()
        self._pace = Pace(0, now_s=self._start_s)
        self._metrics: Mapping[str, float] = {}
        self._history: dict[str, deque[float]] = {}
        self._activities: dict[int, tuple[str, float]] = {}
        self._is_open = False
        self._live: Live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=_REFRESH_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def started(self, title: str, n_steps: int, run_dir: str, notes: Sequence[str] = ()) -> None:
        with self._lock:
            self._title, self._n_steps, self._run_dir = title, n_steps, run_dir
            self._pace = Pace(n_steps, now_s=time.monotonic())
        self._open()
        for note in notes:
            self._console.print(f"realrl: note: {note}", markup=False)

    def phase(self, text: str) -> None:
        with self._lock:
            if text != self._phase:
                self._phase, self._phase_start_s = text, time.monotonic()
        self._open()

    def activity(self, rank: int, text: str) -> None:
        with self._lock:
            if self._activities.get(rank, ("", 0.0))[0] != text:
                self._activities[rank] = (text, time.monotonic())

    def step_done(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._step, self._epoch, self._metrics, self._phase = step, epoch, dict(metrics), ""
            self._pace.step_done(step, now_s=time.monotonic())
            for name in headline_metrics(metrics, self._shown):
                self._history.setdefault(name, deque(maxlen=_HISTORY)).append(metrics[name])

    def finished(self, summary: Mapping[str, str]) -> None:
        from rich.table import Table

        with self._lock:
            self._activities.clear()
            self._phase = ""
        self.close()
        table = Table.grid(padding=(0, 2))
        for name, value in summary.items():
            table.add_row(f"[bold]{name}[/]", value)
        self._console.print(table)

    def failed(self, report: str) -> None:
        self.close()
        self._err.line(report)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._live.stop()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._live.start()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            now_s = time.monotonic()
            head = Text.assemble((self._title, "bold"), (f"  {self._run_dir}", "dim"))
            bar = Table.grid(padding=(0, 1))
            bar.add_row(
                f"step {self._step}/{self._n_steps}",
                ProgressBar(self._n_steps, self._step, width=32, complete_style="cyan", finished_style="green"),
                self._clock(now_s),
            )
            lines: list[RenderableType] = [head, bar] if self._n_steps else [head]
            if self._phase:
                lines.append(Text(f"{self._phase} ({now_s - self._phase_start_s:.0f} s)", style="yellow"))
            if self._metrics:
                lines.append(self._metrics_table())
            lines += [self._worker_line(rank, now_s) for rank in sorted(self._activities)[:16]]
            if len(self._activities) > 16:
                lines.append(Text(f"and {len(self._activities) - 16} more workers", style="dim"))
            return Group(*lines)

    def _clock(self, now_s: float) -> str:
        left_s = self._pace.left_s()
        left = "" if left_s is None else f"  left {_duration(left_s)}"
        return f"[dim]{_duration(now_s - self._start_s)}{left}[/]"

    def _metrics_table(self) -> RenderableType:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name in headline_metrics(self._metrics, self._shown):
            table.add_row(
                name, f"[bold]{_number(self._metrics[name])}[/]", f"[cyan]{_sparkline(self._history[name])}[/]"
            )
        if _THROUGHPUT in self._metrics:
            table.add_row("tokens/s", f"[bold]{self._metrics[_THROUGHPUT]:,.0f}[/]", "")
        return table

    def _worker_line(self, rank: int, now_s: float) -> RenderableType:
        from rich.text import Text

        text, since_s = self._activities[rank]
        return Text.assemble((f"worker {rank}  ", "dim"), text, (f"  {now_s - since_s:.0f} s", "dim"))


class _Quiet(io.TextIOBase):
    """A stream that may vanish (a closed pipe, a lost terminal) without ending the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def line(self, text: str) -> None:
        self.write(text + "\n")
        self.flush()

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        shown = text.encode(encoding, "replace").decode(encoding)  # a terminal need not know every character
        self._attempt(lambda stream: stream.write(shown))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is gone")
        return self._stream.fileno()

    def _attempt(self, action: Callable[[TextIO], object]) -> None:
        if self._stream is not None:
            try:
                action(self._stream)
            except (OSError, ValueError):  # ValueError: the stream was closed
                self._stream = None


def metric_texts(metrics: Mapping[str, float], shown: Sequence[str] = ()) -> list[str]:
    """Return the headline metrics, those of `shown`, the throughput and the seconds of a step in words."""
    headlines = headline_metrics(metrics, shown)
    names = {name: name.removesuffix("/mean") if _PARTS.fullmatch(name) else name for name in headlines}
    texts = [f"{shown} {_number(metrics[name])}" for name, shown in names.items()]
    if _THROUGHPUT in metrics:
        texts.append(f"tokens/s {metrics[_THROUGHPUT]:,.0f}")
    if "time_s/step" in metrics:
        texts.append(f"{metrics['time_s/step']:.1f} s")
    return texts


def _number(value: float) -> str:
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _sparkline(values: Sequence[float] | deque[float]) -> str:
    """The history as a row of bars; NaN and infinities are gaps."""
    finite = [value for value in values if value - value == 0]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(_BARS) - 1
    return "".join(" " if v - v != 0 else _BARS[round((v - low) / span * top) if span else top // 2] for v in values)

"""The master's part of a run's trace: bars of the workers, those of the master itself, and counters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby

from realrl.algo.phases import MOST_OF_A_CALL, Phases
from realrl.runtime.launchers.base import Launcher
from realrl.runtime.output.trace import TraceWriter
from realrl.sched.events import RankSpan
from realrl.sched.messages import Span

_MEMORY_CHANGE = 0.01
_OF_A_STEP = {"perf/tokens_per_s": ("throughput", "tokens/s"), "reward/mean": ("reward", "mean")}


class Timeline:
    """The writer of a run's trace. Bars and counters wait for the end of their step.

    Args:
        trace: file that they go to.
        launcher: it knows where workers are, and the clocks there.
    """

    def __init__(self, trace: TraceWriter, launcher: Launcher) -> None:
        self._trace = trace
        self._launcher = launcher
        self._phases = Phases(MOST_OF_A_CALL)
        self._bars: list[Span] = []
        self._memory: dict[int, float] = {}
        self._memory_points: list[tuple[int, float, float]] = []
        self._began_s = time.time()

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """Record the handling of an event; a bar holds the events that follow each other at once."""
        begin_s = time.time()
        yield
        self._phases.beside("schedule", begin_s, time.time(), process=0)

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Record the writing of a file."""
        with self._phases.phase(what):
            yield

    def took(self, what: str, seconds: float) -> None:
        """Record a part of a step that ends now."""
        now_s = time.time()
        self._bars.append(Span(what, "step", max(self._began_s, now_s - seconds), now_s))

    def memory(self, rank: int, memory_gb: float) -> None:
        """Record the memory of a worker, if it changed."""
        before = self._memory.get(rank, 0.0)
        if abs(memory_gb - before) > _MEMORY_CHANGE * before:
            self._memory[rank] = memory_gb
            self._memory_points.append((rank, memory_gb, time.time()))

    def ends(self, what: str, step: int = 0) -> None:
        """Record the end of a stretch of the run, such as its start or a step, which began where the last one ended."""
        now_s = time.time()
        self._bars.append(Span(what, "step", self._began_s, now_s, {"step": step} if step else {}))
        self._began_s = now_s

    def write(self, spans: Iterable[RankSpan], step: int = 0, metrics: Mapping[str, float] | None = None) -> None:
        """Write all bars so far, those of the workers among them.

        Args:
            metrics: those of the step that ended.
        """
        for rank, own in groupby(spans, key=lambda item: item.rank):
            machine, shift_s = self._launcher.machine(rank), self._launcher.clock_offset_s(rank)
            self._trace.spans(rank, [item.span for item in own], machine=machine, shift_s=shift_s)
        taken = self._phases.take(step)
        bars = [*self._bars, *(Span(w.name, "master", w.begin_s, w.end_s, {"events": w.count}) for w in taken.work)]
        bars += [Span(phase.name, "master", phase.begin_s, phase.end_s) for phase in taken.phases]
        self._trace.spans(None, bars)
        for rank, memory_gb, at_s in self._memory_points:
            self._trace.counter("memory", {f"worker {rank} (GB)": round(memory_gb, 3)}, at_s=at_s)
        for name, (counter, what) in _OF_A_STEP.items():
            if metrics is not None and name in metrics:
                self._trace.counter(counter, {what: metrics[name]})
        self._bars, self._memory_points = [], []

"""Metrics of a step's calls, kept until the step is complete."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import HooksDone, RowsMoved
from realrl.sched.samples.in_flight import CallRecord


@dataclass
class _StepEntry:
    tokens: dict[int, int] = field(default_factory=dict)  # number of a sample -> its tokens
    surplus: set[int] = field(default_factory=set)
    data_bytes: int = 0
    params_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    realloc_wait_s: float = 0.0
    memory_gb: dict[int, float] = field(default_factory=dict)
    # call -> metric -> (sum of value * samples, samples)
    sums: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)
    # metric -> totals and counts of ranks that hold different samples
    totals: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, list[float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)


class StepLog:
    """Collects metrics by step.

    A metric that a call returns for several batches of one step is averaged, weighted by samples. Where two calls use
    one name, the later of them counts. Sums that calls record are added over all calls, batches and ranks, in any order
    with the same result; a returned metric of the same name takes their place.
    """

    def __init__(self, calls: Sequence[ScheduledCall]) -> None:
        self._calls = tuple(calls)
        self._steps: dict[int, _StepEntry] = {}

    def add_call(self, record: CallRecord) -> None:
        """Add a dispatch that was completed in this run, or before it was resumed."""
        entry = self._entry(record.step)
        entry.data_bytes += record.bytes_received
        for rank, memory_gb in record.memory_gb.items():
            _note_memory(entry, rank, memory_gb)
        entry.seconds[record.call] = entry.seconds.get(record.call, 0.0) + record.seconds
        entry.realloc_wait_s += record.realloc_wait_s
        returned = entry.sums.setdefault(record.call, {})
        for name, value in record.metrics.items():
            total, n_samples = returned.get(name, (0.0, 0))
            returned[name] = (total + value * len(record.ids), n_samples + len(record.ids))
        for sums in record.sums:
            for name, (total, count) in sums.items():
                entry.totals.setdefault(name, []).append(total)
                entry.counts.setdefault(name, []).append(count)
        for name, value in record.maxima.items():
            entry.maxima[name] = max(value, entry.maxima.get(name, value))

    def add_movement(self, step: int, reply: RowsMoved | HooksDone) -> None:
        """Add one rank's movement of rows or parameters."""
        entry = self._entry(step)
        if isinstance(reply, RowsMoved):
            entry.data_bytes += reply.bytes_received
        else:
            entry.params_bytes += reply.bytes_received
            _note_memory(entry, reply.rank, reply.memory_gb)

    def add_samples(self, step: int, tokens: Mapping[int, int]) -> None:
        """Add samples of `step` (number -> tokens) that went through every call."""
        self._entry(step).tokens |= tokens

    def add_surplus(self, step: int, numbers: Iterable[int]) -> None:
        """Leave survivors without a place out of the samples of `step`; some may have gone through every call."""
        self._entry(step).surplus.update(numbers)

    def add_dropped(self, step: int, n_dropped: Mapping[str, int], n_surplus: int) -> None:
        """Set the counts of a settled step: samples that each call dropped, and survivors without a place."""
        counts = {call.name: n_dropped.get(call.name, 0) for call in self._calls if call.mfc.may_drop}
        self._entry(step).dropped = {f"dropped/{name}": float(n) for name, n in counts.items()}
        self._entry(step).dropped["dropped/surplus"] = float(n_surplus)

    def add_staleness(self, step: int, n_behind: Iterable[int]) -> None:
        """Add, per sample, by how many versions its generating parameters are behind those that train on it."""
        self._entry(step).staleness += n_behind

    def finish_step(self, step: int, versions: Mapping[str, int]) -> dict[str, float]:
        """Return the metrics of a complete step, and forget it.

        They are those that calls returned or recorded (a sum over a count of 0 has no mean), and `version/<role>`,
        `n_samples`, `n_tokens` (of the longest key with a row per token), `bytes/data` and `bytes/params` (received
        from other ranks), `time_s/<call>` (of the slowest rank), `time_s/realloc_wait` (of all calls together, each on
        the rank that waited longest for parameters), `memory_gb/<rank>` (peak). Where samples are dropped:
        `dropped/<call>` and `dropped/surplus`; they are not in `n_samples` and `n_tokens`. Where calls may be stale:
        `staleness/mean` and `staleness/max`. A recorded `x/mean_square` becomes `x/std`, with `x/mean`.
        """
        entry = self._steps.pop(step)
        tokens = [n for number, n in entry.tokens.items() if number not in entry.surplus]
        metrics = dict(sorted(entry.maxima.items()))
        for name in sorted(entry.totals):
            count = math.fsum(entry.counts[name])
            if count > 0:
                metrics[name] = math.fsum(entry.totals[name]) / count
        for base in [name.removesuffix("/mean_square") for name in metrics if name.endswith("/mean_square")]:
            if f"{base}/mean" in metrics:
                square = metrics.pop(f"{base}/mean_square")
                metrics[f"{base}/std"] = math.sqrt(max(square - metrics[f"{base}/mean"] ** 2, 0.0))
        for call in self._calls:
            for name, (total, n_samples) in entry.sums.get(call.name, {}).items():
                metrics[name] = total / n_samples
        metrics |= entry.dropped
        if entry.staleness:
            metrics["staleness/mean"] = sum(entry.staleness) / len(entry.staleness)
            metrics["staleness/max"] = float(max(entry.staleness))
        metrics |= {f"version/{role}": float(version) for role, version in versions.items()}
        metrics |= {f"time_s/{call.name}": entry.seconds[call.name] for call in self._calls}
        metrics["time_s/realloc_wait"] = entry.realloc_wait_s
        metrics |= {f"memory_gb/{rank}": entry.memory_gb[rank] for rank in sorted(entry.memory_gb)}
        metrics |= {
            "n_samples": float(len(tokens)),
            "n_tokens": float(sum(tokens)),
            "bytes/data": float(entry.data_bytes),
            "bytes/params": float(entry.params_bytes),
        }
        return metrics

    def _entry(self, step: int) -> _StepEntry:
        return self._steps.setdefault(step, _StepEntry())


class WholeLog(StepLog):
    """Collects metrics over many steps as if they were one."""

    def recorded(self) -> dict[str, float]:
        """Return the metrics that interfaces recorded or returned, without times, memory and counts."""
        metrics = self.finish_step(0, {}) if self._steps else {}
        measured = ("time_s/", "memory_gb/", "bytes/", "n_samples", "n_tokens")
        return {name: value for name, value in metrics.items() if not name.startswith(measured)}

    def finish_step(self, step: int, versions: Mapping[str, int]) -> dict[str, float]:
        return super().finish_step(0, versions)

    def _entry(self, step: int) -> _StepEntry:
        return super()._entry(0)


def _note_memory(entry: _StepEntry, rank: int, memory_gb: float) -> None:
    if memory_gb > 0:
        entry.memory_gb[rank] = max(memory_gb, entry.memory_gb.get(rank, 0.0))

"""Recordings of what the workers of one run computed: a line of JSON for each call, step and rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

FOLDER = "calls"
MEASURED = ("time_s/", "perf/", "memory_gb/", "bytes/")  # metrics that depend on plan and machine


class Rows(msgspec.Struct, frozen=True):
    """One sample's part of a key.

    Attributes:
        lengths: rows of each sequence.
        values: the numbers of all rows.
        is_exact: True for integers and booleans.
    """

    lengths: tuple[int, ...]
    values: tuple[float, ...]
    is_exact: bool = False


class PartSeen(msgspec.Struct, frozen=True):
    """A micro-batch of training.

    Attributes:
        counts: what a mean may have divided by: "samples", "sequences", "tokens", "transitions", "response tokens".
        loss: sum that the loss function gave.
        stats, maxima: the same of its statistics.
    """

    ids: tuple[str, ...]
    counts: Mapping[str, float]
    loss: float
    stats: Mapping[str, float]
    maxima: Mapping[str, float]


class MinibatchSeen(msgspec.Struct, frozen=True):
    """A minibatch on one rank; no part has a loss on ranks without the head."""

    ids: tuple[str, ...]
    normaliser: float
    parts: tuple[PartSeen, ...]
    grad_norm: float


class Sketch(msgspec.Struct, frozen=True):
    """A tensor: its norm, and some of its numbers, at places that depend on its size alone."""

    norm: float
    numbers: tuple[float, ...]


class CallSeen(msgspec.Struct, frozen=True):
    """One call of one step on one rank.

    Attributes:
        rank: worker.
        ids: samples, in the order in which the interface got them.
        counts: as those of `PartSeen`, of all samples.
        outputs: key -> sample -> rows; of a train_step, what it noted of responses: "advantage".
        metrics: what a train_step returned.
        sums, maxima: what the interface recorded in `ctx.metrics`.
        state_before, state: numbers that the interface keeps before and after, by the names of its attributes.
        changed_inputs: keys whose tensors the interface changed in place.
        drawn_from: generators of the process that were drawn from: "torch", "random", "numpy".
        n_reductions: times that the interface called `Engine.all_reduce`.
        gradients, weights: of a train_step; a gradient stands for AdamW's first moment.
        places: "method", "loss", "post": ``file:line`` of the interface's method and of functions that it gave.
    """

    rank: int
    step: int
    call: str
    ids: tuple[str, ...]
    counts: Mapping[str, float] = {}
    outputs: Mapping[str, Mapping[str, Rows]] = {}
    metrics: Mapping[str, float] = {}
    sums: Mapping[str, tuple[float, float]] = {}
    maxima: Mapping[str, float] = {}
    minibatches: tuple[MinibatchSeen, ...] = ()
    state_before: Mapping[str, tuple[float, ...]] = {}
    state: Mapping[str, tuple[float, ...]] = {}
    changed_inputs: tuple[str, ...] = ()
    drawn_from: tuple[str, ...] = ()
    n_reductions: int = 0
    gradients: Mapping[str, Sketch] = {}
    weights: Mapping[str, Sketch] = {}
    places: Mapping[str, str] = {}


@dataclass(frozen=True)
class Recording:
    """One run.

    Attributes:
        calls: (step, call) -> what its ranks saw, in the order of ranks and batches.
        metrics: of each step.
    """

    calls: Mapping[tuple[int, str], tuple[CallSeen, ...]]
    metrics: tuple[Mapping[str, float], ...] = ()
    error: str = field(default="", compare=False)

    def of(self, step: int, call: str) -> tuple[CallSeen, ...]:
        """Return what the ranks of a call saw in a step."""
        return self.calls.get((step, call), ())

    def rows(self, step: int, call: str, key: str) -> dict[str, tuple[int, Rows]]:
        """Return sample -> (lowest rank that had it, rows) of an output key."""
        found: dict[str, tuple[int, Rows]] = {}
        for seen in self.of(step, call):
            for sample_id, rows in seen.outputs.get(key, {}).items():
                found.setdefault(sample_id, (seen.rank, rows))
        return found


def read_recording(run_dir: Path, metrics_file: str) -> Recording:
    """Read what the workers of a run wrote, and its metrics; a run that failed has less."""
    calls: dict[tuple[int, str], list[CallSeen]] = {}
    decoder = msgspec.json.Decoder(CallSeen)
    for path in sorted((run_dir / FOLDER).glob("rank-*.jsonl")):
        for line in path.read_bytes().splitlines():
            seen = decoder.decode(line)
            calls.setdefault((seen.step, seen.call), []).append(seen)
    return Recording({key: tuple(seen) for key, seen in calls.items()}, tuple(_metrics(run_dir / metrics_file)))


def _metrics(path: Path) -> Iterator[dict[str, float]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and not name.startswith(MEASURED)
        }

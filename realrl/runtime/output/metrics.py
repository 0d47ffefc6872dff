"""Sinks of a run's metrics: ``metrics.jsonl`` always, tensorboard and wandb on request."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from realrl.errors import ConfigError, RunError
from realrl.files import open_output
from realrl.runtime.output.json_lines import cut_after

FILE_NAME = "metrics.jsonl"


class MetricsSink(Protocol):
    """Takes the metrics of one step after another."""

    def begin_after(self, step: int) -> None:
        """Begin after `step`: records of later steps, from an earlier attempt, are void."""

    def write(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Record one step. Raises `RunError` when that is impossible (disk full)."""

    def close(self) -> None:
        """Flush and release. May be called twice."""


class JsonlSink:
    """One JSON object a step, appended and flushed: ``{"step": 1, "epoch": 0, "reward/mean": 0.5, ...}``.

    A resumed run removes the rows of steps that it does again. JSON knows no NaN and no infinity; they are written as
    null.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_output(path, append=True)  # no buffer: nothing stays behind on a full disk
        except OSError as error:
            raise self._failed(error) from error

    def begin_after(self, step: int) -> None:
        try:
            cut_after(self._path, step)
            self._file.close()
            self._file = open_output(self._path, append=True)
        except OSError as error:
            raise self._failed(error) from error

    def write(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        row: dict[str, Any] = {"step": step, "epoch": epoch}
        row.update((name, _json_number(value)) for name, value in metrics.items() if name not in row)
        self._append(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()

    def _append(self, text: str) -> None:
        try:
            left = memoryview(text.encode())
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write {self._path}: {error.strerror}",
            remedy="Free some space there and continue with resume=auto.",
        )


class TensorboardSink:
    """Scalars under ``<run_dir>/tensorboard``; needs the extra `track`."""

    def __init__(self, run_dir: Path) -> None:
        _require("tensorboard")
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(str(run_dir / "tensorboard"))

    def begin_after(self, step: int) -> None:
        """Do nothing: viewers show the latest events of a step."""

    def write(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Summary.Value(tag=name, simple_value=value)
            for name, value in {"epoch": epoch, **metrics}.items()
            if name != "step"
        ]
        event = self._event.Event(wall_time=time.time(), step=step, summary=self._summary.Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run under ``<run_dir>/wandb``, offline unless WANDB_MODE says otherwise; needs `track`."""

    def __init__(self, run_dir: Path) -> None:
        wandb = _require("wandb")
        run_dir.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE", "offline")
        name = "/".join(run_dir.parts[-2:])
        self._run = wandb.init(project="realrl", name=name, dir=str(run_dir), mode=mode)
        self._is_open = True

    def begin_after(self, step: int) -> None:
        """Do nothing: every attempt is a run of its own."""

    def write(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"epoch": epoch, **metrics}, step=step)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._run.finish()


class _Tee:
    def __init__(self, sinks: Iterable[MetricsSink]) -> None:
        self._sinks = tuple(sinks)

    def begin_after(self, step: int) -> None:
        for sink in self._sinks:
            sink.begin_after(step)

    def write(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, epoch, metrics)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_sinks(run_dir: Path, track: Iterable[str] = ()) -> MetricsSink:
    """``metrics.jsonl`` in `run_dir` and the sinks named in `track`, as one.

    Raises:
        ConfigError: a package that `track` needs is not installed.
    """
    extra: dict[str, Callable[[Path], MetricsSink]] = {"tensorboard": TensorboardSink, "wandb": WandbSink}
    sinks = [extra[name](run_dir) for name in track]
    return _Tee([JsonlSink(run_dir / FILE_NAME), *sinks])


def _require(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"track={package} needs the package {package}, which cannot be imported: {error}",
            remedy=f"Install the extra: pip install 'realrl[track]', or leave {package} out of track.",
        ) from error


def _json_number(value: float) -> float | int | None:
    return value if math.isfinite(value) else None

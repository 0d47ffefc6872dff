"""Checks that do whole runs, each in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_checks.common import DoesNotHoldError, Figures, require

SMALL_RUN = ("preset=tiny", "n_seqs=8", "generation.max_new_tokens=6", "algorithm.n_minibatches=2")
NOISE = ("time_s/", "perf/", "memory_gb/", "bytes/")


def run(folder: Path, experiment: str, *overrides: str) -> subprocess.Popen[str]:
    """Start a small run in a process of its own; what it prints goes to a file beside its folder."""
    command = [sys.executable, "-m", "realrl", "run", experiment, *SMALL_RUN, f"run_dir={folder}", *overrides]
    with folder.with_suffix(".txt").open("a") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)


def finish(folder: Path, experiment: str, *overrides: str) -> list[Mapping[str, Any]]:
    """Do a small run to its end; returns its metrics, one entry a step."""
    if run(folder, experiment, *overrides).wait():
        raise DoesNotHoldError("the run failed", {"output": folder.with_suffix(".txt").read_text()[-600:]})
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def largest_difference(ours: list[Mapping[str, Any]], theirs: list[Mapping[str, Any]]) -> float:
    """Return the largest difference of a metric, relative to values above 1; infinite if steps or names differ."""
    if len(ours) != len(theirs):
        return float("inf")
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        names = {name for name in a if not name.startswith(NOISE)}
        if names != {name for name in b if not name.startswith(NOISE)}:
            return float("inf")
        largest = max(largest, *(abs(a[name] - b[name]) / max(1.0, abs(a[name])) for name in names))
    return largest


def staged(n_workers: int, *layout: str) -> Figures:
    """Do one step of PPO on one worker, and on several that share a device: equal numbers."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ("steps=1", "precision=fp32", "algorithm.recompute_logprobs=false")
        alone = finish(Path(folder) / "one", "ppo", *settings)
        workers = (f"cluster.n_devices_per_node={n_workers}", "cluster.shares_devices=true")
        several = finish(Path(folder) / "several", "ppo", *settings, *workers, *layout)
    figures = {"workers": n_workers, "layout": list(layout), "largest_difference": largest_difference(alone, several)}
    limit = 1e-2 if torch.cuda.is_available() else 1e-4
    require(figures["largest_difference"] <= limit, f"metrics differ by more than {limit:g}", figures)
    return figures


def two_equal_runs() -> Figures:
    """Two runs with one seed. On CUDA equal bits are not promised: the difference is a figure."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (finish(Path(folder) / name, "ppo", "steps=2") for name in ("first", "second"))
    figures = {"largest_difference": largest_difference(first, second)}
    limit = 1e-2 if torch.cuda.is_available() else 0.0
    require(figures["largest_difference"] <= limit, f"metrics differ by more than {limit:g}", figures)
    return figures


def killed_and_resumed(experiment: str) -> Figures:
    """Three steps, killed after the first checkpoint and resumed, against the same steps without."""
    with tempfile.TemporaryDirectory() as name:
        folder, settings = Path(name), ("steps=3", "save.every_steps=1", "resume=auto")
        quiet = finish(folder / "quiet", experiment, *settings)
        killed = run(folder / "killed", experiment, *settings)
        while killed.poll() is None and not (folder / "killed" / "checkpoints" / "step_1").exists():
            time.sleep(0.01)
        was_running = killed.poll() is None
        killed.kill()
        killed.wait()
        time.sleep(2.0)  # its workers notice, and leave the folder
        resumed = finish(folder / "killed", experiment, *settings)
    figures = {"was_running": was_running, "largest_difference": largest_difference(quiet, resumed)}
    limit = 1e-2 if torch.cuda.is_available() else 0.0
    require(figures["largest_difference"] <= limit, f"metrics differ by more than {limit:g}", figures)
    return figures

"""Whole runs for tests: `realrl run` in a process of its own, and its metrics."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from realrl import cli

SMALL = ("preset=tiny", "steps=3", "n_seqs=8", "generation.max_new_tokens=6", "algorithm.n_minibatches=2")
NOISE = ("time_s/", "perf/", "memory_gb/", "bytes/")


def realrl(*arguments: str, timeout_s: float = 100.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "realrl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)


def run_here(*arguments: str) -> None:
    """Run the command line in this process, which saves the seconds of importing torch; it must succeed.

    Master and workers have processes of their own nevertheless, unless ``launcher=inline`` is among the arguments.
    """
    assert cli.main(list(arguments)) == 0


def run_ppo(run_dir: Path, *overrides: str, is_here: bool = True) -> list[dict[str, Any]]:
    """Do a small PPO run, which must succeed; returns its metrics, one entry per step.

    Args:
        is_here: True for `run_here`, False for a process of its own.
    """
    arguments = ["run", "ppo", *SMALL, f"run_dir={run_dir}", *overrides]
    if is_here:
        run_here(*arguments)
    else:
        done = realrl(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(run_dir)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_same_numbers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, rel: float, floor: float) -> None:
    """Assert that all metrics but times, rates and sizes agree; `floor` is the absolute error left to rounding."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        names = [name for name in a if not name.startswith(NOISE)]
        assert set(names) == {name for name in b if not name.startswith(NOISE)}
        for name in names:
            assert math.isclose(a[name], b[name], rel_tol=rel, abs_tol=floor), (a["step"], name, a[name], b[name])

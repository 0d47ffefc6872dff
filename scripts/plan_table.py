"""PPO on the toy task with many plans: whatever the plan, the numbers are the same.

Runs ``realrl run ppo preset=tiny`` with a single worker, then with each plan in worker processes of this machine, and
prints for each the largest relative difference of any metric of any step (times, rates, bytes and memory left out), the
bytes of parameters and of rows that moved in the last step, and the time. Exit code 1 when a difference is too large.

    python scripts/plan_table.py                       all plans
    python scripts/plan_table.py tensor-2 eight        some of them; eight is PPO with every call on a mesh of its own
    python scripts/plan_table.py --list                what they are
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from realrl.runtime.output.metrics import FILE_NAME

LIMIT = 1e-4
FLOOR = 1e-6  # absolute difference that rounding may leave where a metric is about zero
SIZE = ("n_seqs=16", "generation.max_new_tokens=8", "algorithm.n_minibatches=2", "save.at_end=false")
_WIDTH = 110  # least width of the table
DEPENDS_ON_THE_PLAN = ("time_s/", "perf/", "memory_gb/", "bytes/")


def _workers(n_workers: int) -> str:
    return f"cluster.n_devices_per_node={n_workers}"


def _calls(**allocations: str) -> tuple[str, ...]:
    return tuple(f"allocation.calls.{call}={text}" for call, text in allocations.items())


_TRAINING_ELSEWHERE = _calls(actor_train="t2@0:0-1", critic_train="p2@0:2-3", rew_inf="d1@0:3", ref_inf="d1@0:2")

PLANS: Mapping[str, tuple[str, ...]] = {
    "colocate": (_workers(2), "allocation=colocate"),
    "split": (_workers(2), "allocation=split"),
    "standalone": (_workers(4), "allocation=standalone"),
    "tensor-2": (_workers(2), "allocation=tensor"),
    "tensor-4": (_workers(4), "allocation=tensor"),
    "pipeline-2": (_workers(2), "allocation=pipeline"),
    "pipeline-4": (_workers(4), "allocation=pipeline"),
    "sequence": (_workers(2), "allocation=t2s"),
    "data-tensor": (_workers(4), "allocation=d2t2"),
    "tensor-pipeline": (_workers(4), "allocation=t2p2"),
    "data-pipeline": (_workers(4), "allocation=d2p2"),
    "train-tensor": (_workers(2), "allocation=t2", *_calls(actor_gen="d2", critic_inf="d1@0:0", ref_inf="p2")),
    "train-pipeline": (_workers(2), "allocation=p2", *_calls(actor_gen="t2", critic_inf="d2", rew_inf="t2")),
    "elsewhere": (_workers(4), "allocation=d4", *_TRAINING_ELSEWHERE, *_calls(critic_inf="d2@0:0-1")),
    "offload": (_workers(2), "allocation=t2", *_calls(actor_gen="d2"), "allocation.offload=[actor,critic,ref]"),
    "streaming": (_workers(2), "allocation=split", "min_n_seqs=4"),
    "collective": (_workers(2), "allocation=split", "cluster.data_plane=collective"),
    "eight": ("cluster=eight_workers", "allocation=eight_meshes"),
    "eight-all": (
        "cluster=eight_workers",
        "allocation=eight_meshes",
        "allocation.offload_frozen=true",
        "cluster.data_plane=collective",
        "min_n_seqs=8",
    ),
}


@dataclass(frozen=True)
class Difference:
    """The largest relative difference between two runs, with its metric and step."""

    relative: float = 0.0
    metric: str = ""
    step: int = 0


def largest_difference(
    reference: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], *, floor: float = FLOOR
) -> Difference:
    """Compare all metrics but those that depend on the plan.

    Raises:
        ValueError: the runs differ in steps or in the names of metrics.
    """
    if len(reference) != len(rows):
        raise ValueError(f"one run has {len(reference)} steps, the other {len(rows)}")
    worst = Difference()
    for ours, theirs in zip(reference, rows, strict=True):
        names = _names(ours)
        if names != _names(theirs):
            raise ValueError(f"step {ours['step']}: only one run has {', '.join(sorted(names ^ _names(theirs)))}")
        for name in names:
            a, b = ours[name], theirs[name]
            if abs(a - b) > floor:
                relative = abs(a - b) / max(abs(a), abs(b))
                worst = max(worst, Difference(relative, name, ours["step"]), key=lambda d: d.relative)
    return worst


def _names(row: Mapping[str, Any]) -> set[str]:
    return {name for name in row if not name.startswith(DEPENDS_ON_THE_PLAN)}


def run_plan(run_dir: Path, overrides: Iterable[str], *, steps: int) -> tuple[list[dict[str, Any]], float]:
    """Run one plan in processes of its own; returns its metrics and the seconds that it took.

    Raises:
        RuntimeError: the run failed; the message is its output.
    """
    command = [sys.executable, "-m", "realrl", "run", "ppo", "preset=tiny", *SIZE, f"steps={steps}"]
    start_s = time.monotonic()
    done = subprocess.run(
        [*command, f"run_dir={run_dir}", *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    lines = (run_dir / FILE_NAME).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], time.monotonic() - start_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plans; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", metavar="PLAN", help="default: all")
    parser.add_argument("--steps", type=int, default=5, help="steps of each run")
    parser.add_argument("--list", action="store_true", help="print the plans and stop")
    options = parser.parse_args(arguments)
    if options.list:
        for name, overrides in PLANS.items():
            print(f"{name:16} {' '.join(overrides)}")
        return 0
    unknown = sorted(set(options.plans) - set(PLANS))
    if unknown:
        parser.error(f"unknown plans {', '.join(unknown)}; choose from {', '.join(PLANS)}")
    return _run_all(options.plans or list(PLANS), options.steps)


def _run_all(names: Sequence[str], steps: int) -> int:
    table = Table(title=f"PPO preset=tiny, {steps} steps, against a single worker")
    for column in ("plan", "largest difference", "in", "bytes/params", "bytes/data", "time"):
        table.add_column(column, justify="left" if column in ("plan", "in") else "right", no_wrap=True)
    is_good = True
    with tempfile.TemporaryDirectory() as folder:
        reference, seconds = run_plan(Path(folder) / "single", ["launcher=inline"], steps=steps)
        table.add_row("single worker", "-", "", "0", "0", f"{seconds:.0f} s")
        for name in names:
            try:
                rows, seconds = run_plan(Path(folder) / name, PLANS[name], steps=steps)
                worst = largest_difference(reference, rows)
            except (RuntimeError, ValueError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                table.add_row(name, "failed")
                is_good = False
                continue
            is_good &= worst.relative <= LIMIT
            where = f"{worst.metric}, step {worst.step}" if worst.metric else ""
            bytes_moved = (f"{rows[-1][kind]:,.0f}" for kind in ("bytes/params", "bytes/data"))
            table.add_row(name, f"{worst.relative:.1e}", where, *bytes_moved, f"{seconds:.0f} s")
            print(f"{name}: {worst.relative:.1e} in {seconds:.0f} s", file=sys.stderr, flush=True)
    console = Console()
    Console(width=max(console.width, _WIDTH)).print(table)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

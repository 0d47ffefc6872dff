"""Step times of tiny PPO on an idle machine and beside other work, under several ways in which threads wait.

    python scripts/bench_busy.py [--rounds 3] [--steps 12] [--busy 6] [--workers 1 2] [--wait ours spin ...] [key=value]

`ours` is what realrl sets by itself; `spin` is OpenMP's own default, under which a thread that waits for others keeps
its core; `passive` sleeps at once; `spins=1000` spins less before it sleeps; `threads=1` has nobody to wait for. The
runs take turns.

A step beside other work is compared with what the run's share of the cores explains: with C cores, N computing threads
and B busy processes, a thread that has min(1, C / N) of a core alone has min(1, C / (B + N)) beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_BUSY = "import hashlib\nd = b'x' * 4096\nwhile True: d = hashlib.sha256(d).digest() * 128"
_WARM_UP = 3  # steps


def variables_of(wait: str) -> Mapping[str, str]:
    """Return the environment variables of a way to wait."""
    known = {"ours": {}, "spin": {"GOMP_SPINCOUNT": "300000"}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
    kind, _, number = wait.partition("=")
    return known[wait] if not number else {{"spins": "GOMP_SPINCOUNT", "threads": "OMP_NUM_THREADS"}[kind]: number}


@contextmanager
def other_work(n_processes: int) -> Iterator[None]:
    """Keep so many processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(n_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def step_seconds(n_workers: int, wait: str, options: argparse.Namespace) -> list[float]:
    """Run once; return the seconds of all steps but the first ones."""
    kept = {name: value for name, value in os.environ.items() if name not in (*SETTINGS, "OMP_NUM_THREADS")}
    with tempfile.TemporaryDirectory(prefix="realrl-busy-") as folder:
        command = [
            *(sys.executable, "-m", "realrl", "run", "ppo", "preset=tiny", f"steps={options.steps}"),
            *("cluster.device=cpu", f"cluster.n_devices_per_node={n_workers}", "save.at_end=false"),
            *(f"run_dir={folder}/run", *options.overrides),
        ]
        environment = {**kept, **variables_of(wait)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return [row["time_s/step"] for row in rows[_WARM_UP:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--busy", type=int, default=6, help="processes beside the run")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--wait", nargs="+", default=["ours", "spin", "passive"])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the runs")
    options = parser.parse_intermixed_args()
    seconds: dict[tuple[int, int, str], list[float]] = {}
    for _ in range(options.rounds):
        for n_busy in (0, options.busy):
            with other_work(n_busy):
                for n_workers in options.workers:
                    for wait in options.wait:
                        found = step_seconds(n_workers, wait, options)
                        seconds.setdefault((n_workers, n_busy, wait), []).extend(found)
                        print(n_workers, n_busy, wait, f"{statistics.median(found):.3f}", file=sys.stderr, flush=True)
    n_cores = len(os.sched_getaffinity(0))
    columns = ("workers", "threads", "idle, s", f"over {options.wait[-1]}", f"beside {options.busy}, s", "over idle")
    table = Table(*columns, "over what cores explain", title=f"PPO preset=tiny, {n_cores} cores, medians of steps")
    for n_workers in options.workers:
        n_threads = n_workers * max(1, n_cores // n_workers)
        explained = min(1.0, n_cores / n_threads) / min(1.0, n_cores / (options.busy + n_threads))
        for wait in options.wait:
            idle, busy = (statistics.median(seconds[n_workers, n, wait]) for n in (0, options.busy))
            last = statistics.median(seconds[n_workers, 0, options.wait[-1]])
            cells = (idle, idle / last, busy, busy / idle, busy / idle / explained)
            table.add_row(str(n_workers), wait, *(f"{value:.2f}" for value in cells))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

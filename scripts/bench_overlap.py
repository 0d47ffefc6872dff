"""PPO steps with `allocation.overlap` off and on: the share of a step that calls wait for parameters, and step times.

    python scripts/bench_overlap.py [--mb-per-s 5] [--rounds 3] [--steps 8] [--plan 2-pipeline] [key=value ...]

Each run has a network of its own, whose loopback carries `--mb-per-s` (1e6 bytes) in all: what gloo sends takes time
there, and no processor's. It needs `unshare`, `ip`, `tc`, and leave to make a network namespace. Without a limit
(`--mb-per-s 0`) parameters cost the time of copies, on the processors that compute.

The runs of a plan take turns, or go together (`--together`): each then has the same share of a machine with other work.
Numbers are medians over all steps but the first two of each run; the ratio is that over pairs, a step off and the same
step on. Metrics that are not times must be equal bit for bit; the exit code is 1 if some are not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
_BURST = "256kb"  # that may go at once: a few segments of the largest size
_WARM_UP = 2  # steps
_NOISE = ("time_s/", "perf/", "memory_gb/", "bytes/")


def _calls(**allocations: str) -> tuple[str, ...]:
    return tuple(f"allocation.calls.{call}={text}" for call, text in allocations.items())


_OFFLOADING = "allocation.offload_frozen=true"
_AT_ANOTHER = _calls(actor_gen="d1@0:1", critic_inf="d1@0:1", ref_inf="d1@0:1")
_AT_OTHERS = _calls(actor_gen="d2@0:2-3", critic_inf="d1@0:2", ref_inf="d1@0:3", rew_inf="d1@0:1")
PLANS = {
    "2-generator": (2, "allocation=d1@0:0", *_AT_ANOTHER),  # calls here send no messages of their own
    "4-generator": (4, "allocation=d1@0:0", *_AT_OTHERS),
    "2-split": (2, "allocation=split", *_calls(actor_gen="d2@0:0-1", critic_inf="d1@0:0"), _OFFLOADING),
    "2-pipeline": (2, "allocation=p2", *_calls(actor_gen="d2", critic_inf="d2", ref_inf="d2"), _OFFLOADING),
    "2-offload": (2, "allocation=p2", *_calls(actor_gen="d2"), "allocation.offload=[actor,critic,ref]"),
    "2-streaming": (2, "allocation=split", *_calls(critic_inf="d2@0:0-1"), "min_n_seqs=16", _OFFLOADING),
    "4-split": (4, "allocation=split", *_calls(actor_gen="d4@0:0-3", critic_inf="d2@0:0-1"), _OFFLOADING),
    "4-pipeline": (4, "allocation=p4", *_calls(actor_gen="d4", critic_inf="d4", ref_inf="d4"), _OFFLOADING),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb-per-s", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--together", action="store_true", help="run with and without at the same time")
    parser.add_argument("--plan", action="append", choices=PLANS, help="may be repeated; default: all")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the runs")
    options = parser.parse_intermixed_args()
    columns = ("workers, plan", "step off, s", "waiting", "step on, s", "waiting", "on/off", "metrics")
    limit = f"{options.mb_per_s:g} MB/s between workers" if options.mb_per_s else "no limit between workers"
    table = Table(*columns, title=f"PPO, {limit}, median of {options.rounds} runs of {options.steps} steps")
    is_good = True
    for name in options.plan or PLANS:
        rows: dict[bool, list[list[dict[str, Any]]]] = {False: [], True: []}
        for turn in range(options.rounds):
            order = (False, True) if turn % 2 == 0 else (True, False)
            with ThreadPoolExecutor(2 if options.together else 1) as pool:
                for is_on, run in zip(order, pool.map(partial(_run, PLANS[name], options), order), strict=True):
                    rows[is_on].append(run)
        is_equal = all(_numbers(run) == _numbers(rows[False][0]) for runs in rows.values() for run in runs)
        is_good &= is_equal
        (off_s, off), (on_s, on) = (_medians(rows[is_on]) for is_on in (False, True))
        ratio = statistics.median(
            b["time_s/step"] / a["time_s/step"]
            for pair in zip(rows[False], rows[True], strict=True)
            for a, b in list(zip(*pair, strict=True))[_WARM_UP:]
        )
        told = "equal" if is_equal else "DIFFERENT"
        cells = (name, f"{off_s:.2f}", f"{off:.1%}", f"{on_s:.2f}", f"{on:.1%}", f"{ratio:.2f}", told)
        table.add_row(*cells)
        print(*cells, file=sys.stderr, flush=True)
    Console(width=110).print(table)
    return 0 if is_good else 1


def _run(plan: tuple[Any, ...], options: argparse.Namespace, is_on: bool) -> list[dict[str, Any]]:
    """Do one run; return its lines of metrics."""
    n_workers, *settings = plan
    with tempfile.TemporaryDirectory(prefix="realrl-overlap-") as folder:
        command = [
            *(_limited(options.mb_per_s) if options.mb_per_s else ()),
            *(sys.executable, "-m", "realrl", "run", "ppo", "preset=tiny", f"steps={options.steps}"),
            *("cluster.device=cpu", f"cluster.n_devices_per_node={n_workers}", "save.at_end=false"),
            *(*settings, f"allocation.overlap={str(is_on).lower()}", f"run_dir={folder}/run", *options.overrides),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]


def _limited(mb_per_s: float) -> Sequence[str]:
    """Return the beginning of a command line that gives what follows a loopback of its own with a limited rate."""
    limit = f"tc qdisc add dev lo root tbf rate {round(mb_per_s * 8e3)}kbit burst {_BURST} latency 4s"
    return ("unshare", "--map-root-user", "--net", "sh", "-ec", f'ip link set lo up; {limit}; exec "$@"', "sh")


def _numbers(run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith(_NOISE)} for row in run]


def _medians(runs: list[list[dict[str, Any]]]) -> tuple[float, float]:
    """Return the median seconds of a step, and of the share in which its calls waited for parameters."""
    rows = [row for run in runs for row in run[_WARM_UP:]]
    shares = [row["time_s/realloc_wait"] / row["time_s/step"] for row in rows]
    return statistics.median(row["time_s/step"] for row in rows), statistics.median(shares)


if __name__ == "__main__":
    sys.exit(main())

"""Fused pipelines as they run, against what their schedules say.

    python scripts/bench_fused_run.py paced         # stages that sleep for as long as they would compute
    python scripts/bench_fused_run.py ppo           # steps of PPO in two stages, fused and not, in alternating runs

Paced stages need no cores, so that several processes of one machine behave like devices of their own. What is measured
are messages, the order of the lists, and the hand-over between models.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from realrl.cli import main as realrl  # noqa: E402
from realrl.engine.groups import Communicator  # noqa: E402
from realrl.engine.train.pipeline import Chunk, run_stage  # noqa: E402
from realrl.plan.fusion.instance import Instance, Model, on_block  # noqa: E402
from realrl.plan.fusion.messages import steps_of  # noqa: E402
from realrl.plan.fusion.quick import fused_orders  # noqa: E402
from realrl.plan.pipeline import Step  # noqa: E402
from tests.helpers.ranks import run_ranks  # noqa: E402

CASES = {
    "4 devices, equal models": on_block([Model("A", 4, 8, 1, 2, 1), Model("B", 4, 8, 1, 2, 1, is_reversed=True)]),
    "4 devices, a small model": on_block([Model("A", 4, 8, 2, 4, 1), Model("B", 4, 6, 1, 2, 1, is_reversed=True)]),
    "8 devices, row 4": on_block([Model("A", 8, 8, 5, 10, 1.95), Model("B", 8, 8, 2, 4, 1, is_reversed=True)]),
}
PPO = ("preset=tiny", "n_seqs=32", "cluster.n_devices_per_node=2", "allocation=pipeline", "save.at_end=false")
FUSE = "allocation.fuse=[actor_train,critic_train]"


def paced(rank: int, n_ranks: int, instance: Instance, unit_s: float, n_turns: int) -> list[tuple[float, float]]:
    """Return when this rank began and ended each turn of the schedule, in seconds."""
    lists = steps_of(fused_orders(instance))
    stages = [stage for pipeline in instance.pipelines for stage in pipeline.stages]
    shape = ((64,), torch.float32)

    def chunk(number: int) -> Chunk:
        stage = stages[number]

        def forward(step: Step, received: torch.Tensor | None) -> torch.Tensor:
            time.sleep(stage.forward * unit_s)
            return torch.ones(64, requires_grad=True)

        def backward(output: torch.Tensor | None, gradient: torch.Tensor | None, is_last: bool) -> None:
            time.sleep(stage.backward * unit_s)

        return Chunk(forward, lambda step: shape, backward)

    chunks = {number: chunk(number) for number, stage in enumerate(stages) if rank in stage.devices}
    communicator = Communicator(dist.group.WORLD, n_ranks, rank)
    times = []
    for _ in range(n_turns):
        dist.barrier()
        begin = time.monotonic()
        run_stage(lists[rank], chunks, communicator, device=torch.device("cpu"), batched=False)
        times.append((begin, time.monotonic()))
    return times


def latencies(instance: Instance, *, unit_s: float, n_turns: int) -> list[float]:
    """Return the seconds of each turn, from the first rank's begin to the last one's end."""
    times = run_ranks(instance.n_devices, paced, instance, unit_s, n_turns, timeout_s=300.0)
    return [max(end for _, end in turn) - min(begin for begin, _ in turn) for turn in zip(*times, strict=True)]


def print_paced(n_turns: int, unit_s: float) -> None:
    print(f"{'case':28}{'schedule':>10}{'median':>10}{'ratio':>8}{'least':>8}{'most':>8}{'one after the other':>21}")
    for name, instance in CASES.items():
        expected = fused_orders(instance).latency * unit_s
        serial = sum(alone(instance, number) for number in range(2)) * unit_s
        found = sorted(latencies(instance, unit_s=unit_s, n_turns=n_turns))
        ratios = "".join(f"{seconds / expected:8.3f}" for seconds in (statistics.median(found), found[0], found[-1]))
        print(f"{name:28}{expected:9.2f}s{statistics.median(found):9.2f}s{ratios}{serial:20.2f}s", flush=True)


def alone(instance: Instance, number: int) -> float:
    """Return the latency of one model's 1F1B."""
    return fused_orders(Instance(instance.n_devices, (instance.pipelines[number],))).latency


def print_ppo(n_runs: int, steps: int) -> None:
    seconds: dict[str, list[float]] = {"apart": [], "fused": []}
    for _ in range(n_runs):
        for name, overrides in (("apart", ()), ("fused", (FUSE,))):
            seconds[name] += ppo_steps(steps, overrides)
    for name, found in seconds.items():
        spread = f"{min(found):.3f} to {max(found):.3f}"
        print(f"both train calls, {name}: median {statistics.median(found):.3f} s, {spread} s, of {len(found)} steps")
    ratio = statistics.median(seconds["fused"]) / statistics.median(seconds["apart"])
    print(f"fused / apart: {ratio:.3f}")


def ppo_steps(steps: int, overrides: Sequence[str]) -> list[float]:
    """Return the seconds that the actor's and the critic's training took in each step but the first two."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        assert realrl(["run", "ppo", *PPO, f"steps={steps}", *overrides, f"run_dir={run_dir}"]) == 0
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    both = [(row["time_s/actor_train"], row["time_s/critic_train"]) for row in rows[2:]]
    return [max(pair) if overrides else sum(pair) for pair in both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["paced", "ppo"])
    parser.add_argument("--turns", type=int, default=5, help="turns of each paced schedule")
    parser.add_argument("--unit", type=float, default=0.04, help="seconds that stand for one unit of time")
    parser.add_argument("--runs", type=int, default=3, help="runs of PPO of each kind")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run")
    options = parser.parse_args()
    if options.what == "paced":
        print_paced(options.turns, options.unit)
    else:
        print_ppo(options.runs, options.steps)


if __name__ == "__main__":
    main()

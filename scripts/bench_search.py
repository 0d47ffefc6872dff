"""Time, gap and size of searches for plans: python scripts/bench_search.py [ppo] [--model 70B] [--devices 128] ...

Prompts and responses have 1,024 tokens each, all roles the same size. All times are of the processor. `--all` searches
for many models, clusters and algorithms, a process each, and prints a row for each.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from realrl.config.compose import compose
from realrl.config.schema import GenerationConfig
from realrl.experiment.discovery import load_experiment
from realrl.graph.build import build_graph, calls
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy
from realrl.plan.memory.load import RowLengths
from realrl.plan.memory.plan import RoleState
from realrl.search.branch import Found, search
from realrl.search.prices import Workload
from realrl.search.problem import Problem, pose
from realrl.search.space import RoleSpace, mesh_at
from realrl.shape import DecoderConfig
from realrl.sim.durations import SampleSizes
from realrl.sim.hardware import hardware_from

ROOT = Path(__file__).parents[1]
MODELS = {  # hidden, layers, heads, KV heads, inner
    "7B": (4096, 32, 32, 32, 11008),
    "13B": (5120, 40, 40, 40, 13824),
    "34B": (8192, 48, 64, 8, 22016),
    "70B": (8192, 80, 64, 8, 28672),
}
CASES = [
    *((name, model, n, "a100_80gb") for name in ("ppo",) for model in MODELS for n in (16, 32, 64, 96, 128)),
    *(("ppo", model, n, "h100") for model in ("7B", "70B") for n in (32, 128)),
    *(("grpo", model, n, "a100_80gb") for model in ("7B", "34B") for n in (32, 128)),
    *((name, model, n, "a100_80gb") for name in ("safe_rlhf", "self_play") for model, n in (("7B", 32), ("34B", 128))),
    ("ppo", "70B", 1024, "h100"),
]
LENGTH = 1024
MARGIN = 0.9  # usable share of a device's memory


def shape(size: str, head: str) -> DecoderConfig:
    hidden, layers, heads, kv_heads, inner = MODELS[size]
    return DecoderConfig(
        vocab_size=32000, hidden_size=hidden, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads, head=head,
        head_dim=hidden // heads, intermediate_size=inner, max_positions=4096, dtype="bfloat16",
    )  # fmt: skip


def problem_of(options: argparse.Namespace) -> Problem:
    """Price all choices."""
    cluster = Cluster(-(-options.devices // 8), min(8, options.devices))
    experiment = load_experiment(options.experiment)
    overrides = [f"n_seqs={options.n_seqs}", "algorithm.n_minibatches=8", "algorithm.ppo_epochs=1"]
    config = compose(experiment, overrides)
    graph = build_graph(experiment.calls(config), experiment.dataset.keys)
    n_responses = config.generation.n_responses
    roles = {mfc.role: experiment.roles_for(config)[mfc.role] for mfc in calls(graph)}
    models = {name: shape(options.model, role.head) for name, role in roles.items()}
    home = Allocation(mesh_at(cluster, 0, 1), ParallelStrategy())
    workload = Workload(
        graph,
        {name: RoleState(model, home, roles[name].trainable) for name, model in models.items()},
        cluster,
        GenerationConfig(max_new_tokens=LENGTH, max_batch_size=options.batch, n_responses=n_responses),
        {
            f"0/{i}": SampleSizes((LENGTH,) * n_responses, (LENGTH,) * n_responses)
            for i in range(max(mfc.n_seqs for mfc in calls(graph)))
        },
        RowLengths([LENGTH], [2 * LENGTH], [2 * LENGTH]),
        dict.fromkeys(graph, n_responses),
    )
    text = (ROOT / "configs" / "hardware" / f"{options.hardware}.yaml").read_text()
    hardware = hardware_from(yaml.safe_load(text), source=options.hardware)
    spaces = {name: RoleSpace(model) for name, model in models.items()}
    return pose(workload, hardware, roles=spaces, capacity=MARGIN * hardware.device.memory_bytes)


def spent() -> tuple[float, float]:
    """Return seconds of the processor, and the most GB of memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6


def until(states: Iterator[Found], seconds: float) -> Iterator[Found]:
    """Yield states until the processor has spent so many seconds since the start of the process."""
    for state in states:
        yield state
        if time.process_time() > seconds:
            return


def search_one(options: argparse.Namespace) -> None:
    problem = problem_of(options)
    n_choices = " ".join(str(len(found)) for found in problem.choices)
    print(f"choices: {n_choices}; {spent()[0]:.1f} s, {spent()[1]:.2f} GB", flush=True)
    last, period = None, float("inf")
    for last in until(search(problem), options.seconds):
        if last.period < period:
            period = last.period
            print(f"{period:10.3f} s  gap {last.gap:7.2%}  {last.n_expanded} expanded  {spent()[0]:.1f} s", flush=True)
    assert last is not None
    assert last.plan is not None
    for name, placed in zip(problem.model.flow.names, last.plan, strict=True):
        price = problem.model.price(problem.model.flow.names.index(name), placed.choice)
        print(f"  {name:18} {price.seconds:9.3f} s  ranks {placed.span[0]}-{placed.span[1] - 1}  {placed.choice}")
    print(
        f"{last.n_expanded} partial plans, {last.n_evaluated} plans evaluated, {'ended' if last.is_done else 'stopped'}"
    )
    print(f"result {last.period:.3f} {last.bound:.3f} {spent()[0]:.1f} {spent()[1]:.2f}")


def search_all(options: argparse.Namespace) -> None:
    """Print a row for each of `CASES`."""
    table = Table(box=box.MARKDOWN)
    for name in ("algorithm", "model", "devices", "hardware", "period, s", "gap", "CPU, s", "memory, GB"):
        table.add_column(name)
    gaps = []
    for name, model, n_devices, hardware in CASES:
        arguments = [name, "--model", model, "--devices", str(n_devices), "--hardware", hardware]
        arguments += ["--seconds", str(options.seconds * (6 if n_devices > 128 else 1))]
        made = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
        print(*arguments, made.stdout, made.stderr[-300:], file=sys.stderr, flush=True)
        if made.returncode:
            table.add_row(name, model, str(n_devices), hardware, "nothing fits", "", "", "")
            continue
        period, bound, cpu, memory = map(float, made.stdout.splitlines()[-1].split()[1:])
        gaps.append(period / bound - 1)
        table.add_row(
            name, model, str(n_devices), hardware, f"{period:.2f}", f"{gaps[-1]:.1%}", f"{cpu:.0f}", f"{memory:.2f}"
        )
    console = Console(width=140)
    console.print(table)
    console.print(f"Median gap {statistics.median(gaps):.1%}, worst {max(gaps):.1%}, of {len(gaps)} searches.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", nargs="?", default="ppo")
    parser.add_argument("--all", action="store_true", help="search for a table of cases")
    parser.add_argument("--model", default="70B", choices=list(MODELS))
    parser.add_argument("--devices", type=int, default=128)
    parser.add_argument("--n-seqs", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256, help="generation.max_batch_size")
    parser.add_argument("--hardware", default="a100_80gb")
    parser.add_argument("--seconds", type=float, default=35.0, help="of the processor, all in all")
    options = parser.parse_args()
    (search_all if options.all else search_one)(options)


if __name__ == "__main__":
    main()

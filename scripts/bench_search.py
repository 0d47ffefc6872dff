"""Time, gap and size of searches for plans: python scripts/bench_search.py [ppo] [--model 70B] [--devices 128] ...

Prompts and responses have 1,024 tokens each, all roles the same size. All times are of the processor. `--all` searches
for many models, clusters and algorithms, a process each, and prints a row for each.

`--plans` runs the command `realrl plan` for such cases instead: prices, plans of other systems, the search and the real
scheduler, with as many processes as the command takes. Its seconds are those of a clock and of all processors; memory
is the most that all its processes had together. `--only "ppo 70B 128"` takes the cases that begin so.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from realrl.config.compose import compose
from realrl.config.schema import GenerationConfig
from realrl.experiment.discovery import load_experiment
from realrl.graph.build import build_graph, calls
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy
from realrl.model.families.llama import config_to_hf
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
ALGORITHMS = "ppo", "grpo", "safe_rlhf", "self_play"
CASES = [
    *(("ppo", model, n, "a100_80gb") for n in (16, 64, 128) for model in MODELS),
    ("ppo", "70B", 128, "h100"),
    *((name, "34B", 64, "a100_80gb") for name in ("grpo", "safe_rlhf", "self_play")),
    ("ppo", "34B", 96, "a100_80gb"),
    ("ppo", "70B", 1024, "h100"),
]
PLANS = [
    *((name, model, n, "a100_80gb") for name in ALGORITHMS for n in (16, 32, 64, 128) for model in MODELS),
    *((name, model, n, "h100") for name in ALGORITHMS for n in (32, 64, 128) for model in ("7B", "70B")),
    *((name, "70B", 1024, "h100") for name in ALGORITHMS),
    ("ppo", "70B", 1024, "a100_80gb"),
]
LENGTH = 1024
MARGIN = 0.9  # usable share of a device's memory
_PERIOD, _GAP = r"period (\S+) s by the real scheduler", r"(gap of \S+ at most|all plans|least memory)"


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
    n_samples = max(mfc.n_seqs for mfc in calls(graph))
    workload = Workload(
        graph,
        {name: RoleState(model, home, roles[name].trainable) for name, model in models.items()},
        cluster,
        GenerationConfig(max_new_tokens=LENGTH, max_batch_size=options.batch, n_responses=n_responses),
        {1: {f"0/{i}": SampleSizes((LENGTH,) * n_responses, (LENGTH,) * n_responses) for i in range(n_samples)}},
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


def until(states: Iterator[Found], gap: float, seconds: float) -> Iterator[Found]:
    """Yield states until a gap is small, or the processor has spent so many seconds since the start of the process."""
    for state in states:
        yield state
        if state.gap <= gap or time.process_time() > seconds:
            return


def search_one(options: argparse.Namespace) -> None:
    problem = problem_of(options)
    n_choices = " ".join(str(len(found)) for found in problem.choices)
    print(f"choices: {n_choices}; {spent()[0]:.1f} s, {spent()[1]:.2f} GB", flush=True)
    last, period = None, float("inf")
    for last in until(search(problem), options.gap, options.seconds):
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
    print("| algorithm | model | devices | hardware | period, s | gap | CPU, s | memory, GB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    gaps = []
    for name, model, n_devices, hardware in CASES:
        arguments = [name, "--model", model, "--devices", str(n_devices), "--hardware", hardware]
        arguments += ["--seconds", str(options.seconds * (7 if n_devices > 128 else 1)), "--gap", str(options.gap)]
        made = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
        row = "nothing fits | | | |"
        if not made.returncode:
            period, bound, cpu, memory = map(float, made.stdout.splitlines()[-1].split()[1:])
            gaps.append(period / bound - 1)
            row = f"{period:.2f} | {gaps[-1]:.1%} | {cpu:.0f} | {memory:.2f} |"
        elif "AllocationError" not in made.stderr:
            raise RuntimeError(made.stderr)
        print(f"| {name} | {model} | {n_devices} | {hardware} | {row}", flush=True)
    print(f"\nMedian gap {statistics.median(gaps):.1%}, worst {max(gaps):.1%}, of {len(gaps)} searches.")


# ---------------------------------------------------------------- the command


def plan_one(case: tuple[str, str, int, str], n_seqs: int, folder: Path) -> str:
    """Run `realrl plan` for a case, and return its row."""
    name, model, n_devices, hardware = case
    (folder / model).mkdir(exist_ok=True)
    (folder / model / "config.json").write_text(json.dumps(config_to_hf(replace(shape(model, "lm"), dtype="bfloat16"))))
    overrides = [
        f"models.*.path={folder / model}", "precision=bf16", f"n_seqs={n_seqs}", "dataset.path=none.jsonl",
        f"dataset.max_prompt_tokens={LENGTH}", f"generation.max_new_tokens={LENGTH}",
        f"cluster.n_nodes={n_devices // 8}", "cluster.n_devices_per_node=8", "--hardware", hardware,
    ]  # fmt: skip
    if name == "ppo":
        overrides.append("algorithm.reward_function=realrl.data.tiny:toy_reward")
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(folder / "out", "w+") as out:
        command = [sys.executable, "-m", "realrl", "plan", name, *overrides]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
        most = 0
        while process.poll() is None:
            most = max(most, memory_of(process.pid))
            time.sleep(0.1)
        out.seek(0)
        printed = out.read()
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if process.returncode:
        return f"{printed.strip().splitlines()[-1]} | | {seconds:.0f} | {cpu:.0f} | {most / 1e9:.2f} |"
    period, gap = (next(re.finditer(how, printed)).expand(r"\1") for how in (_PERIOD, _GAP))
    return f"{period} | {gap} | {seconds:.0f} | {cpu:.0f} | {most / 1e9:.2f} |"


def memory_of(pid: int) -> int:
    """Return the bytes in memory of a process and of all that it has started; shared pages count for each."""
    try:
        n_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError, IndexError):  # it has ended meanwhile
        return 0
    return n_pages * resource.getpagesize() + sum(memory_of(int(child)) for child in children)


def plan_all(options: argparse.Namespace) -> None:
    """Print a row for each of `PLANS`."""
    print("| algorithm | model | devices | hardware | period, s | gap | wall, s | CPU, s | memory, GB |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for case in PLANS:
        if " ".join(map(str, case)).startswith(options.only):
            with tempfile.TemporaryDirectory() as folder:
                row = plan_one(case, options.n_seqs, Path(folder))
            print(f"| {' | '.join(map(str, case))} | {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", nargs="?", default="ppo")
    parser.add_argument("--all", action="store_true", help="search for a table of cases")
    parser.add_argument("--plans", action="store_true", help="run realrl plan for a table of cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases of --plans that begin so")
    parser.add_argument("--model", default="70B", choices=list(MODELS))
    parser.add_argument("--devices", type=int, default=128)
    parser.add_argument("--n-seqs", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256, help="generation.max_batch_size")
    parser.add_argument("--hardware", default="a100_80gb")
    parser.add_argument("--gap", type=float, default=0.01, help="with which a search ends")
    parser.add_argument("--seconds", type=float, default=35.0, help="of the processor, all in all")
    options = parser.parse_args()
    (plan_all if options.plans else search_all if options.all else search_one)(options)


if __name__ == "__main__":
    main()

"""Plans of `realrl plan` against those of every method: python scripts/bench_methods.py [--cases 200] ...

A case is drawn by its seed: an algorithm or a graph of its own, models of one size or several, a cluster of at most 64
devices, samples and their lengths, a machine as it is or with every speed changed. It is planned as `realrl plan` does;
then every plan that a method has, also those that planning leaves out as too slow, is simulated by the real scheduler.
The random walk of `mcmc` is made again with as much time as planning took. Periods are those of steps 2 to 4, whose
lengths are drawn: a plan that is better than that of `realrl plan` has to be so over many steps as well. At last the
search runs without the plans of methods, for `--seconds` of the processor or as long as the slowest method took; both
compare by the fast model.

`--first SEED --cases 1` makes a case again. `--keep FILE` gets a line for each case; those it has are not run again.

`--gaps` prints instead how much a plan of PPO, GRPO, Safe-RLHF and self-play may be longer than the best possible one,
for models of 7B to 70B on 16 to 128 GPUs; `--gaps ppo 70B` for a part of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

from realrl import InterfaceType, MFCDef, Role
from realrl.config.compose import compose
from realrl.data.kinds import DatasetKind
from realrl.errors import UsageError
from realrl.experiment.declaration import Experiment
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.planner.evaluate import evaluate
from realrl.planner.planner import Effort, Planned, Planning, spearman
from realrl.planner.request import Request
from realrl.planner.study import Study
from realrl.profiler.hardware_files import named_hardware
from realrl.search.branch import search
from realrl.search.methods import METHODS
from realrl.search.methods.layout import Plan
from realrl.search.methods.mcmc import walked
from realrl.search.problem import Problem
from realrl.sim.hardware import Hardware, Link

MODELS = {  # hidden, layers, heads, KV heads, inner
    "1B": (2048, 16, 32, 8, 8192),
    "7B": (4096, 32, 32, 32, 11008),
    "13B": (5120, 40, 40, 40, 13824),
    "34B": (8192, 48, 64, 8, 22016),
    "70B": (8192, 80, 64, 8, 28672),
}
EXPERIMENTS = ("ppo", "ppo", "grpo", "remax", "safe_rlhf", "self_play", "dpo", "own", "own")
MACHINES = ("a100_80gb", "h100", "h200", "l40s")
LENGTHS = ("", "prompt=uniform:8,{0} response=lognormal:{1},0.7", "prompt=fixed:{0} response=uniform:2,{1}")
SAME = 1 + 1e-9
LONG_WALK = "mcmc, as long"
MANY_STEPS = 40
PILOT = 10_000  # steps of a walk that tell how long one takes
GAP_LIMIT_S = 60.0
FILES = Path(tempfile.gettempdir()) / "realrl_bench_methods"


@dataclass
class Outcome:
    """One case; periods by the fast model have their names, all others are those of the real scheduler.

    Attributes:
        planned, planned_fast, bound_fast: of `realrl plan`; `plan` is where its plan comes from.
        methods, methods_fast: of every method that has a plan.
        alone_fast: of the search without the plans of methods; None if it finds none.
        confirmed: both periods of every plan that planning has simulated, the fast model's first.
        seconds: of the processor, by phase.
    """

    seed: int
    text: str
    plan: str = ""
    planned: float | None = None
    planned_fast: float = 0.0
    bound_fast: float = 0.0
    methods: dict[str, float] = field(default_factory=dict)
    methods_fast: dict[str, float] = field(default_factory=dict)
    alone_fast: float | None = None
    confirmed: list[tuple[float, float]] = field(default_factory=list)
    longer: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def worse_than(self) -> list[str]:
        """Methods whose plan is better than that of `realrl plan`; a walk as long as it by a thousandth at least.

        `longer` has both periods over many steps, of those that are better over a few.
        """
        same = dict.fromkeys(self.methods, SAME) | {LONG_WALK: 1.001}
        few = {name: (period, self.planned) for name, period in self.methods.items()}
        return [n for n, (its, own) in (few | self.longer).items() if own is None or its * same[n] < own]

    @property
    def alone_worse_than(self) -> list[str]:
        """Methods that the search does not reach without them."""
        alone = self.alone_fast
        return [n for n, s in self.methods_fast.items() if n != LONG_WALK and (alone is None or s * SAME < alone)]


# ---------------------------------------------------------------- cases


def model_of(size: str) -> str:
    """Return a folder with the config.json of a model."""
    folder = FILES / size
    hidden, layers, heads, kv_heads, inner = MODELS[size]
    values = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": inner, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def own_calls(n: int, seed: int) -> list[MFCDef]:
    """Return the calls of a random graph: a policy generates, models read and are trained, in any order that works."""
    rng = random.Random(seed)
    tokens = ("input_ids", "prompt_mask")
    calls = [
        MFCDef("actor_gen", "actor", InterfaceType.GENERATE, "ppo_actor", ("prompt_ids",), tokens, n_seqs=n,
               max_staleness=rng.choice([0, 0, 1]))
    ]  # fmt: skip
    keys: list[str] = []
    for number in range(rng.randint(1, 4)):
        reads = (*tokens, *rng.sample(keys, rng.randint(0, min(2, len(keys)))))
        role = rng.choice(["actor", "critic", "judge", "other"])
        calls.append(
            MFCDef(
                f"{role}_inf_{number}", role, InterfaceType.INFERENCE, "reward_model", reads, (f"k{number}",), n_seqs=n
            )
        )
        keys.append(f"k{number}")
    for role in ("actor", *rng.sample(["critic", "other"], rng.randint(0, 2))):
        reads = (*tokens, *rng.sample(keys, rng.randint(1, len(keys))))
        calls.append(
            MFCDef(f"{role}_train", role, InterfaceType.TRAIN_STEP, "sft", reads, n_seqs=n,
                   n_minibatches=rng.choice([1, 2, 4]))
        )  # fmt: skip
    return calls


def own_experiment(seed: int) -> Experiment:
    """Return an experiment with `own_calls`."""
    heads = {"actor": "lm", "critic": "value", "judge": "reward", "other": "lm"}
    calls = own_calls(1, seed)
    trained = {call.role for call in calls if call.is_train}
    used = [name for name in heads if name in {call.role for call in calls}]
    roles = {name: Role(trainable=name in trained, head=heads[name]) for name in used}  # type: ignore[arg-type]
    return Experiment("own", "a random graph", roles, DatasetKind.PROMPT, lambda config: own_calls(config.n_seqs, seed))


def perturbed(machine: Hardware, rng: random.Random) -> Hardware:
    """Return a machine whose speeds and latencies are up to three times as high or as low."""

    def times(value: float) -> float:
        return value * 3 ** rng.uniform(-1, 1)

    def link(one: Link) -> Link:
        return replace(one, bytes_per_s=times(one.bytes_per_s), latency_s=times(one.latency_s))

    device, links, rate = machine.device, machine.links, times(1.0)
    device = replace(
        device,
        flops_per_s={dtype: value * rate for dtype, value in device.flops_per_s.items()},
        memory_bytes=device.memory_bytes * rng.choice([0.75, 1.0, 1.5]),
        bytes_per_s=times(device.bytes_per_s),
        half_tokens=times(device.half_tokens),
        block_s=times(device.block_s),
        pass_s=times(device.pass_s),
    )
    links = replace(links, device=link(links.device), node=link(links.node), host=link(links.host))
    return replace(machine, device=device, links=links, name=f"{machine.name}, changed")


def drawn(seed: int) -> tuple[Request, str]:
    """Return a random case, and what it is."""
    rng = random.Random(seed)
    name, size = rng.choice(EXPERIMENTS), rng.choice([*MODELS, "tiny"])
    on_cpu = size == "tiny" and rng.random() < 0.7
    n_devices = 2 if on_cpu else rng.choice([2, 4, 8, 8, 16, 16, 24, 32, 48, 64])
    machine_name = "two_cores" if on_cpu else rng.choice(MACHINES)
    machine, is_changed = named_hardware(machine_name), rng.random() < 0.4
    machine = perturbed(machine, rng) if is_changed else machine
    n_seqs, n_prompt, n_new = (
        rng.choice([32, 64, 128, 256]),
        *rng.choices([16, 64] if size == "tiny" else [128, 512, 1024], k=2),
    )
    experiment = own_experiment(seed) if name == "own" else load_experiment(name)
    overrides = [
        "dataset.path=x.jsonl",
        f"cluster.n_nodes={-(-n_devices // 8)}",
        f"cluster.n_devices_per_node={min(8, n_devices)}",
        f"cluster.device={machine.device.kind}",
        "precision=" + ("fp32" if on_cpu else "bf16"),
        f"n_seqs={n_seqs}",
        f"dataset.max_prompt_tokens={n_prompt}",
        *(
            [f"generation.max_new_tokens={n_new}", f"generation.max_batch_size={rng.choice([32, 64, 256])}"]
            * (name != "dpo")
        ),
        *([f"algorithm.n_minibatches={rng.choice([1, 4, 8])}"] * (name != "own")),
    ]
    sizes = {} if size == "tiny" else {"*": size}
    if name in ("ppo", "grpo", "remax") and rng.random() < 0.4:
        overrides.append("algorithm.reward_function=realrl.data.tiny:toy_reward")
    elif name in ("ppo", "safe_rlhf") and size != "tiny" and rng.random() < 0.3:
        sizes["reward"] = rng.choice(list(MODELS))
    lengths = rng.choice(LENGTHS).format(n_prompt, n_new // 2) if name != "dpo" else ""
    if size == "tiny":
        overrides.append("models.*.path=tiny")
    overrides += [f"models.{role}.path={model_of(model)}" for role, model in sizes.items()]
    config = compose(experiment, overrides, config_dir=config_dir())
    models = " ".join(size if role == "*" else f"{role} {size}" for role, size in sizes.items()) or "tiny"
    text = f"{name} {models}, {n_devices} x {machine_name}{' changed' * is_changed}, {n_seqs} of {n_prompt}+{n_new}"
    return Request(experiment, config, machine, lengths or None), text


# ---------------------------------------------------------------- one case


def plan(
    request: Request, effort: Effort, *, is_confirmed: bool = True
) -> tuple[Planned | None, dict[str, float], float]:
    """Plan as `realrl plan` does; return seconds of the processor by phase, and the gap by the fast model too.

    Args:
        is_confirmed: False to end before the real scheduler simulates.
    """
    spent: dict[str, float] = defaultdict(float)
    planning, begin, phase, gap = Planning(request, seed=1, effort=effort), time.process_time(), "prices", float("inf")
    for progress in planning.run():
        spent[phase] += time.process_time() - begin
        begin = time.process_time()
        phase = progress.phase
        if phase == "search":
            gap = progress.period_s / progress.bound_s - 1 if progress.bound_s else float("inf")
        if phase == "scheduler" and not is_confirmed:
            break
    spent[phase] += time.process_time() - begin
    return planning.result() if is_confirmed else None, dict(spent), gap


def searched(problem: Problem, seconds: float) -> float | None:
    """Return the period that a search finds by itself in so many seconds of the processor."""
    begin, period = time.process_time(), None
    try:
        for found in search(problem, seed=1):
            period = found.period if found.plan is not None else None
            if time.process_time() - begin > seconds:
                break
    except UsageError:
        return None
    return period


def long_walk(problem: Problem, seconds: float) -> Plan:
    """Return the plan of a random walk that has as many seconds of the processor as planning took.

    Its speed is that of a shorter walk: the first few hundred are fast, as most
    plans near the first one lack memory.
    """
    begin = time.process_time()
    shorter = walked(problem, 1, n_evaluations=PILOT)
    a_step = (time.process_time() - begin) / PILOT
    n = int(seconds / max(a_step, 1e-6))
    return shorter if n <= PILOT else walked(problem, 1, n_evaluations=n)


def run(seed: int, *, seconds: float) -> Outcome:
    """Run one case; its plan is empty if nothing fits."""
    request, text = drawn(seed)
    found = Outcome(seed, text)
    try:
        planned, found.seconds, _ = plan(request, Effort())
        problem = Study(request).problem
    except UsageError:
        return found
    if planned is None:
        return found
    found.plan, found.planned, found.planned_fast = planned.best.name, planned.best.period_s, planned.best.fast_s
    found.bound_fast = planned.bound_s
    found.confirmed = [(one.fast_s, one.period_s) for one in planned.candidates]
    spent: dict[str, float] = {}
    plans: dict[str, Plan] = {}
    for name, method in METHODS.items():
        begin = time.process_time()
        try:
            plans[name] = method.place(problem, 1)
        except UsageError:
            continue
        spent[name] = time.process_time() - begin
    if "mcmc" in plans:
        took = found.seconds.get("methods", 0.0) + found.seconds.get("search", 0.0)
        plans[LONG_WALK] = long_walk(problem, took)
    simulated = {json.dumps(one.settings.overrides(), sort_keys=True): one.period_s for one in planned.candidates}
    for name, placed in plans.items():
        settings = request.settings_of(placed)
        key = json.dumps(settings.overrides(), sort_keys=True)
        if key not in simulated:
            if not problem.model.accepts(placed):
                continue
            simulated[key] = evaluate(request, settings, name=name).period_s
        found.methods[name], found.methods_fast[name] = simulated[key], problem.model.period(placed)
    if better := found.worse_than:
        own = evaluate(request, planned.best.settings, n_steps=MANY_STEPS).period_s
        for name in better:
            its = evaluate(request, request.settings_of(plans[name]), n_steps=MANY_STEPS).period_s
            found.longer[name] = its, own
    found.alone_fast = searched(problem, max([seconds, *spent.values()]))
    return found


# ---------------------------------------------------------------- many


def kept(path: Path | None) -> dict[int, Outcome]:
    """Return the outcomes that a file has, by seed."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["seed"]: Outcome(**line) for line in lines}


def told(case: Outcome) -> str:
    """Return a line about a case."""
    if case.planned is None:
        return f"{case.seed:4} {case.text}: nothing fits"
    alone = "no plan" if case.alone_fast is None else f"{case.alone_fast:.4g} s"
    words = [f"{case.planned:.4g} s ({case.plan}, {case.planned_fast:.4g} s by the fast model)", f"alone {alone}"]
    if case.methods:
        best = min(case.methods, key=lambda name: case.methods[name])
        words.append(f"{best} {case.methods[best]:.4g} s ({case.methods_fast[best]:.4g} s)")
    words.append(f"{sum(case.seconds.values()):.0f} s")
    words += [f"over {MANY_STEPS} steps {own:.4g} s, {name} {its:.4g} s" for name, (its, own) in case.longer.items()]
    words += [f"WORSE THAN {', '.join(case.worse_than)}"] * bool(case.worse_than)
    words += [f"alone worse than {', '.join(case.alone_worse_than)}"] * bool(case.alone_worse_than)
    return f"{case.seed:4} {case.text}: {'; '.join(words)}"


def summary(cases: Sequence[Outcome]) -> None:
    """Print what all cases tell."""
    own = [case for case in cases if case.planned is not None]
    print(f"\n{len(cases)} cases, {len(own)} of them with a plan\n")
    print("| method | has a plan | is the best method | better than realrl plan | behind it, median | worst |")
    print("|---|---|---|---|---|---|")
    for name in (*METHODS, LONG_WALK):
        some = [case for case in own if name in case.methods]
        best = sum(case.methods[name] <= min(case.methods.values()) * SAME for case in some)
        better = sum(name in case.worse_than for case in some)
        behind = [case.methods[name] / case.planned - 1 for case in some if case.planned is not None] or [float("nan")]
        print(f"| `{name}` | {len(some)} | {best} | {better} | {statistics.median(behind):.1%} | {max(behind):.0%} |")
    worse = sum(bool(case.worse_than) for case in own)
    print(f"\nrealrl plan is worse than a method by the real scheduler: {worse} of {len(own)} cases.")
    longer = sum(bool(case.longer) for case in own)
    print(f"Over steps 2 to 4, the number is {longer}; {MANY_STEPS} steps decide.")
    worse = sum(bool(case.alone_worse_than) for case in own)
    print(f"The search without methods is worse than one of them, by the fast model: {worse} of {len(own)} cases.")
    gaps = [case.planned_fast / case.bound_fast - 1 for case in own if case.bound_fast]
    if gaps:
        shares = statistics.quantiles(gaps, n=10) if len(gaps) > 1 else gaps * 9
        print(f"Gap to the proven bound: median {statistics.median(gaps):.1%}, nine of ten within {shares[8]:.1%}")
    several = [case.confirmed for case in own if len(case.confirmed) > 2]
    each = [spearman([fast for fast, _ in some], [real for _, real in some]) for some in several]
    over = [(f / min(x for x, _ in some), r / min(y for _, y in some)) for some in several for f, r in some]
    errors = [abs(fast / real - 1) for case in own for fast, real in case.confirmed]
    if each:
        together = spearman([fast for fast, _ in over], [real for _, real in over])
        print(f"Rank correlation of fast model and scheduler over {len(over)} plans, by their cases: {together:.3f}")
        print(f"The same in each case: median {statistics.median(each):.3f}, worst {min(each):.2f}, {len(each)} cases")
        print(f"The fast model's periods are off by {statistics.median(errors):.1%}, at most {max(errors):.0%}")


def gap_of(case: tuple[str, str, int, str]) -> tuple[float, Mapping[str, float]]:
    """Return the gap of a plan and the seconds of the processor by phase; infinite if nothing fits."""
    name, model, n_devices, machine = case
    overrides = [
        "dataset.path=x.jsonl", f"cluster.n_nodes={n_devices // 8}", "cluster.n_devices_per_node=8",
        "cluster.device=cuda", "precision=bf16", "n_seqs=1024", "dataset.max_prompt_tokens=1024",
        "generation.max_new_tokens=1024", f"models.*.path={model_of(model)}",
    ]  # fmt: skip
    experiment = load_experiment(name)
    request = Request(experiment, compose(experiment, overrides, config_dir=config_dir()), named_hardware(machine))
    try:
        _, spent, gap = plan(request, Effort(seconds=GAP_LIMIT_S), is_confirmed=False)
    except UsageError:
        return float("inf"), {}
    return gap, spent


def print_gaps(only: Sequence[str], pool: ProcessPoolExecutor) -> None:
    """Print the gap for every algorithm, model, cluster and machine, or those that have all of some words."""
    cases = [
        case
        for case in product(("ppo", "grpo", "safe_rlhf", "self_play"), list(MODELS)[1:], (16, 64, 128), MACHINES[:2])
        if set(only) <= {str(word) for word in case}
    ]
    print("| algorithm | model | devices | hardware | gap | CPU, s |\n|---|---|---|---|---|---|")
    gaps = []
    for case, (gap, spent) in zip(cases, pool.map(gap_of, cases), strict=True):
        told = "nothing fits" if gap == float("inf") else f"{gap:.1%}"
        print(f"| {' | '.join(map(str, case))} | {told} | {sum(spent.values()):.0f} |", flush=True)
        gaps += [gap] * (gap < float("inf"))
    over = sum(gap > 0.1 for gap in gaps)
    print(f"\n{len(gaps)} searches: median {statistics.median(gaps):.1%}, worst {max(gaps):.1%}; {over} above 10%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--gaps", nargs="*", metavar="WORD")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        if options.gaps is not None:
            print_gaps(options.gaps, pool)
            return
        seeds, known = range(options.first, options.first + options.cases), kept(options.keep)
        wanted = [seed for seed in seeds if seed not in known]
        for case in pool.map(partial(run, seconds=options.seconds), wanted):
            known[case.seed] = case
            print(told(case), flush=True)
            if options.keep is not None:
                with options.keep.open("a") as file:
                    file.write(json.dumps(asdict(case)) + "\n")
    summary([known[seed] for seed in seeds])


if __name__ == "__main__":
    main()

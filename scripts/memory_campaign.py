"""Bytes that live on every rank of random runs, counted call by call, against the plan of memory.

    python scripts/memory_campaign.py [--n 500] [--seed 1] [--only NUMBER ...] [--backends native,megatron,deepspeed]
                                      [--device cpu] [--jobs 2] [--out FILE.jsonl]

Each case is a whole run of two or three steps and a checkpoint on 1 to 4 CPU ranks: a model of random shape, an
experiment, an allocation for each of its calls, and settings of training and generation are drawn from the seed and the
case's number. All tensors that operations return are counted while they live. Prompts of a case are nearly as long as
each other, and responses as long as allowed, because the plan is of the worst case.

With `--device cuda` a case has one rank, a larger model and longer rows. Torch's allocator counts, and what CUDA graphs
keep is added.

The plan must be at least what was counted, and at most 1.3 times as much, in every call and save on every rank. The
exit code is 1 if it is not, or if a run fails. A file of results that is there is gone on with: its cases are not run
again, and count in the table.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from realrl.config.compose import compose  # noqa: E402
from realrl.data.kinds import DatasetKind  # noqa: E402
from realrl.data.tiny import tiny_tokenizer  # noqa: E402
from realrl.errors import UsageError  # noqa: E402
from realrl.experiment.declaration import Experiment  # noqa: E402
from realrl.experiment.discovery import load_experiment  # noqa: E402
from realrl.experiment.planning import check_models_fit, plan_run  # noqa: E402
from realrl.experiment.run_plan import RunPlan  # noqa: E402
from realrl.mesh.device_mesh import Cluster, DeviceMesh, ParallelStrategy, legal_meshes  # noqa: E402
from realrl.model.families import find_family  # noqa: E402
from realrl.model.files.hf import save_model  # noqa: E402
from realrl.model.init import random_model  # noqa: E402
from realrl.plan.backends import BACKENDS  # noqa: E402
from realrl.plan.memory.plan import SAVE, show_bytes  # noqa: E402
from tests.helpers.counted_runs import Counted, count_run  # noqa: E402

MOST_RANKS = 4
ON_CUDA = 4  # times larger, for kernels that tiny heads do not choose
LOWEST, HIGHEST = 1.0, 1.3
EXPERIMENTS = {"ppo": 8, "grpo": 5, "sft": 4, "dpo": 3, "rw": 2, "kto": 1, "ppo_ref_ema": 2, "remax": 1}  # -> weight
MODELS: dict[str, dict[str, Any]] = {  # model_type -> what config.json has beside the sizes
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 32, "query_pre_attn_scalar": 24},
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 32, "sliding_window_pattern": 2},
    "olmo2": {},
    "phi3": {"sliding_window": 48, "partial_rotary_factor": 0.75},
    "gpt2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
}
_ALWAYS_THERE = ("parameters", "optimizer", "host")  # parts of a plan
_MOST_DRAWS = 200
_SHOWN_ENDS = 5


@dataclass(frozen=True)
class Case:
    """A run that is planned, and the words that say what it is."""

    number: int
    plan: RunPlan
    words: str


def draw_case(seed: int, number: int, folder: Path, backends: Sequence[str], device: str) -> Case:
    """Draw models, data and plans until one can run; write the models and the data into the folder.

    Raises:
        RuntimeError: none of many can run.
    """
    rng = random.Random(f"{seed}/{number}")
    most_ranks, scale = (MOST_RANKS, 1) if device == "cpu" else (1, ON_CUDA)
    experiment = load_experiment(rng.choices([*EXPERIMENTS], [*EXPERIMENTS.values()])[0])
    model_type = rng.choice(["llama", *MODELS])
    raw = draw_model(rng, model_type, scale)
    write_model(folder / "lm", raw)
    judge = draw_model(rng, "llama", scale) | {"vocab_size": raw["vocab_size"]}
    write_model(folder / "scalar", judge | {"architectures": ["LlamaForSequenceClassification"]})
    sizes = draw_data(rng, experiment.dataset, folder / "rows.jsonl", scale)
    fixed = [
        f"seed={number}", f"run_dir={folder}", f"cluster.device={device}", "recover.retries=0",
        "cluster.collective_timeout_s=120", f"dataset.path={folder / 'rows.jsonl'}", "dataset.max_prompt_tokens=512",
        "dataset.max_answer_tokens=512", f"n_seqs={sizes['n_seqs']}",
    ]  # fmt: skip
    # drawn apart from all else, which stays as it is in other cases
    learns_answers = hasattr(compose(experiment, []).algorithm, "ptx_coef") and (
        random.Random(f"{seed}/{number}/answers").random() < 0.1
    )
    answers = ["algorithm.ptx_coef=0.5"] if learns_answers else []
    refusal = ""
    for _ in range(_MOST_DRAWS):
        overrides = [*fixed, *draw_settings(rng, experiment, folder, sizes, backends, most_ranks), *answers]
        try:
            plan = plan_run(compose(experiment, overrides), experiment)
            check_models_fit(plan)
        except UsageError as error:
            refusal = str(error)
            continue
        plan, virtual = with_virtual_stages(random.Random(f"{seed}/{number}/virtual stages"), plan, overrides)
        overrides += virtual
        words = " ".join(word for word in overrides if word not in fixed and str(folder) not in word)
        return Case(number, plan, f"{experiment.name} {model_type} n_seqs={sizes['n_seqs']} {words}")
    raise RuntimeError(f"case {number}: no plan of {_MOST_DRAWS} can run; the last one: {refusal}")


def with_virtual_stages(rng: random.Random, plan: RunPlan, overrides: Sequence[str]) -> tuple[RunPlan, list[str]]:
    """Give half of the train steps with pipelines two virtual stages, if these fit; return the plan and overrides."""
    words = [
        f"calls.{mfc.name}.virtual_stages=2"
        for mfc in plan.mfcs
        if mfc.is_train and plan.allocations[mfc.name].strategy.pp > 1 and rng.random() < 0.5
    ]
    try:
        changed = plan_run(compose(plan.experiment, [*overrides, *words]), plan.experiment)
        check_models_fit(changed)
    except UsageError:
        return plan, []
    return changed, words


def draw_model(rng: random.Random, model_type: str, scale: int) -> dict[str, Any]:
    """Return the content of a config.json."""
    n_heads, head_dim = rng.choice([4, 8]), scale * rng.choice([16, 32])
    hidden, n_layers = n_heads * head_dim, rng.randint(2, 4)
    vocabulary = rng.choice([320, 1000, 2048, 32 * hidden])
    shared = {"model_type": model_type, "vocab_size": vocabulary, "eos_token_id": 256}
    if model_type == "gpt2":
        return shared | {"n_embd": hidden, "n_head": n_heads, "n_layer": n_layers, "n_positions": 2048}
    return (
        shared
        | {
            "hidden_size": hidden,
            "intermediate_size": hidden * rng.choice([2, 3, 4]),
            "num_hidden_layers": n_layers,
            "num_attention_heads": n_heads,
            "num_key_value_heads": rng.choice([1, 2, n_heads]),
            "head_dim": head_dim,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": hidden // 2,
        }
        | MODELS[model_type]
    )


def write_model(folder: Path, raw: dict[str, Any]) -> None:
    """Write a random model with the tokenizer of bytes."""
    config = find_family(raw, "drawn").config_from_hf(raw, "drawn")
    save_model(random_model(config, 1, device=torch.device("cpu")), folder)
    tiny_tokenizer().save_pretrained(folder)


def draw_data(rng: random.Random, kind: DatasetKind, file: Path, scale: int) -> dict[str, int]:
    """Write as many rows as a step has samples; return their number, and the tokens of responses."""
    prompt, response = ((scale * low, scale * high) for low, high in ((16, 80), (4, 16)))
    sizes = {"n_seqs": rng.choice([8, 8, 16]), "prompt": rng.randint(*prompt), "response": rng.randint(*response)}
    spread = rng.choice([0, 0, 4])

    def text(length: int) -> str:
        return "".join(rng.choices(string.ascii_letters, k=max(1, length - rng.randint(0, spread))))

    rows = []
    for i in range(sizes["n_seqs"]):
        row: dict[str, Any] = {"id": str(i), "prompt": text(sizes["prompt"])}
        if kind is DatasetKind.PREFERENCE_PAIR:
            row |= {"chosen": text(sizes["response"]), "rejected": text(sizes["response"])}
        elif kind is DatasetKind.PROMPT:
            row |= {"answer": row["prompt"][: sizes["response"]]}
        else:
            row |= {"answer": text(sizes["response"]), "label": i % 2 == 0}
        rows.append(json.dumps(row))
    file.write_text("\n".join(rows))
    return sizes


def draw_settings(
    rng: random.Random,
    experiment: Experiment,
    folder: Path,
    sizes: dict[str, int],
    backends: Sequence[str],
    most_ranks: int,
) -> list[str]:
    """Return overrides that may contradict each other."""
    size = min(most_ranks, rng.choice([1, 2, 2, 3, 4, MOST_RANKS]))
    n_minibatches = rng.choice([1, 1, 2, 4])
    words = [
        f"precision={rng.choice(['fp32', 'fp32', 'bf16'])}",
        f"cluster.n_devices_per_node={size}",
        f"algorithm.n_minibatches={n_minibatches}",
        # the checkpoint of the first step may be copied after the second one has begun
        *rng.choice([["save.every_steps=0", "steps=2"], ["save.every_steps=1", "steps=3"]]),
        *rng.choice([[], [], ["n_mbs=2"], ["n_mbs=4"], [f"max_tokens_per_mb={rng.choice([256, 512])}"]]),
    ]
    if experiment.dataset is DatasetKind.PROMPT:
        n_responses = rng.choice([2, 4]) if experiment.name == "grpo" else 1
        words += [f"generation.{key}_new_tokens={sizes['response']}" for key in ("max", "min")]
        words += [f"generation.n_responses={n_responses}", f"generation.max_batch_size={rng.choice([4, 16, 64])}"]
    first = next(iter(experiment.roles))
    words.append(f"models.{first}.path={folder / 'lm'}")
    if "reward" in experiment.roles and first != "reward":
        words.append(f"models.reward.path={folder / 'scalar'}")
    for name, role in experiment.roles.items():
        if role.trainable:
            backend = rng.choice(backends)
            rules = BACKENDS[backend]
            words += [
                f"models.{name}.backend={backend}",
                f"models.{name}.optimizer.zero_stage={rng.choice(rules.stages)}",
                f"models.{name}.optimizer.offload={str(rules.offloads and rng.random() < 0.25).lower()}",
                f"models.{name}.activation_checkpointing={str(rng.random() < 0.3).lower()}",
            ]
    if rng.random() < 0.15:
        words.append(f"models.{first}.lora.rank=8")
    if size > 1:
        words.append(f"allocation.offload_frozen={str(rng.random() < 0.4).lower()}")
    mfcs = experiment.calls(compose(experiment, [word for word in words if not word.startswith("models.")]))
    return [*words, *draw_allocations(rng, [(mfc.name, mfc.role, mfc.is_train) for mfc in mfcs], Cluster(1, size))]


def draw_allocations(rng: random.Random, calls: Sequence[tuple[str, str, bool]], cluster: Cluster) -> list[str]:
    """Return an allocation for each call, of (name, role, trains); half of them where their role is trained."""
    homes: dict[str, str] = {}
    words = []
    for name, role, _ in sorted(calls, key=lambda one: not one[2]):
        if role not in homes or rng.random() < 0.5:
            mesh = rng.choice([*legal_meshes(cluster), DeviceMesh.whole(cluster)])
            place = f"{rng.choice(strategies(mesh.n_devices))}@{mesh}"
        else:
            place = homes[role]
        homes.setdefault(role, place)
        words.append(f"allocation.calls.{name}={place}")
    return words


def strategies(n_devices: int) -> list[ParallelStrategy]:
    """Return all strategies of a mesh of so many devices."""
    divisors = [n for n in range(1, n_devices + 1) if n_devices % n == 0]
    return [
        ParallelStrategy(n_devices // (tp * pp), tp, pp, sp)
        for tp in divisors
        for pp in divisors
        if n_devices % (tp * pp) == 0
        for sp in ([False, True] if tp > 1 else [False])
    ]


def kind_of(plan: RunPlan, call: str) -> str:
    """Return the kind of a call, or the name of a save."""
    return call if call == SAVE else next(mfc.interface_type.value for mfc in plan.mfcs if mfc.name == call)


@dataclass(frozen=True)
class Result:
    """The outcome of a case: a line of the file of results.

    Attributes:
        words: what the case is.
        failure: the reason why it has no counts, or "".
        seconds: time that it took.
        counts: of each call on each rank: rank, call, kind, counted and planned bytes, and the parts of the plan.
    """

    seed: int
    case: int
    words: str
    failure: str
    seconds: float
    counts: list[dict[str, Any]]

    @property
    def outside(self) -> list[dict[str, Any]]:
        """The counts that the plan does not meet.

        The plan of replicas is that of the one with the most samples; nothing says before which one that is, where
        samples cannot be dealt evenly. So the one that comes nearest to its plan counts for all, whatever else lives
        beside each of them.
        """
        lacks: dict[Any, int] = {}
        for one in self.counts:
            lack = one["planned"] - one["counted"]
            lacks[_work_of(one)] = min(lacks.get(_work_of(one), lack), lack)
        return [
            one
            for one in self.counts
            if _ratio(one) < LOWEST or one["planned"] > HIGHEST * (one["planned"] - lacks[_work_of(one)])
        ]


def run_case(seed: int, number: int, backends: Sequence[str], device: str) -> Result:
    """Draw a case and run it; a failure is a result too."""
    start_s, words, failure, counts = time.monotonic(), "", "", list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="realrl-campaign-") as folder:
        try:
            case = draw_case(seed, number, Path(folder), backends, device)
            words = case.words
            counts = [_line(case.plan, one) for one in count_run(case.plan)]
        except Exception as error:  # noqa: BLE001 - a case that fails is counted, and the others go on
            failure = "".join(traceback.format_exception(error))
    return Result(seed, number, words, failure, round(time.monotonic() - start_s, 1), counts)


def _line(plan: RunPlan, one: Counted) -> dict[str, Any]:
    parts = {name: n for name, n in vars(one.usage).items() if n}
    kind = kind_of(plan, one.call)
    return {"rank": one.rank, "call": one.call, "kind": kind, "counted": one.counted, "planned": one.planned} | parts


def _work_of(one: dict[str, Any]) -> tuple[Any, ...]:
    """Return what is planned for a call beside that which lives on the rank at all times; for a save all of it."""
    others = ("rank", "counted") if one["call"] == SAVE else ("rank", "counted", "planned", *_ALWAYS_THERE)
    return tuple((name, value) for name, value in one.items() if name not in others)


def _ratio(one: dict[str, Any]) -> float:
    return float(one["planned"] / max(1, one["counted"]))


def run_cases(options: argparse.Namespace) -> Iterator[Result]:
    """Yield the results of an earlier campaign into the same file, and then of every other case as it ends."""
    found = [Result(**json.loads(line)) for line in _lines(options.out)]
    yield from (result for result in found if result.seed == options.seed)
    done = {result.case for result in found if result.seed == options.seed}
    left = [number for number in options.only or range(options.n) if number not in done]
    with ThreadPoolExecutor(options.jobs) as pool:
        backends = options.backends.split(",")
        started = [pool.submit(run_case, options.seed, number, backends, options.device) for number in left]
        for future in as_completed(started):
            result = future.result()
            if options.out:
                with options.out.open("a") as file:
                    print(json.dumps(asdict(result)), file=file)
            yield result


def _lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path is not None and path.exists() else []


def print_table(results: Sequence[Result]) -> None:
    """Print the spread of planned over counted bytes by kind of call, and the calls at both ends."""
    ratios: dict[str, list[float]] = {}
    ends: list[tuple[float, str]] = []
    for result in results:
        for one in result.counts:
            ratios.setdefault(one["kind"], []).append(_ratio(one))
            where = f"--seed {result.seed} --only {result.case}: rank {one['rank']} {one['call']}"
            ends += [(_ratio(one), where)] if one["call"] != SAVE else []
        if result.counts:
            fullest = max(result.counts, key=lambda one: (one["planned"], one["rank"]))
            most = max(one["counted"] for one in result.counts)
            ratios.setdefault("fullest device", []).append(fullest["planned"] / most)
    for kind, values in sorted(ratios.items()):
        spread = f"{min(values):.3f} to {max(values):.3f}, median {median(values):.3f}"
        print(f"{kind:15} {len(values):6} planned / counted: {spread}")
    ends.sort()
    for ratio, where in [*ends[:_SHOWN_ENDS], *ends[-_SHOWN_ENDS:]]:
        print(f"{ratio:.3f} {where}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=500, help="cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of single cases")
    parser.add_argument("--backends", default="native")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--out", type=Path, help="file of results, one JSON line for each case")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tiny_tokenizer()  # imports what threads cannot import together
    start_s, results = time.monotonic(), list[Result]()
    for result in run_cases(options):
        results.append(result)
        if result.failure:
            print(f"case {result.case} failed: {result.words}\n{result.failure}", flush=True)
        if result.outside:
            print(f"case {result.case}: {result.words}", flush=True)
        for one in result.outside:
            counted, planned = show_bytes(one["counted"]), show_bytes(one["planned"])
            parts = {name: n for name, n in one.items() if name not in ("rank", "call", "kind", "counted", "planned")}
            told = f"{counted} lived, {planned} planned, {_ratio(one):.3f}  {parts}"
            print(f"  rank {one['rank']} {one['call']}: {told}", flush=True)
    print_table(results)
    n_wrong = sum(bool(result.failure or result.outside) for result in results)
    took = f"{time.monotonic() - start_s:.0f} s"
    print(f"{len(results)} cases, {n_wrong} out of {LOWEST} to {HIGHEST} or failed, {took}")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random command lines of `realrl plan`, for `plan_campaign.py`: equal seeds and numbers give equal ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from realrl.cli.unused import check_used
from realrl.config.compose import compose
from realrl.data.kinds import DatasetKind
from realrl.errors import ConfigError, UsageError
from realrl.experiment.declaration import Experiment
from realrl.experiment.discovery import config_dir, experiment_names, load_experiment
from realrl.experiment.planning import check_models_fit, plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy, legal_meshes
from realrl.plan.backends import BACKENDS
from realrl.profiler.hardware_files import hardware_names, named_hardware
from realrl.sim.hardware import hardware_from, hardware_mapping

SIZES = {  # hidden, layers, heads, KV heads, inner, vocabulary
    "0.1B": (576, 30, 9, 3, 1536, 49152),
    "0.5B": (896, 24, 14, 2, 4864, 151936),
    "1B": (2048, 16, 32, 8, 8192, 128256),
    "3B": (3072, 28, 24, 8, 8192, 128256),
    "7B": (4096, 32, 32, 32, 11008, 32000),
    "8B": (4096, 32, 32, 8, 14336, 128256),
    "13B": (5120, 40, 40, 40, 13824, 32000),
    "34B": (8192, 48, 64, 8, 22016, 32000),
    "70B": (8192, 80, 64, 8, 28672, 32000),
}
FAMILIES: dict[str, dict[str, Any]] = {  # model_type -> what config.json has beside the sizes
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma": {"tie_word_embeddings": True},
    "gpt2": {},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 4, "mlp_only_layers": [0]},
}
CLUSTERS = {  # (nodes, devices of each) -> weight
    (1, 1): 2, (1, 2): 5, (1, 3): 1, (1, 4): 5, (1, 6): 1, (1, 8): 8, (2, 2): 2, (2, 4): 3, (4, 1): 1, (3, 6): 1,
    (2, 8): 5, (3, 4): 1, (4, 4): 2, (3, 8): 1, (4, 8): 3, (8, 8): 2, (4, 16): 1, (16, 4): 1, (16, 8): 1,
}  # fmt: skip
OF_CPUS = ("two_cores", "two_cores_one_worker")
OWN_WEIGHT = 2  # of graphs that are drawn, against 1 for each experiment
_MOST_DRAWS = 60


@dataclass(frozen=True)
class Case:
    """A command line.

    Attributes:
        words: the experiment and overrides.
        options: those of the machine, and of lengths.
    """

    number: int
    words: tuple[str, ...]
    hardware: str
    lengths: str | None
    seed: int

    @property
    def options(self) -> tuple[str, ...]:
        lengths = () if self.lengths is None else ("--lengths", self.lengths)
        return ("--hardware", self.hardware, *lengths)


def draw_case(seed: int, number: int, folder: Path, *, most_devices: int = 128) -> Case:
    """Draw a run that is possible wherever its calls are; write models, hardware and algorithm into the folder.

    Pins may contradict each other, and the run need not fit.

    Raises:
        RuntimeError: none of many is possible.
    """
    rng, refusal = random.Random(f"{seed}/{number}"), ""
    for turn in range(_MOST_DRAWS):
        n_nodes, size = rng.choices([*CLUSTERS], [*CLUSTERS.values()])[0]
        if n_nodes * size > most_devices:
            continue
        hardware = _draw_hardware(rng, folder, n_nodes * size)
        own = rng.random() * (OWN_WEIGHT + len(experiment_names())) < OWN_WEIGHT
        path = folder / f"drawn_{seed}_{number}_{turn}.py"  # a name of its own: what was imported stays
        name = _write_algorithm(rng, path) if own else rng.choice(experiment_names())
        experiment = load_experiment(name)
        kind = named_hardware(hardware).device.kind
        words = [
            f"cluster.n_nodes={n_nodes}",
            f"cluster.n_devices_per_node={size}",
            *_draw_models(rng, experiment, folder, n_nodes * size),
            *_draw_work(rng, experiment, n_nodes * size),
            *_draw_settings(rng, experiment),
        ]
        try:
            plan = _plan_on_one(experiment, [*words, f"cluster.device={kind}"])
        except UsageError as error:
            refusal = str(error)
            continue
        if rng.random() < 0.3:
            words += _draw_pins(rng, plan)
        return Case(number, (name, *words), hardware, _draw_lengths(rng, plan), rng.randrange(1, 100))
    raise RuntimeError(f"none of {_MOST_DRAWS} runs is possible; the last one: {refusal}")


def _plan_on_one(experiment: Experiment, words: Sequence[str]) -> RunPlan:
    """Return a run with all calls on one device.

    Raises:
        UsageError: it is refused wherever its calls run.
    """
    config = compose(experiment, words, config_dir=config_dir())
    places = config.allocation.model_copy(update={"mode": "d1@0:0", "calls": {}})
    plan = plan_run(config.model_copy(update={"allocation": places}), experiment)
    check_models_fit(plan)
    check_used(words, plan)
    return plan


# ---------------------------------------------------------------- machines, models, work


def _draw_hardware(rng: random.Random, folder: Path, n_devices: int) -> str:
    """Return the name of a machine, or the file of one whose values all differ from it."""
    gpus = [name for name in hardware_names() if name not in OF_CPUS]
    name = rng.choice(OF_CPUS) if n_devices <= 4 and rng.random() < 0.2 else rng.choice(gpus)
    if rng.random() < 0.6:
        return name
    path = folder / "machine.yaml"
    while True:
        content = _changed(rng, hardware_mapping(named_hardware(name)))
        content.pop("profile", None)
        content["device"]["alone"] = 1.0
        if rng.random() < 0.5:
            content["links"]["node"]["sharing"] = rng.choice([1, 2, 4, 8])
        try:
            hardware_from(content, source=str(path))
        except ConfigError:
            continue
        path.write_text(yaml.safe_dump(content))
        return str(path)


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _changed(rng, inner) for key, inner in value.items()}
    return value * math.exp(rng.uniform(-0.7, 0.7)) if isinstance(value, float) else value


def _draw_models(rng: random.Random, experiment: Experiment, folder: Path, n_devices: int) -> list[str]:
    """Return the paths of the models, most of which are folders with a config.json alone."""
    if rng.random() < 0.15:
        return ["preset=tiny"]
    small = [*SIZES][: 4 if n_devices < 4 else 7 if n_devices < 16 else 9]
    size = rng.choice(small[max(0, len(small) - 6) :])
    family = rng.choice(["llama", *FAMILIES])
    if size in ("34B", "70B", "13B") and family in ("mixtral", "qwen3_moe", "gpt2"):
        family = "llama"
    _write_model(rng, folder / "policy", size, family)
    other = rng.choice([*SIZES][: [*SIZES].index(size) + 1])
    _write_model(rng, folder / "judge", other, "llama")
    words = []
    for name, role in experiment.roles.items():
        if role.path_from is None:
            is_judge = bool(words) and role.head != "lm"
            words.append(f"models.{name}.path={folder / ('judge' if is_judge else 'policy')}")
    return words


def _write_model(rng: random.Random, folder: Path, size: str, family: str) -> None:
    hidden, layers, heads, kv_heads, inner, vocabulary = SIZES[size]
    raw: dict[str, Any] = {"model_type": family, "vocab_size": vocabulary, "eos_token_id": 2}
    if family == "gpt2":
        raw |= {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": 8192}
    else:
        raw |= {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": rng.choice([4096, 8192, 32768]),
            "moe_intermediate_size": inner // 8,
        }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | FAMILIES[family]))


def _draw_work(rng: random.Random, experiment: Experiment, n_devices: int) -> list[str]:
    """Return lengths, samples and precision."""
    samples = [n for n in (4, 8, 16, 32, 64, 128, 256) if 2 * n >= n_devices]
    words = [
        f"n_seqs={rng.choice(samples)}",
        f"dataset.max_prompt_tokens={rng.choice([32, 128, 512, 1024, 2048])}",
        f"precision={rng.choice(['auto', 'auto', 'bf16', 'bf16', 'fp32', 'fp16'])}",
    ]
    if experiment.dataset is DatasetKind.PROMPT:
        words += [
            f"generation.max_new_tokens={rng.choice([16, 128, 512, 1024, 2048])}",
            f"generation.max_batch_size={rng.choice([8, 64, 256])}",
        ]
        if "n_responses" in experiment.defaults.get("generation", {}) and rng.random() < 0.7:  # type: ignore[operator]
            words.append(f"generation.n_responses={rng.choice([2, 4])}")
    else:
        words.append(f"dataset.max_answer_tokens={rng.choice([32, 256, 1024])}")
    if "n_minibatches" in experiment.options.model_fields:
        words.append(f"algorithm.n_minibatches={rng.choice([1, 2, 4])}")
    return words


def _draw_settings(rng: random.Random, experiment: Experiment) -> list[str]:
    """Return settings that a user may fix; they may contradict each other."""
    words: list[str] = []

    def now_and_then(share: float, *some: str) -> None:
        if rng.random() < share:
            words.extend(some)

    trained = [name for name, role in experiment.roles.items() if role.trainable]
    frozen = [name for name, role in experiment.roles.items() if not role.trainable and role.head != "none"]
    for name in trained:
        backend = rng.choice([*["native"] * 6, "megatron", "deepspeed"])
        rules = BACKENDS[backend]
        if backend != "native":
            words.append(f"models.{name}.backend={backend}")
        now_and_then(0.2, f"models.{name}.optimizer.zero_stage={rng.choice(rules.stages)}")
        now_and_then(0.1, f"models.{name}.optimizer.offload={rng.choice(['true', 'false'])}")
        now_and_then(0.2, f"models.{name}.activation_checkpointing={rng.choice(['true', 'false'])}")
        now_and_then(0.08, f"models.{name}.lora.rank=16")
    generates = experiment.dataset is DatasetKind.PROMPT
    if generates and trained:
        now_and_then(0.12, "max_staleness=1")
    if "reward_function" in experiment.options.model_fields:
        now_and_then(0.25, "algorithm.reward_function=realrl.data.tiny:toy_reward")
    now_and_then(0.1, f"n_mbs={rng.choice([1, 2, 4])}")
    now_and_then(0.08, f"max_tokens_per_mb={rng.choice([2048, 8192, 32768])}")
    now_and_then(0.08, "min_n_seqs=4")
    now_and_then(0.08, "allocation.offload_frozen=true")
    if frozen:
        now_and_then(0.08, f"allocation.offload=[{rng.choice(frozen)}]")
    now_and_then(0.1, "allocation.overlap=true")
    now_and_then(0.1, "cluster.data_plane=collective")
    now_and_then(0.1, f"cluster.device_rows_gb={rng.choice([0, 0.25, 4])}")
    now_and_then(0.1, f"cluster.device_memory_gb={rng.choice([16, 24, 64, 96])}")
    now_and_then(0.2, "save.every_steps=5")
    now_and_then(0.1, "save.at_end=false")
    now_and_then(0.1, "eval.every_steps=2")
    return words


def _draw_pins(rng: random.Random, plan: RunPlan) -> list[str]:
    """Return places of one or two calls: a strategy, or a strategy and a mesh."""
    cluster, words = plan.cluster, []
    meshes = [*legal_meshes(Cluster(min(cluster.n_nodes, 4), cluster.n_devices_per_node))]
    for mfc in rng.sample(plan.mfcs, min(len(plan.mfcs), rng.choice([1, 1, 2]))):
        ranks = rng.choice(meshes).ranks
        mesh = next(mesh for mesh in legal_meshes(cluster) if mesh.ranks == ranks)
        n = mesh.n_devices
        tp = rng.choice([t for t in (1, 2, 4, 8) if n % t == 0])
        pp = rng.choice([p for p in (1, 1, 2, 4) if n // tp % p == 0])
        strategy = ParallelStrategy(n // tp // pp, tp, pp, sp=tp > 1 and rng.random() < 0.5)
        place = str(Allocation(mesh, strategy)) if rng.random() < 0.5 else str(strategy)
        words.append(f"allocation.calls.{mfc.name}={place}")
    return words


def _draw_lengths(rng: random.Random, plan: RunPlan) -> str | None:
    config = plan.config
    prompt, response = config.dataset.max_prompt_tokens, config.generation.max_new_tokens
    if not plan.generating_roles:
        response = config.dataset.max_answer_tokens
    if rng.random() < 0.5:
        return None
    spread = {
        "fixed": f"fixed:{rng.randint(1, response)}",
        "uniform": f"uniform:1,{response}",
        "normal": f"normal:{max(1, response // 2)},{max(1, response // 8)}",
        "lognormal": f"lognormal:{max(1, response // 3)},0.7",
    }
    return f"prompt=uniform:1,{prompt} response={spread[rng.choice([*spread])]}"


# ---------------------------------------------------------------- algorithms of one's own

_ALGORITHM = '''"""A graph that was drawn."""

from realrl import DatasetKind, Experiment, InterfaceType, MFCDef, ModelName, OffloadHook, ParamReallocHook
from realrl import PolicyOptions, Role

GENERATE, INFERENCE, TRAIN_STEP = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP


def mfcs(config):
    n = config.n_seqs
    return [
{calls}
    ]


EXPERIMENT = Experiment(
    name="drawn",
    description="a graph that was drawn",
    roles={{{roles}}},
    dataset=DatasetKind.PROMPT,
    options=PolicyOptions,
    mfcs=mfcs,
)
'''
_INTERFACES = {
    "lm": ("ppo_actor", "logprobs"),
    "value": ("ppo_critic", "values"),
    "reward": ("reward_model", "rewards"),
}


def _write_algorithm(rng: random.Random, path: Path) -> str:
    """Write an experiment: one or two roles generate, others read what is there, and some train."""
    roles: dict[str, tuple[bool, str]] = {"policy": (True, "lm")}
    for name in ("second", "third", "fourth")[: rng.randint(0, 3)]:
        roles[name] = rng.random() < 0.4, rng.choice(["lm", "lm", "value", "reward"])
    lms = [name for name, (_, head) in roles.items() if head == "lm"]
    calls, keys = [], ["tokens"]
    calls.append(_call("generate", "policy", InterfaceType.GENERATE, ("prompt_ids",), "tokens", "input_ids"))
    for i, name in enumerate([*roles, *rng.sample([*roles], rng.randint(0, 1))][1:]):
        trains, head = roles[name]
        if trains and i < len(roles) - 1 and rng.random() < 0.5:
            continue
        reads = rng.sample(keys, rng.randint(1, len(keys)))
        keys.append(f"made_{i}")
        hooks = "post_hooks=(OffloadHook(),)" if not trains and rng.random() < 0.2 else ""
        calls.append(_call(f"read_{i}", name, InterfaceType.INFERENCE, reads, keys[-1], _INTERFACES[head][1], hooks))
    for name, (trains, _) in roles.items():
        if not trains:
            continue
        reads = sorted({"tokens", *rng.sample(keys, rng.randint(1, len(keys)))})
        others = [other for other in lms if other != name and not roles[other][0]]
        hooks = ""
        if name in lms and others and rng.random() < 0.4:
            hooks = f'post_hooks=(ParamReallocHook(target=ModelName("{rng.choice(others)}"), eta=0.5),)'
        calls.append(_call(f"train_{name}", name, InterfaceType.TRAIN_STEP, reads, "", "", hooks))
    interface = {name: _INTERFACES[head][0] for name, (_, head) in roles.items()}
    lines = [f"        {text}," for text in (call.replace("@", interface[role]) for role, call in calls)]
    declared = []
    for name, (trains, head) in roles.items():
        follows = 'path_from="policy"' if head == "lm" and name != "policy" else "path_from=None"
        declared.append(f'"{name}": Role(trainable={trains}, head="{head}", {follows})')
    path.write_text(_ALGORITHM.format(calls="\n".join(lines), roles=", ".join(declared)))
    return str(path)


def _call(
    name: str, role: str, kind: InterfaceType, reads: Sequence[str], key: str, given: str, hooks: str = ""
) -> tuple[str, str]:
    """Return the role, and the text of a call whose interface is yet to be filled in."""
    makes = f'("{key}",), output_key_remap={{"{given}": "{key}"}}' if key else "()"
    more = "".join(
        f", {text}" for text in (hooks, "n_minibatches=config.algorithm.n_minibatches" if not key else "") if text
    )
    return role, f'MFCDef("{name}", "{role}", {kind.name}, "@", {tuple(reads)!r}, {makes}, n_seqs=n{more})'

"""Runs drawn from all groups of keys get one verdict of `realrl run`, its --dry-run and `realrl doctor`.

Other ones, or more: ``scripts/test -m slow tests/doctor/test_drawn_verdicts.py --verdicts-seed 7 --verdicts 100``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from realrl import cli
from tests.doctor.verdicts import assert_one_verdict, verdicts
from tests.helpers.assets import edit_json, write_rows

EXPERIMENTS = ("grpo", "grpo", "ppo", "rloo", "remax", "sft", "dpo", "rw", "kto", "gen", "distill")
GROUPS: dict[str, tuple[str, ...]] = {
    "device": ("cluster.device=cpu", "cluster.device=cuda", "cluster.device=tpu", "cluster.shares_devices=true"),
    "machines": (
        "cluster.n_nodes=2",
        "cluster.n_nodes=2 launcher=external",
        "cluster.n_devices_per_node=2",
        "cluster.n_devices_per_node=0",
        "cluster=eight_workers allocation=eight_meshes",
        "launcher=external cluster.master_address=no.such.host.invalid",
    ),
    "launcher": ("launcher=inline", "launcher=local", "launcher=slurm", "launcher=inline cluster.n_devices_per_node=2"),
    "trackers": ("track=[tensorboard]", "track=[wandb]", "track=[mlflow]", "track=[tensorboard,wandb]"),
    "rewards": (
        "algorithm.reward_function=rewards.py:good",
        "algorithm.reward_function=rewards.py:with_row",
        "algorithm.reward_function=rewards.py:raises",
        "algorithm.reward_function=breaks.py:good",
        "algorithm.reward_function=exits.py:good",
        "algorithm.reward_function=math_verify",
        "algorithm.reward_function=nowhere",
        "algorithm.rewards.a.function=rewards.py:good algorithm.rewards.b.function=overlong",
        "algorithm.rewards.a.function=rewards.py:text algorithm.rewards.a.on_failure=drop",
        "algorithm.rewards.a.function=reward_model algorithm.rewards.b.function=reward_model",
    ),
    "pieces": (
        "algorithm.advantage=pieces.py:flat",
        "algorithm.advantage=pieces.py:missing",
        "algorithm.filter=equal_rewards",
        "algorithm.filter=breaks.py:good",
        "algorithm.sampler=greedyy",
        "algorithm.advantage=rloo algorithm.kl_coef=0.1",
    ),
    "models": (
        "models.actor.path=whole",
        "models.actor.path=mamba",
        "models.actor.path=moe",
        "models.actor.path=narrow",
        "models.actor.path=nameless",
        "models.actor.path=org/model",
        "models.actor.lora.rank=4 models.actor.lora.targets=[nothing]",
    ),
    "fields": (
        "dataset.path=rich.jsonl dataset.fields.prompt=question",
        "dataset.path=rich.jsonl dataset.fields.prompt=nothing",
        "dataset.path=rich.jsonl dataset.fields.prompt=deep.prompt",
        "dataset.path=rich.jsonl",
        "dataset.fields.prompt=question",
        "dataset.files.a.path=rich.jsonl dataset.files.b.path=four.jsonl dataset.files.a.weight=2",
        "dataset.files.a.path=nothing.jsonl",
        "dataset.files.a.path=four.jsonl dataset.files.a.weight=0",
        "dataset.path=[four.jsonl]",
        "dataset.path=answers.jsonl",
    ),
    "precision": ("precision=bf16", "precision=fp16", "precision=fp8"),
    "mesh": (
        "allocation=d2",
        "cluster.n_devices_per_node=2 allocation=d2",
        "cluster.n_devices_per_node=2 allocation=t2",
        "cluster.n_devices_per_node=2 allocation=d4",
        "cluster.n_devices_per_node=3 allocation=t3",
        "cluster.n_devices_per_node=2 allocation=x2",
        "cluster.n_devices_per_node=2 allocation=split",
        "cluster.n_devices_per_node=4 allocation.calls.actor_train=d2@0:1-2",
        "cluster.n_devices_per_node=2 allocation.calls.actor_train=d2t1p1@0:0-3",
        "cluster.n_devices_per_node=2 allocation.calls.actor_train=@",
        "cluster.n_devices_per_node=2 allocation.calls.nothing=d2@0:0-1",
    ),
    "fuse": (
        "allocation.fuse=[actor_train,critic_train]",
        "cluster.n_devices_per_node=2 allocation=p2 allocation.fuse=[actor_train,critic_train]",
        "allocation.fuse=[actor_train]",
        "allocation.fuse=[actor_train,nothing]",
        "allocation.offload=[actor]",
        "allocation.offload=[nobody]",
    ),
    "virtual stages": (
        "calls.actor_train.virtual_stages=2",
        "cluster.n_devices_per_node=2 allocation=p2 calls.actor_train.virtual_stages=2",
        "cluster.n_devices_per_node=2 allocation=p2v9",
        "cluster.n_devices_per_node=2 allocation=p2v2 n_mbs=3",
    ),
    "plan": ("plan=plan.yaml cluster.n_devices_per_node=2", "plan=plan.yaml", "plan=torn.yaml", "plan=nothing.yaml"),
    "hardware": (
        "cluster.hardware=two_cores",
        "cluster.hardware=h100",
        "cluster.hardware=h200x",
        "cluster.hardware=torn.yaml",
        "cluster.device_memory_gb=0.000001",
        "cluster.device_memory_gb=0.5 cluster.n_devices_per_node=2 allocation=heuristic",
    ),
    "staleness": (
        "max_staleness=1",
        "max_staleness=-1",
        "max_staleness=1 cluster.n_devices_per_node=2 allocation=split",
        "min_n_seqs=4",
        "min_n_seqs=9",
        "calls.actor_gen.max_staleness=2",
        "calls.actor_train.max_staleness=1",
    ),
    "folder": (
        "run_dir=/proc/x",
        "run_dir=/proc/x/y resume=auto",
        "run_dir=earlier",
        "run_dir=busy",
        "run_dir=blocked",
        "run_dir=rewards.py",
        "run_dir=new save.every_steps=1 save.keep_best=reward/mean",
        "resume=auto",
    ),
    "evaluation": (
        "eval.every_steps=2",
        "eval.every_steps=2 eval.path=four.jsonl eval.n_responses=4",
        "eval.every_steps=2 eval.path=torn.jsonl",
        "eval.only=true",
    ),
    "work": ("n_mbs=2", "n_seqs=1", "n_seqs=0", "epochs=1", "algorithm.n_minibatches=16", "generation.stop_ids=[-1]"),
    "backend": (
        "models.actor.backend=deepspeed",
        "models.actor.backend=megatron cluster.n_devices_per_node=2",
        "models.actor.backend=nothing",
        "models.*.optimizer.zero_stage=1 cluster.n_devices_per_node=2",
    ),
}
PLANNED = ("grpo", "preset=tiny", "n_seqs=8", "cluster.n_devices_per_node=2")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plans") / "plan.yaml"
    assert cli.main(["plan", *PLANNED, "--hardware", "two_cores", "--out", str(file)]) == 0
    return file


@pytest.fixture
def place(workplace: Path, plan: Path) -> Path:
    """The folder with files that the groups name, besides those of `workplace`."""
    for name, changes in {
        "moe": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2},
        "narrow": {"vocab_size": 7},
        "nameless": {"architectures": None, "model_type": None},
    }.items():
        Path(name).mkdir()
        for file in Path("whole").iterdir():
            Path(name, file.name).write_bytes(file.read_bytes())
        edit_json(Path(name, "config.json"), **changes)
    more = {"answer": "4", "chosen": "4", "rejected": "5", "label": True, "deep": {"prompt": "3 + 3 ="}}
    write_rows(Path("rich.jsonl"), [{"question": f"{i} + 2 =", "prompt": f"{i} + 1 =", **more} for i in range(20)])
    Path("pieces.py").write_text("def flat(rollout):\n    return rollout.per_transition(rollout.scores)\n")
    Path("plan.yaml").write_bytes(plan.read_bytes())
    Path("torn.yaml").write_text("{cluster: [")
    return workplace


def drawn(seed: str) -> tuple[str, list[str]]:
    """Return an experiment, and settings of up to four groups that do not speak of the same key."""
    rng = random.Random(seed)
    chosen, keys = [], set[str]()
    for group in rng.sample(sorted(GROUPS), rng.choice((1, 2, 3, 4))):
        settings = rng.choice(GROUPS[group]).split()
        if keys.isdisjoint(setting.partition("=")[0] for setting in settings):
            keys |= {setting.partition("=")[0] for setting in settings}
            chosen += settings
    return rng.choice(EXPERIMENTS), chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "draw" in metafunc.fixturenames:
        seed, n = metafunc.config.getoption("--verdicts-seed"), metafunc.config.getoption("--verdicts")
        metafunc.parametrize("draw", [f"{seed}/{i}" for i in range(n)])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_drawn_runs_get_one_verdict(draw: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name, settings = drawn(draw)
    if "n_seqs" not in " ".join(settings):
        settings.append("n_seqs=8")
    assert_one_verdict(verdicts(capfd, settings, base=(name, "preset=tiny")))


@pytest.mark.parametrize("folder", ["/proc/x", "/proc/x/y"])
def test_a_folder_that_cannot_be_made(folder: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = verdicts(capfd, [f"run_dir={folder}"])
    assert_one_verdict(said, is_refused=True)
    told = f"realrl: error: run_dir={folder}: it cannot be made: No such file or directory; give another folder"
    assert said["run"][2].startswith(told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("seed=1,2", "run_dir=/proc/x"),
        ("seed=1,2", "algorithm.reward_function=nowhere.py:good"),
        ("lr=1e-4,nothing",),
        ("lr=1e-4,1e-3", "cluster.device=cuda"),
        ("track=[wandb],[]",),
        ("seed=1,2", "models.actor.path=mamba"),
    ],
)
def test_sweeps_that_are_refused_get_one_verdict(
    settings: Sequence[str], place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Callable[[], None]] = []
    monkeypatch.setattr("realrl.cli.sweep.command.Jobs.run", lambda *_: started)
    said = []
    for more in ((), ("--dry-run",)):
        code = cli.main(["run", "grpo", "preset=tiny", "n_seqs=8", *settings, "--sweep", *more])
        said.append((code, capfd.readouterr().err))
    assert said[0] == said[1]
    assert said[0][0] == 2

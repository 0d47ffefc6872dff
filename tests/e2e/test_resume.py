"""A run that continues from a checkpoint ends with the bits of the uninterrupted one: weights, metrics, responses."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from realrl.cli import main
from realrl.config.compose import compose
from realrl.errors import ConfigError
from realrl.experiment.backends import check_backends, check_installed
from realrl.experiment.discovery import config_dir, list_experiments, load_experiment
from realrl.experiment.planning import plan_run
from tests.helpers.live import LiveRun, wait_until
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import NOISE, SMALL, assert_same_numbers, read_metrics

STEPS = 8
COMMON = ("preset=tiny", "n_seqs=4", "launcher=inline", "save.every_steps=1")
NO_GENERATION = ("dpo", "kto", "rw", "sft")
TRAINING = [e.name for e in list_experiments() if e.name != "gen"]
SHORT = ("steps=3", "save.keep=3")


def run(folder: Path, experiment: str, *overrides: str) -> Path:
    brief = () if experiment in NO_GENERATION else ("generation.max_new_tokens=5",)
    assert main(["run", experiment, *COMMON, *brief, *overrides, f"run_dir={folder}"]) == 0
    return folder


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """All metrics but times, rates and sizes."""
    return [{name: value for name, value in row.items() if not name.startswith(NOISE)} for row in read_metrics(run_dir)]


def assert_same_checkpoint(ours: Path, theirs: Path) -> None:
    """Two checkpoints hold the same files with the same bytes, and the same in flight but for what was measured."""
    for folder in (ours, theirs):
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert manifest_of(folder)["files"].keys() == names - {"state/manifest.json"}
    assert manifest_of(ours) == manifest_of(theirs)


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """The manifest, with the digest of every file, without times and sizes."""
    manifest: dict[str, Any] = json.loads((checkpoint / "state/manifest.json").read_text())
    del manifest["digest"]  # of times too
    for record in manifest["in_flight"]["calls"]:
        for name in ("seconds", "realloc_wait_s", "memory_gb", "bytes_received"):
            del record[name]
        record["metrics"] = {name: x for name, x in record["metrics"].items() if not name.startswith(NOISE)}
    return manifest


def check_resumes(tmp_path: Path, experiment: str, steps: list[int], *overrides: str, last: int) -> None:
    """Continue a run from its checkpoints after `steps`, and compare with what it did itself."""
    whole = run(tmp_path / "whole", experiment, *overrides)
    for step in steps:
        again = run(tmp_path / f"from {step}", experiment, *overrides, f"resume={whole}/checkpoints/step_{step}")
        assert numbers(again) == numbers(whole)[step:]
        if (whole / "generations.jsonl").exists():
            lines = (whole / "generations.jsonl").read_text().splitlines()
            expected = [line for line in lines if json.loads(line)["step"] > step]
            assert (again / "generations.jsonl").read_text().splitlines() == expected
        for later in range(step + 1, last + 1):
            assert_same_checkpoint(again / f"checkpoints/step_{later}", whole / f"checkpoints/step_{later}")
        shutil.rmtree(again)


@pytest.mark.parametrize("experiment", ["ppo_ref_ema", "dpo"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, experiment: str) -> None:
    check_resumes(tmp_path, experiment, [1], *SHORT, last=3)


def test_passes_continue_with_the_same_bits(tmp_path: Path) -> None:
    """Each pass of each step draws its minibatches anew; the schedule ends with the last of them."""
    schedule = ("schedule=linear", "warmup_fraction=0", "min_lr_fraction=0.25", "lr=0.004")
    optimizer = [f"models.actor.optimizer.{setting}" for setting in schedule]
    passes = ("algorithm.ppo_epochs=2", "algorithm.n_minibatches=2")
    check_resumes(tmp_path, "ppo", [1], *SHORT, *passes, *optimizer, last=3)
    last_of_12 = 0.004 * (1.0 - 0.75 * 11 / 12)
    assert read_metrics(tmp_path / "whole")[-1]["actor/lr"] == pytest.approx(last_of_12)


BACKENDS = {
    "native 1": ("backend=native", "optimizer.zero_stage=1"),
    "native offloaded": ("backend=native", "optimizer.offload=true"),
    "megatron": ("backend=megatron",),
    **{f"deepspeed {stage}": ("backend=deepspeed", f"optimizer.zero_stage={stage}") for stage in range(4)},
    "deepspeed 2 offloaded": ("backend=deepspeed", "optimizer.zero_stage=2", "optimizer.offload=true"),
}


def with_backends(experiment: str, overrides: tuple[str, ...], **backends: str) -> tuple[str, ...]:
    """The overrides with keys that give roles one of `BACKENDS`; `default` is for trained roles that are not named.

    Skips the test where that is refused, or a package is missing.
    """
    declared = load_experiment(experiment)
    roles = plan_run(compose(declared, [*COMMON, *overrides], config_dir=config_dir()), declared).roles
    chosen = {name: backends.get(name, backends.get("default", "")) for name, role in roles.items() if role.trainable}
    keys = [f"models.{name}.{setting}" for name, backend in chosen.items() for setting in BACKENDS.get(backend, ())]
    plan = plan_run(compose(declared, [*COMMON, *overrides, *keys], config_dir=config_dir()), declared)
    try:
        check_backends(plan)
        check_installed(plan)
    except ConfigError as refusal:
        pytest.skip(refusal.message)
    return (*overrides, *keys)


@pytest.mark.slow
def test_backends_continue_with_the_same_bits(tmp_path: Path) -> None:
    overrides = with_backends("ppo", SHORT, actor="megatron", critic="deepspeed 2")
    check_resumes(tmp_path, "ppo", [1], *overrides, last=3)


DEVICES = ("cluster.n_devices_per_node=2", "launcher=local", "algorithm.n_minibatches=2")
SWEEP = [
    *((experiment, backend, ()) for experiment in TRAINING for backend in BACKENDS),
    *(("ppo", backend, (*DEVICES, f"allocation={plan}")) for backend in BACKENDS for plan in ("d2", "t2", "p2")),
    *(("ppo", backend, (f"precision={dtype}",)) for backend in BACKENDS for dtype in ("bf16", "fp16")),
    *(
        ("ppo", backend, (*DEVICES, f"allocation={plan}", f"precision={dtype}"))
        for backend in BACKENDS
        for plan in ("d2", "t2", "p2")
        for dtype in ("bf16", "fp16")
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("experiment", "backend", "settings"),
    SWEEP,
    ids=lambda value: " ".join(value[2:] if isinstance(value, tuple) else [value]),
)
def test_every_experiment_with_every_backend(
    tmp_path: Path, experiment: str, backend: str, settings: tuple[str, ...]
) -> None:
    """After every step on one device; in processes, which take long to start, after the first and the last but one.

    Each case has a process of its own: megatron-core and DeepSpeed tie parameters and gradient hooks into knots that
    Python cannot collect.
    """
    overrides = (f"steps={STEPS}", f"save.keep={STEPS}", *settings)
    steps = [1, STEPS - 1] if DEVICES[0] in settings else list(range(1, STEPS))
    overrides = with_backends(experiment, overrides, default=backend)
    run_ranks(1, _check_resumes, tmp_path, experiment, steps, overrides, joined=False, timeout_s=1700.0)


def _check_resumes(rank: int, n_ranks: int, folder: Path, experiment: str, steps: list[int], overrides: Any) -> None:
    check_resumes(folder, experiment, steps, *overrides, last=STEPS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("experiment", TRAINING)
def test_every_experiment_after_every_step(tmp_path: Path, experiment: str) -> None:
    overrides = (f"steps={STEPS}", f"save.keep={STEPS}")
    check_resumes(tmp_path, experiment, list(range(1, STEPS)), *overrides, last=STEPS)


def test_samples_in_flight(tmp_path: Path) -> None:
    overrides = ("steps=5", "save.keep=5", "max_staleness=2")
    check_resumes(tmp_path, "grpo", [3], *overrides, "generation.n_responses=2", last=5)
    manifest = manifest_of(tmp_path / "whole/checkpoints/step_1")
    ahead = {(record["call"], record["step"], record["version"]) for record in manifest["in_flight"]["calls"]}
    assert {("actor_gen", 2, 0), ("actor_gen", 3, 0)} <= ahead
    assert "state/samples-0.safetensors" in manifest["files"]
    held = load_file(tmp_path / "whole/checkpoints/step_1/state/samples-0.safetensors")
    assert held["input_ids/data"].numel() > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_samples_in_flight_on_two_meshes(tmp_path: Path) -> None:
    places = ("cluster.n_devices_per_node=2", "allocation=split", "launcher=local")
    overrides = ("steps=5", "save.keep=5", "max_staleness=2", "generation.n_responses=2", *places)
    whole = run(tmp_path / "whole", "grpo", *overrides)
    for step in (1, 3):
        again = run(tmp_path / f"{step}", "grpo", *overrides, f"resume={whole}/checkpoints/step_{step}")
        assert numbers(again) == numbers(whole)[step:]
        for path in (whole / "checkpoints/step_5").rglob("*.safetensors"):
            other = again / "checkpoints/step_5" / path.relative_to(whole / "checkpoints/step_5")
            assert path.read_bytes() == other.read_bytes(), path


def test_across_an_epoch_boundary(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"P{i}:", "answer": "ab"}) + "\n" for i in range(6)))
    overrides = (
        "steps=5",
        "save.keep=5",
        f"dataset.path={data}",
        "algorithm.reward_function=realrl.data.tiny:toy_reward",
    )
    check_resumes(tmp_path, "grpo", [1, 3], *overrides, "generation.n_responses=2", last=5)
    assert [row["epoch"] for row in numbers(tmp_path / "whole")] == [1, 2, 2, 3, 4]


def test_dropped_and_replaced_samples(tmp_path: Path) -> None:
    experiment = str(Path(__file__).parent / "rejection_sampling.py")
    overrides = ("steps=4", "save.keep=4", "algorithm.keep=128", "models.actor.optimizer.lr=0.01")
    check_resumes(tmp_path, experiment, [2], *overrides, last=4)
    assert sum(row["dropped/judge"] for row in numbers(tmp_path / "whole")) > 0
    stale = ("max_staleness=1", "steps=3", "save.keep=3")
    check_resumes(tmp_path / "stale", experiment, [1], *overrides, *stale, last=3)


def test_adapters_and_bf16(tmp_path: Path) -> None:
    overrides = ("models.actor.lora.rank=2", "precision=bf16", "generation.n_responses=2")
    check_resumes(tmp_path, "grpo", [1], *SHORT, *overrides, last=3)


PLANS = {
    "d2": ("cluster.n_devices_per_node=2", "allocation=d2"),
    "t2": ("cluster.n_devices_per_node=2", "allocation=t2"),
    "p2": ("cluster.n_devices_per_node=2", "allocation=p2"),
    "t2p2": ("cluster.n_devices_per_node=4", "allocation=t2p2"),
    "zero": ("cluster.n_devices_per_node=2", "allocation=d2", "models.actor.optimizer.zero_stage=1"),
    "split": ("cluster.n_devices_per_node=2", "allocation=split"),
    "": (),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param("", "t2"),
        pytest.param("t2", "p2", marks=pytest.mark.slow),
        pytest.param("p2", "d2", marks=pytest.mark.slow),
        pytest.param("t2p2", "", marks=pytest.mark.slow),
        pytest.param("d2", "t2p2", marks=pytest.mark.slow),
        pytest.param("split", "t2", marks=pytest.mark.slow),
        pytest.param("zero", "p2", marks=pytest.mark.slow),
    ],
)
def test_under_another_plan(tmp_path: Path, saved: str, resumed: str) -> None:
    """Within 1e-5, over two steps of PPO after the resume."""
    overrides = ("steps=3", "save.keep=3", "algorithm.n_minibatches=2")
    whole, again = (
        run(tmp_path / name, "ppo", *overrides, *PLANS[plan], f"launcher={'local' if plan else 'inline'}", *more)
        for name, plan, more in (
            ("whole", saved, ()),
            ("again", resumed, (f"resume={tmp_path / 'whole'}/checkpoints/step_1",)),
        )
    )
    assert_same_numbers(read_metrics(whole)[1:], read_metrics(again), rel=1e-5, floor=1e-6)
    assert_same_weights(again, whole, "step_3")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(4))
def test_under_other_plans_and_backends(tmp_path: Path, first: int) -> None:
    """Within 1e-5 of a run that keeps to one device and native, over four steps that each have a plan of their own."""
    legs = [("d2", "deepspeed 3"), ("t2", "megatron"), ("p2", "native 1"), ("d2", "deepspeed 1")]
    legs = legs[first:] + legs[:first]
    overrides = ("steps=4", "save.keep=4", "algorithm.n_minibatches=2")
    whole = run(tmp_path / "whole", "ppo", *overrides)
    resume: tuple[str, ...] = ()
    for step, (plan, backend) in enumerate(legs, start=1):
        here = with_backends("ppo", (*overrides, "launcher=local", *PLANS[plan]), default=backend)
        leg = run(tmp_path / f"leg {step}", "ppo", *here, *resume)
        resume = (f"resume={leg}/checkpoints/step_{step}",)
        assert_same_numbers(read_metrics(whole)[step - 1 :], read_metrics(leg), rel=1e-5, floor=1e-6)
    assert_same_weights(leg, whole, "step_4")


def assert_same_weights(ours: Path, theirs: Path, checkpoint: str) -> None:
    """Actor and critic are within 1e-5."""
    for role in ("actor", "critic"):
        here, there = (load_model_files(folder / "checkpoints" / checkpoint / role) for folder in (ours, theirs))
        assert here.keys() == there.keys()
        for name, tensor in there.items():
            assert (here[name] - tensor).abs().max() < 1e-5, name


def load_model_files(folder: Path) -> dict[str, Any]:
    return {name: t for file in folder.glob("model*.safetensors") for name, t in load_file(file).items()}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(tmp_path / "whole", "sft", "steps=1")
    latest = f"resume={whole}/checkpoints/latest"
    assert main(["run", "sft", *COMMON, "steps=2", latest, "models.actor.lora.rank=2"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "state/manifest.json: the checkpoint was written with another model of role 'actor'" in message


def test_auto_falls_back_from_a_torn_checkpoint_and_a_path_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(tmp_path / "whole", "sft", "steps=2", "save.keep=2")
    weights = whole / "checkpoints/step_2/actor/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    overrides = (*COMMON, "steps=3", f"run_dir={whole}")
    assert main(["run", "sft", *overrides, f"resume={whole}/checkpoints/step_2"]) == 2
    assert "step_2/actor/model.safetensors is not what was written" in " ".join(capsys.readouterr().err.split())
    assert main(["run", "sft", *overrides, "--dry-run"]) == 2
    assert "holds the results of an earlier run" in capsys.readouterr().err
    assert main(["run", "sft", *overrides, "resume=auto", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "model.safetensors is not what was written" in told
    assert f"continues from {whole}/checkpoints/step_1" in told
    assert main(["run", "sft", *overrides, "resume=auto"]) == 0
    told = capsys.readouterr().out
    assert "model.safetensors is not what was written" in told
    assert "step_1, the newest whole checkpoint" in told
    assert [row["step"] for row in read_metrics(whole)] == [1, 2, 3]


def test_seconds_and_epochs(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"P{i}:", "answer": "ab"}) + "\n" for i in range(6)))
    by_epoch = ("steps=8", "save.every_steps=0", "save.every_epochs=2", "save.at_end=false", "save.keep=9")
    folder = run(tmp_path / "a", "sft", *by_epoch, f"dataset.path={rows}")
    assert sorted(p.name for p in (folder / "checkpoints").glob("step_*")) == ["step_3", "step_6"]
    by_time = ("steps=60", "save.every_steps=0", "save.every_s=0.001", "save.at_end=false", "save.keep=2")
    folder = run(tmp_path / "b", "sft", *by_time)
    assert len(list((folder / "checkpoints").glob("step_*"))) >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["worker 1", "master"])
def test_killed_while_parameters_visit(start: Callable[..., LiveRun], tmp_path: Path, who: str) -> None:
    """Saves fall where they may: between steps, while generation in a layout of its own is a step ahead."""
    layouts = ("cluster.n_devices_per_node=2", "allocation=t2", "allocation.calls.actor_gen=d2")
    saves = ("steps=12", "save.every_steps=0", "save.every_s=0.05", "save.keep=12")
    overrides = (*layouts, *saves, "max_staleness=1", "generation.n_responses=2")
    assert main(["run", "grpo", *SMALL, *overrides, f"run_dir={tmp_path / 'whole'}"]) == 0
    killed = start(*overrides, experiment="grpo")
    killed.wait_for("step")
    wait_until(lambda: any(killed.checkpoints.glob("step_*")), "a checkpoint")
    os.kill(killed.pid(who), signal.SIGKILL)
    assert killed.end() == 1
    saved = max(int(folder.name.removeprefix("step_")) for folder in killed.checkpoints.glob("step_*"))
    assert saved < 12
    ahead = manifest_of(killed.checkpoints / f"step_{saved}")["in_flight"]["calls"]
    assert ("actor_gen", saved + 1) in {(record["call"], record["step"]) for record in ahead}
    assert main(["run", "grpo", *SMALL, *overrides, f"run_dir={killed.run_dir}", "resume=auto"]) == 0
    assert numbers(killed.run_dir) == numbers(tmp_path / "whole")
    assert_same_checkpoint(killed.checkpoints / "step_12", tmp_path / "whole/checkpoints/step_12")

"""One verdict: `realrl run`, its --dry-run and `realrl doctor` refuse the same runs, in the same words."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from realrl import cli
from tests.doctor.verdicts import BASE, assert_one_verdict, verdicts
from tests.helpers.runs import realrl

TROUBLES = {
    "CUDA": "cluster.device=cuda",
    "two nodes": "cluster.n_nodes=2",
    "no such hardware": "cluster.hardware=nothing",
    "wandb": "track=[wandb]",
    "no reward file": "algorithm.reward_function=nowhere.py:good",
    "no such reward": "algorithm.reward_function=rewards.py:goood",
    "reward raises at import": "algorithm.reward_function=breaks.py:good",
    "reward needs a module": "algorithm.reward_function=needs.py:good",
    "reward exits": "algorithm.reward_function=exits.py:good",
    "reward raises": "algorithm.reward_function=rewards.py:raises",
    "reward is nan": "algorithm.reward_function=rewards.py:nan",
    "reward is text": "algorithm.reward_function=rewards.py:text",
    "no judge": "algorithm.reward_function=null,dataset.path=four.jsonl",
    "mamba": "models.actor.path=mamba",
    "torn weights": "models.actor.path=torn",
    "another model's weights": "models.actor.path=wide",
    "no weights": "models.actor.path=bare",
    "no tokenizer": "models.actor.path=mute",
    "no model": "models.actor.path=nothing",
    "no data": "dataset.path=nothing.jsonl",
    "torn data": "dataset.path=torn.jsonl",
    "no prompts": "dataset.path=answers.jsonl",
    "long prompts": "dataset.path=long.jsonl",
    "one epoch of four rows": "dataset.path=four.jsonl,epochs=1",
    "held-out data": "eval.every_steps=1,eval.path=torn.jsonl",
    "stop ids": "generation.stop_ids=[300]",
    "long responses": "generation.max_new_tokens=1024",
    "long with prompts": "generation.max_new_tokens=1020",
    "short prompts only": "dataset.max_prompt_tokens=2",
    "too many shards": "cluster.n_devices_per_node=8,allocation=p8",
    "taken port": "cluster.master_port=PORT",
    "earlier run": "run_dir=earlier",
    "busy folder": "run_dir=busy,resume=auto",
    "no folder": "run_dir=rewards.py/x",
    "checkpoints cannot be": "run_dir=blocked",
    "no checkpoint": "resume=whole",
}
HARMLESS = (
    "cluster.n_devices_per_node=2",
    "cluster.n_devices_per_node=2,allocation=split",
    "launcher=inline",
    "seed=3",
    "precision=bf16",
    "eval.every_steps=1",
    "save.every_steps=1",
    "run_dir=new",
    "resume=auto,run_dir=new",
    "models.actor.path=whole",
    "models.actor.lora.rank=2",
    "dataset.path=four.jsonl",
    "algorithm.reward_function=rewards.py:good",
    "algorithm.reward_function=rewards.py:with_row",
    "algorithm.reward_function=rewards.py:raises,algorithm.reward_on_failure=zero",
    "dataset.chat_template=true",
    "track=[tensorboard]",
    "models.actor.backend=deepspeed",
)


def drawn(seed: int) -> tuple[list[str], bool]:
    """Return settings with up to two troubles and three harmless ones, and True if there is a trouble."""
    rng = random.Random(seed)
    troubles = rng.sample(sorted(TROUBLES.values()), rng.choice((0, 1, 1, 2)))
    chosen, keys = [], set[str]()
    for one in [*troubles, *rng.sample(HARMLESS, 3)]:
        settings = one.split(",")
        if keys.isdisjoint(setting.partition("=")[0] for setting in settings):
            keys |= {setting.partition("=")[0] for setting in settings}
            chosen += settings
    return chosen, bool(troubles)


QUICK = (
    "CUDA",
    "wandb",
    "no such reward",
    "reward raises at import",
    "no judge",
    "mamba",
    "another model's weights",
    "torn data",
    "earlier run",
)


@pytest.mark.parametrize(
    "trouble", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TROUBLES]
)
def test_every_trouble_is_refused_by_all(
    trouble: str, workplace: Path, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = TROUBLES[trouble].replace("PORT", str(port)).split(",")
    assert_one_verdict(verdicts(capfd, settings), is_refused=True)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
def test_random_combinations_get_one_verdict(
    seed: int, workplace: Path, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    settings, is_refused = drawn(seed)
    settings = [setting.replace("PORT", str(port)) for setting in settings]
    assert_one_verdict(verdicts(capfd, settings), is_refused=True if is_refused else None)


def test_rows_that_repeat_within_a_step_are_told_by_all(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = verdicts(capfd, ["dataset.path=four.jsonl"])
    assert_one_verdict(said, is_refused=False)
    told = "a step takes 8 samples, so that each row comes up to 2 times in it"
    assert [told in out + err for _, out, err in said.values()] == [True] * 3
    assert said["run"][2].startswith("realrl: warning: dataset: dataset.path=four.jsonl: 4 rows, 0 dropped")


def test_what_is_missing_is_named_first(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["run", "grpo"], ["run", "grpo", "--dry-run"], ["doctor", "grpo"], ["run", "rw", "n_seqs=4"]):
        assert cli.main(command) == 2
        asked = f"realrl: error: experiment '{command[1]}' was given neither a model nor data\n  Add preset=tiny"
        assert capfd.readouterr().err.startswith(asked)
    own = ("models.actor.path=whole", "dataset.path=four.jsonl")
    assert cli.main(["run", "grpo", *own]) == 2
    error = capfd.readouterr().err
    assert error.startswith("realrl: error: experiment 'grpo' has no reward: algorithm.reward_function is not set")
    assert "Give algorithm.reward_function=FILE.py:FUNCTION" in error
    assert "tokenizer" not in error
    assert cli.main(["run", "safe_rlhf", *own, "algorithm.reward_function=rewards.py:good"]) == 2
    assert "has no cost: algorithm.cost_function is not set" in capfd.readouterr().err
    assert cli.main(["run", "gen", *own, "--dry-run"]) == 0


def test_all_problems_are_listed_with_their_remedies(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *BASE, "cluster.device=cuda", "track=[wandb]", "dataset.path=torn.jsonl"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "realrl: error: 3 things stand in the way of this run:"
    assert lines[1:] == [
        "  packages: not installed, but needed: wandb",
        "    pip install 'realrl[track]'",
        "  devices: worker 0 of this node needs a CUDA device of its own, the node has 0",
        "    Use cluster.device=cpu, or a smaller cluster.n_devices_per_node.",
        *lines[5:],
    ]
    assert lines[5].startswith("  dataset: torn.jsonl, line 2 is not JSON")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (("algorithm.reward_function=rewards.py:good", "dataset.path=four.jsonl"), 0),
        (("models.actor.path=whole", "cluster.n_devices_per_node=2"), 0),
        (("algorithm.reward_function=breaks.py:good",), 2),
        (("cluster.device=cuda",), 2),
        (("models.actor.path=mamba",), 2),
        (("track=[wandb]",), 2),
    ],
)
def test_real_commands_get_one_verdict(settings: tuple[str, ...], code: int, workplace: Path) -> None:
    commands = (("doctor", ["--no-models"]), ("run", ["--dry-run"]), ("run", []))
    done = [realrl(name, *BASE, "steps=1", *settings, *more) for name, more in commands]
    assert [one.returncode for one in done] == [code] * 3, [one.stderr for one in done]

"""Rewards in whole runs: several at once, with the dataset's fields, and samples that are dropped and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from realrl import cli
from tests.helpers.assets import make_model_folder, write_rows
from tests.helpers.runs import SMALL, read_metrics, run_here

REWARDS = """
import asyncio

async def bonus(prompt, response, row):
    await asyncio.sleep(0.001)
    return row["bonus"]

def lengths(prompt_ids, responses_ids):
    return [len(ids) for ids in responses_ids]

def picky(prompt, response, row):
    if row["bonus"] == 0.5:
        raise ValueError("no such prompt, please")
    return row["bonus"]
"""
PARTS = (
    "algorithm.reward_function=null",
    "algorithm.rewards.bonus=rewards.py:bonus",
    "algorithm.rewards.length={function: rewards.py:lengths, weight: 0.1}",
    "algorithm.rewards.long={function: overlong, weight: 0.5, options: {cache_tokens: 6}}",
)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    write_rows(tmp_path / "data.jsonl", [{"prompt": f"WORD {i}:", "bonus": (1 + i % 4) / 4} for i in range(16)])
    return tmp_path


def test_several_rewards_add_up_and_are_logged(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = ("launcher=inline", "dataset.path=data.jsonl", "generation.min_new_tokens=6", "run_dir=run")
    assert cli.main(["run", "ppo", *SMALL, "steps=1", *overrides, *PARTS]) == 0
    [metrics] = read_metrics(workplace / "run")
    assert metrics["reward/length/mean"] == 6.0
    assert metrics["reward/length/std"] == 0.0
    assert metrics["reward/long/mean"] == -1.0
    assert 0.25 < metrics["reward/bonus/mean"] < 1.0
    assert metrics["reward/bonus/std"] > 0.0
    total = metrics["reward/bonus/mean"] + 0.1 * 6.0 - 0.5
    assert metrics["reward/mean"] == pytest.approx(total, rel=1e-6)


def test_a_model_and_a_function_in_one_graph(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts = ("algorithm.reward_function=null", "algorithm.rewards={judge: reward_model, bonus: 'rewards.py:bonus'}")
    overrides = ("launcher=inline", "dataset.path=data.jsonl", "run_dir=run")
    assert cli.main(["run", "ppo", *SMALL, "steps=1", *overrides, *parts]) == 2
    assert "models.reward.path=tiny is a model of random numbers, for the toy task alone" in capfd.readouterr().err
    judge = make_model_folder(workplace / "judge", "reward")
    assert cli.main(["run", "ppo", *SMALL, "steps=1", *overrides, *parts, f"models.reward.path={judge}"]) == 0
    [metrics] = read_metrics(workplace / "run")
    total = metrics["reward/judge/mean"] + metrics["reward/bonus/mean"]
    assert metrics["reward/mean"] == pytest.approx(total, rel=1e-5)
    assert "time_s/scorer_inf" in metrics


@pytest.mark.slow
def test_samples_whose_reward_fails_are_replaced(workplace: Path) -> None:
    """On two workers."""
    overrides = ("cluster.n_devices_per_node=2", "dataset.path=data.jsonl", "run_dir=run", "steps=1")
    parts = ("algorithm.reward_function=rewards.py:picky", "algorithm.reward_on_failure=drop")
    run_here("run", "ppo", *SMALL, *overrides, *parts)
    [metrics] = read_metrics(workplace / "run")
    assert metrics["n_samples"] == 8
    assert metrics["dropped/rew_inf"] >= 1
    assert 0.0 < metrics["reward/failed"] < 1.0
    logs = "".join(path.read_text() for path in (workplace / "run" / "logs").iterdir())
    assert "rew_inf at step 1 drops sample '1/" in logs
    assert "ValueError: no such prompt, please" in logs

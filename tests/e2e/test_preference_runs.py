"""dpo, kto and gen on the toy task, start to end in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realrl.cli import main
from tests.helpers.runs import read_metrics

TINY = ("preset=tiny", "launcher=inline")


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_preferences_are_learnt(name: str, tmp_path: Path) -> None:
    """From log 2 and 0.5, where policy and reference are one, downwards; the margin opens."""
    assert main(["run", name, *TINY, "steps=4", "n_seqs=16", f"run_dir={tmp_path / 'run'}"]) == 0
    rows = read_metrics(tmp_path / "run")
    assert rows[0]["actor/loss"] == pytest.approx({"dpo": 0.693147, "kto": 0.5}[name], abs=1e-5)
    assert rows[0]["actor/margin"] == pytest.approx(0.0, abs=1e-5)
    assert rows[-1]["actor/loss"] < 0.9 * rows[0]["actor/loss"]
    assert rows[-1]["actor/margin"] > 0.2


def test_gen_answers_a_file_of_prompts_once(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}:"}) + "\n" for i in range(6)))
    reward = "algorithm.reward_function=realrl.data.tiny:toy_reward"
    limits = ("n_seqs=3", "generation.max_new_tokens=4", "generation.n_responses=2", "launcher=inline")
    run_dir = tmp_path / "run"
    assert main(["run", "gen", f"dataset.path={prompts}", *limits, reward, f"run_dir={run_dir}"]) == 0
    rows = read_metrics(run_dir)
    assert [row["n_samples"] for row in rows] == [3.0, 3.0]
    assert all(row["time_s/rew_inf"] >= 0.0 for row in rows)
    assert not list((run_dir / "checkpoints").glob("step_*"))

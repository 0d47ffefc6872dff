"""Every policy-gradient experiment runs from the command line on the built-in task."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from realrl.cli import main

SMALL = ("preset=tiny", "launcher=inline", "steps=2", "n_seqs=4", "generation.max_new_tokens=5", "save.at_end=false")
SEVERAL_MINIBATCHES = ("ppo_ref_ema", "reinforce_pp", "remax", "safe_rlhf")
COMMON = {"actor/pg_loss", "actor/ratio", "actor/approx_kl", "actor/entropy", "actor/grad_norm", "response_length/mean"}
OWN = {
    "ppo_ref_ema": {"kl/mean", "actor/kl_coef", "critic/value_loss"},
    "grpo": {"actor/kl_loss", "kl/mean"},
    "dr_grpo": {"reward/std"},
    "dapo": {"dropped/filter"},
    "gspo": {"actor/clip_fraction"},
    "rloo": {"actor/kl_coef", "kl/mean"},
    "remax": {"actor/kl_coef", "time_s/actor_gen_greedy", "time_s/greedy_rew_inf"},
    "reinforce_pp": {"actor/kl_coef", "kl/mean"},
    "safe_rlhf": {"cost/mean", "cost/lambda", "cost_critic/value_loss", "critic/value_loss"},
    "distill": {"distill/reverse_kl", "time_s/teacher_inf"},
    "self_play": {"game/payoff", "opponent_game/payoff", "opponent/pg_loss", "opponent_reward/mean"},
}


def run(folder: Path, experiment: str, *overrides: str) -> list[dict[str, Any]]:
    assert main(["run", experiment, *SMALL, f"run_dir={folder}", *overrides]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("experiment", OWN)
def test_two_steps_in_process(experiment: str, tmp_path: Path) -> None:
    rows = run(tmp_path / "run", experiment)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert COMMON | OWN[experiment] <= set(row)
        assert all(math.isfinite(value) for value in row.values())
        assert row["actor/grad_norm"] > 0 or experiment == "distill"  # the tiny teacher is the student at first
    assert rows[0]["actor/ratio"] == pytest.approx(1.0, abs=1e-4) or experiment in SEVERAL_MINIBATCHES


def test_a_mixture_of_advantages_and_other_pieces_are_chosen_by_keys(tmp_path: Path) -> None:
    rows = run(
        tmp_path / "run",
        "grpo",
        "algorithm.advantage={grpo: 0.7, rloo: 0.3}",
        "algorithm.policy_loss=cispo",
        "algorithm.clip_ratio_high=1.0",
        "algorithm.kl_loss_coef=0",
        "algorithm.entropy_coef=0.01",
        "generation.n_responses=3",
    )
    assert "time_s/ref_inf" not in rows[-1]
    assert "actor/kl_loss" not in rows[-1]


def test_importance_weights_of_the_policy_that_generated(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", "grpo", "algorithm.importance_cap=2.0", "generation.n_responses=2")
    for row in rows:
        assert row["importance/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["importance/capped"] == 0.0
        assert "time_s/actor_inf" in row


def test_distillation_from_the_likeliest_tokens(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", "distill", "algorithm.policy_loss=teacher_kl", "algorithm.teacher_top_k=8", "seed=2")
    assert all(row["actor/pg_loss"] >= -1e-5 for row in rows)


def test_the_pretraining_loss_reads_the_rows_answers(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"P{i}:", "answer": "abc"}) + "\n" for i in range(8)))
    rows = run(tmp_path / "run", "safe_rlhf", f"dataset.path={file}", "algorithm.ptx_coef=1.0")
    assert rows[1]["actor/ptx_loss"] < rows[0]["actor/ptx_loss"]


def test_groups_of_one_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "grpo", *SMALL, f"run_dir={tmp_path / 'run'}", "generation.n_responses=1"]) == 2
    assert "generation.n_responses=1 gives algorithm.advantage=grpo nothing to compare" in capsys.readouterr().err


def test_an_option_that_nothing_reads_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "grpo", *SMALL, f"run_dir={tmp_path / 'run'}", "algorithm.kl_coef=0.1"]) == 2
    message = capsys.readouterr().err
    chosen = "sampler=sample, advantage=grpo, policy_loss=clip"
    assert f"algorithm.kl_coef=0.1 has no effect: none of {chosen} reads it" in message
    assert "advantage=rloo" in message

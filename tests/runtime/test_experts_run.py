"""A role whose model has experts, from its folder to metrics and checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.cli import main
from realrl.data.tiny import tiny_tokenizer
from realrl.model.files.config_file import read_config
from realrl.model.files.hf import save_model
from realrl.model.init import random_model
from realrl.shape import MoEConfig, tiny_config
from tests.helpers.assets import make_model_folder
from tests.helpers.runs import read_metrics

SMALL = ("preset=tiny", "launcher=inline", "steps=1", "n_seqs=4")


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """A folder of a small Mixtral with its tokenizer; the coefficient of its load-balancing loss is 0.5."""
    tokenizer, folder = tiny_tokenizer(), tmp_path / "experts"
    moe = MoEConfig(n_experts=4, top_k=2, intermediate_size=48, aux_loss_coef=0.5)
    config = replace(tiny_config(len(tokenizer)), family="mixtral", n_layers=2, intermediate_size=48, moe=moe)
    save_model(random_model(config, 1), folder)
    tokenizer.save_pretrained(folder)
    return folder


def gradient_norm(folder: Path, run_dir: Path, *overrides: str) -> float:
    arguments = ("run", "sft", *SMALL, f"models.actor.path={folder}", f"run_dir={run_dir}", *overrides)
    assert main([*arguments]) == 0
    [metrics] = read_metrics(run_dir)
    assert metrics["actor/aux_loss"] == pytest.approx(2.0, rel=0.1)  # two experts a token, hardly a preference yet
    assert 1.0 <= metrics["actor/expert_load_max"] <= 2.0
    return metrics["actor/grad_norm"]


def test_the_load_balancing_loss_counts_what_the_checkpoint_or_the_user_says(experts: Path, tmp_path: Path) -> None:
    key = "models.actor.router_aux_loss_coef"
    by_checkpoint = gradient_norm(experts, tmp_path / "a")
    by_user = gradient_norm(experts, tmp_path / "b", f"{key}=0.5")
    without = gradient_norm(experts, tmp_path / "c", f"{key}=0")
    assert by_checkpoint == by_user != without
    for run, coefficient in (("a", 0.5), ("c", 0.0)):
        moe = read_config(tmp_path / run / "checkpoints" / "latest" / "actor").moe
        assert moe is not None
        assert moe.aux_loss_coef == coefficient


def test_a_dense_model_has_no_load_balancing_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model_folder(tmp_path / "dense")
    setting = "models.actor.router_aux_loss_coef=0.1"
    assert main(["run", "sft", *SMALL, f"models.actor.path={folder}", setting, f"run_dir={tmp_path / 'run'}"]) != 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "models.actor.router_aux_loss_coef is 0.1, but the model of role 'actor' has no experts." in shown
    assert "Leave the key out." in shown
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_loss_of_a_frozen_role_is_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ppo", *SMALL, "models.ref.router_aux_loss_coef=0.1", "--dry-run"]) != 0
    assert "models.ref.router_aux_loss_coef" in capsys.readouterr().err


def test_the_config_on_disk_is_that_of_a_mixtral(experts: Path) -> None:
    raw = json.loads((experts / "config.json").read_text())
    assert raw["architectures"] == ["MixtralForCausalLM"]
    assert raw["router_aux_loss_coef"] == 0.5

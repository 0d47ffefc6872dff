"""Whole runs that train adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from realrl.cli import main
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, run_ppo

LORA = ("models.actor.lora.rank=4", "models.critic.lora.rank=2", "models.critic.lora.targets=[q_proj,v_proj]")
LORA += ("models.actor.optimizer.schedule=constant", "models.critic.optimizer.schedule=constant")
INLINE = "launcher=inline"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    run_dir = tmp_path_factory.mktemp("adapted") / "run"
    return run_dir, run_ppo(run_dir, INLINE, *LORA)


def test_ppo_trains_adapters_and_saves_a_model_that_transformers_reads(
    adapted: tuple[Path, list[dict[str, Any]]],
) -> None:
    from transformers import AutoModelForCausalLM

    run_dir, metrics = adapted
    assert [line["version/actor"] for line in metrics] == [1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 for line in metrics[1:])
    assert metrics[0]["kl/mean"] == pytest.approx(0.0, abs=1e-6)  # the actor without its adapters is the reference
    assert abs(metrics[-1]["kl/mean"]) > 1e-5
    folder = run_dir / "checkpoints" / "latest"
    AutoModelForCausalLM.from_pretrained(folder / "actor")
    assert {path.name for path in (folder / "actor" / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    state, model = (folder / "state" / "actor.safetensors").stat(), (folder / "actor" / "model.safetensors").stat()
    assert state.st_size < model.st_size / 2  # moments of all weights would be twice the model


def test_layouts_agree_and_adapters_move(adapted: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    placed = ("cluster.n_devices_per_node=2", "allocation.mode=d1t2", "allocation.calls.actor_gen=d2")
    metrics = run_ppo(tmp_path / "run", *LORA, *placed)
    assert_same_numbers(adapted[1], metrics, rel=1e-4, floor=1e-6)


def test_a_stopped_run_continues_exactly(adapted: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    run_dir = tmp_path / "stopped"
    run_ppo(run_dir, INLINE, *LORA, "steps=2")
    metrics = run_ppo(run_dir, INLINE, *LORA, "resume=auto")
    assert_same_numbers(adapted[1], metrics, rel=0.0, floor=0.0)


def test_a_reward_model_with_adapters_in_bf16(tmp_path: Path) -> None:
    overrides = ("steps=2", "n_seqs=8", "models.reward.lora.rank=4", "precision=bf16", f"run_dir={tmp_path / 'run'}")
    assert main(["run", "rw", "preset=tiny", INLINE, *overrides]) == 0
    assert len(read_metrics(tmp_path / "run")) == 2


def test_a_target_that_matches_nothing_is_refused_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = ("models.actor.lora.rank=4", "models.actor.lora.targets=[q,qproj]", f"run_dir={tmp_path / 'run'}")
    assert main(["run", "ppo", *SMALL, INLINE, *overrides]) == 2
    message = " ".join(capfd.readouterr().err.split())
    assert "models.actor.lora.targets: 'qproj' matches no layer of the model of role 'actor'" in message
    assert "It has q, k, v, o, gate, up, down" in message
    assert not (tmp_path / "run").exists()

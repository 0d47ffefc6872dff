"""Files that a run leaves behind, from which it continues."""

import json
from pathlib import Path
from typing import Any

import pytest

from realrl import cli
from tests.helpers.assets import make_model_folder, write_rows
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, run_ppo
from tests.helpers.traces import load_trace

CONSTANT = "models.actor.optimizer.schedule=constant"  # the same learning rates whichever step is the last


@pytest.fixture(scope="module")
def split_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("split") / "run"
    run_ppo(run_dir, CONSTANT, "cluster.n_devices_per_node=2", "allocation.mode=split", "n_mbs=2")
    return run_dir


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ppo(tmp_path_factory.mktemp("straight") / "run", CONSTANT, "launcher=inline")


def test_two_meshes_and_micro_batches_give_the_numbers_of_one_process(straight, split_run: Path) -> None:
    assert_same_numbers(straight, read_metrics(split_run), rel=1e-4, floor=1e-6)


def test_transformers_loads_the_saved_actor(split_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = split_run / "checkpoints" / "latest" / "actor"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)


def test_the_trace_shows_every_call_and_disjoint_calls_overlap(split_run: Path) -> None:
    events = [e for e in load_trace(split_run / "trace.json") if e.get("ph") == "X"]
    calls = [e for e in events if e["cat"] == "call"]
    assert {e["name"] for e in calls} == {
        "actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train",
    }  # fmt: skip
    assert any(e["cat"] == "transfer" for e in events)
    overlapping = [
        (a["name"], b["name"])
        for a in calls
        for b in calls
        if a["tid"] < b["tid"] and a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"]
    ]
    assert overlapping


def test_metrics_have_the_promised_names(split_run: Path) -> None:
    last = read_metrics(split_run)[-1]
    promised = """
        step epoch actor/pg_loss actor/entropy actor/grad_norm actor/clip_fraction actor/approx_kl actor/kl_coef
        critic/value_loss critic/grad_norm critic/explained_variance reward/mean reward/std kl/mean
        response_length/mean prompt_length/mean time_s/actor_gen time_s/step perf/tokens_per_s bytes/data
        memory_gb/0 version/actor
    """
    assert set(promised.split()) <= set(last)
    assert last["version/actor"] == 3
    assert last["bytes/data"] > 0


def test_the_resolved_configuration_is_written(split_run: Path) -> None:
    config = json.loads((split_run / "config.json").read_text())
    assert config["n_seqs"] == 8
    assert config["allocation"]["mode"] == "split"


def test_a_stopped_run_continues_exactly(straight, tmp_path: Path) -> None:
    options = ("launcher=inline", CONSTANT)
    run_ppo(tmp_path / "stopped", *options, "steps=2")
    continued = run_ppo(tmp_path / "stopped", *options, "resume=auto")
    assert_same_numbers(straight, continued, rel=0.0, floor=0.0)


def test_a_used_folder_is_not_overwritten(split_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "ppo", *SMALL, f"run_dir={split_run}"]) == 2
    assert "holds the results of an earlier run" in capfd.readouterr().err


def test_how_a_model_is_sampled_stays_with_it_also_after_a_resume(tmp_path: Path) -> None:
    model, run_dir = make_model_folder(tmp_path / "model"), tmp_path / "run"
    sampling = '{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 5]}'
    (model / "generation_config.json").write_text(sampling)
    (model / "special_tokens_map.json").write_text("{}")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}])
    settings = [f"models.actor.path={model}", f"dataset.path={rows}", "n_seqs=1", "launcher=inline"]
    for steps in (1, 2):
        assert cli.main(["run", "sft", *settings, f"steps={steps}", f"run_dir={run_dir}", "resume=auto"]) == 0
        saved = run_dir / "checkpoints" / f"step_{steps}" / "actor"
        assert (saved / "generation_config.json").read_text() == sampling
        assert (saved / "special_tokens_map.json").read_text() == "{}"
        (model / "generation_config.json").unlink(missing_ok=True)

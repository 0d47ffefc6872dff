"""Evaluation during training and alone, responses to a file, and what is kept of responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realrl.cli import main
from realrl.data.kinds import DatasetKind
from realrl.data.tiny import toy_rows
from tests.helpers.assets import write_rows
from tests.helpers.runs import NOISE, assert_same_numbers, read_metrics, run_here

CONSTANT = tuple(f"models.{role}.optimizer.schedule=constant" for role in ("actor", "critic"))
PPO = ("run", "ppo", "preset=tiny", "steps=3", "n_seqs=8", "generation.max_new_tokens=5")
EVALUATED = ("eval.every_steps=2", "eval.at_start=true", "eval.n_seqs=11", "eval.n_responses=2", "eval.temperature=1")
CALLS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train")
TOY_REWARD = "algorithm.reward_function=realrl.data.tiny:toy_reward"


def run(run_dir: Path, *arguments: str) -> list[dict[str, Any]]:
    """A run in this process that must succeed; its metrics."""
    run_here(*arguments, "launcher=inline", f"run_dir={run_dir}")
    return read_metrics(run_dir)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_evaluation(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(("eval/", *NOISE))} for row in rows if row["step"]]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    run(folder, *PPO, *CONSTANT, *EVALUATED, "save.every_steps=2")
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(folder, *PPO, *CONSTANT)
    return folder


def test_training_does_not_notice_an_evaluation(evaluated: Path, plain: Path) -> None:
    rows = read_metrics(evaluated)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert without_evaluation(rows) == without_evaluation(read_metrics(plain))
    for row in rows:
        assert ("eval/reward/mean" in row) == (row["step"] in (0, 2))
    for row in (rows[0], rows[2]):
        assert row["eval/n_samples"] == 11
        assert 0 < row["eval/reward/stderr"] < 1
        assert 0 <= row["eval/pass@1"] <= row["eval/pass@2"] <= 1
        assert row["time_s/eval"] > 0
    for row in rows[1:]:  # of one worker: the calls follow each other
        assert row["time_s/step"] > sum(row[f"time_s/{call}"] for call in CALLS)
    lines = read_lines(evaluated / "generations.jsonl")
    assert lines == read_lines(plain / "generations.jsonl")
    assert [(line["step"], line["version"]) for line in lines] == [
        (step, step - 1) for step in (1, 2, 3) for _ in "1234"
    ]


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(("allocation=tensor",), marks=pytest.mark.slow),
        ("allocation=split", "cluster.data_plane=collective"),
    ],
)
def test_every_plan_measures_the_same(
    evaluated: Path, plan: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    two = ("cluster.n_devices_per_node=2", *plan)
    run_here(*PPO, *CONSTANT, *EVALUATED, *two, f"run_dir={folder}")
    printed = capfd.readouterr().out
    assert "evaluating step 2 on 11 samples" in printed
    assert "eval reward " in printed
    assert_same_numbers(read_metrics(evaluated), read_metrics(folder), rel=1e-3, floor=1e-4)
    for ours, theirs in zip(*(read_lines(f / "generations.jsonl") for f in (evaluated, folder)), strict=True):
        assert {k: v for k, v in ours.items() if k != "rewards"} == {k: v for k, v in theirs.items() if k != "rewards"}
        assert ours["rewards"] == pytest.approx(theirs["rewards"])


def test_a_checkpoint_evaluates_alone_as_it_did_in_training(evaluated: Path, tmp_path: Path) -> None:
    settings = [item for item in EVALUATED if not item.startswith(("eval.every", "eval.at"))]
    short = [item for item in PPO[2:] if not item.startswith("steps")]
    actor = f"models.actor.path={evaluated / 'checkpoints' / 'step_2' / 'actor'}"
    folder = tmp_path / "alone"
    assert main(["eval", "ppo", *short, *settings, actor, "launcher=inline", f"run_dir={folder}"]) == 0
    found = json.loads((folder / "eval.json").read_text())
    row = read_metrics(evaluated)[2]
    assert found["n_samples"] == 11
    for name in ("reward", "response_length", "truncated"):
        assert found["metrics"][name]["value"] == pytest.approx(row[f"eval/{name}/mean"])
        assert found["metrics"][name]["stderr"] == pytest.approx(row[f"eval/{name}/stderr"])
    assert found["metrics"]["pass@2"]["value"] == pytest.approx(row["eval/pass@2"])
    assert len(read_lines(folder / "generations.jsonl")) == 22
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize("name", ["sft", "rw", "dpo"])
def test_a_loss_is_the_one_that_training_begins_with(name: str, tmp_path: Path) -> None:
    kind = DatasetKind.PROMPT_ANSWER if name == "sft" else DatasetKind.PREFERENCE_PAIR
    path = write_rows(tmp_path / "rows.jsonl", toy_rows(kind, 6, 3))
    data = (f"dataset.path={path}", f"eval.path={path}", "n_seqs=6", "steps=1", "eval.at_start=true", "n_mbs=2")
    before, first = run(tmp_path / "run", "run", name, "preset=tiny", *data)
    role = "reward" if name == "rw" else "actor"
    names = ("loss",) if name == "sft" else ("loss", "accuracy")
    for metric in names:
        assert before[f"eval/{metric}"] == pytest.approx(first[f"{role}/{metric}"], rel=1e-5, abs=1e-6)
    if name == "sft":
        assert before["eval/perplexity"] == pytest.approx(first["actor/ppl"], rel=1e-4)


def test_every_prompt_of_a_file_is_answered_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "prompt": f"AB{i}:"} for i in range(7)])
    out = tmp_path / "out.jsonl"
    arguments = ("gen", f"dataset.path={path}", "n_seqs=4", "generation.max_new_tokens=5", "generation.n_responses=2",
                 TOY_REWARD, "--out", str(out))  # fmt: skip
    rows = run(tmp_path / "run", *arguments)
    lines = read_lines(out)
    assert [(line["sample"], line["response_index"]) for line in lines] == [
        (f"1/p{i}", j) for i in range(7) for j in range(2)
    ]
    assert [line["prompt"] for line in lines[::2]] == [f"AB{i}:" for i in range(7)]
    assert [row["n_samples"] for row in rows] == [4, 3]
    for row, part in zip(rows, (lines[:8], lines[8:]), strict=True):
        assert row["reward/mean"] == pytest.approx(sum(line["rewards"] for line in part) / len(part))
        assert row["response_length/mean"] == sum(line["response_tokens"] for line in part) / len(part)
    capsys.readouterr()
    assert main([*arguments, f"run_dir={tmp_path / 'again'}"]) == 2
    assert f"save.generations_path={out} cannot be written: it holds something already" in capsys.readouterr().err
    assert read_lines(out) == lines


def test_a_resumed_run_repeats_no_response(plain: Path, tmp_path: Path) -> None:
    arguments = (*PPO, *CONSTANT)
    run(tmp_path / "run", *arguments, "steps=2", "save.every_steps=1")
    (tmp_path / "run" / "checkpoints" / "step_2" / "state" / "manifest.json").unlink()  # as if it had been cut short
    run(tmp_path / "run", *arguments, "resume=auto")
    assert read_lines(tmp_path / "run" / "generations.jsonl") == read_lines(plain / "generations.jsonl")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("eval", "ppo", "eval.path=missing.jsonl"), ("eval.path=missing.jsonl: there is no such file",)),
        (("run", "ppo", "eval.every_steps=1", "eval.path=x.jsonl"), ("eval.path=x.jsonl: there is no such file",)),
        (("eval", "ppo", "steps=3"), ("steps=3: has no effect: an evaluation goes once over",)),
        (("eval", "sft", "eval.n_responses=2"), ("'sft' has no generate call",)),
        (("eval", "kto"), ("has nothing to evaluate",)),
        (("eval", "grpo", "n_seqs=1", "cluster.n_devices_per_node=2"), ("fewer than its 2 data-parallel ranks",)),
        (("gen", "grpo"), ("experiment 'grpo' trains, and 'realrl gen' does not", "realrl run")),
        (("gen", TOY_REWARD, "algorithm.reward_on_failure=drop"), ("every prompt of the file is answered",)),
        (("gen", "preset=tiny", "--out", "no/such/folder.jsonl"), ("there is no folder",)),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...],
    messages: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(list(arguments)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert all(message in err for message in messages), err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["eval", "gen"])
def test_help(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"realrl {command}" in capfd.readouterr().out

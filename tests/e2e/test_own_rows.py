"""Rows as people have them: other names, messages, weights; what rewards see of them, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realrl import cli
from tests.helpers.runs import SMALL

REWARDS = """
def last(prompt, response, row, messages):
    assert messages[-1] == {"role": "assistant", "content": response}
    asked = messages[:-1]
    assert (asked == row["prompt"]) if "prompt" in row else (asked == [{"role": "user", "content": prompt}])
    return row["meta"]["n"]

def turns(prompt, responses, messages):
    return [len(talk) for talk in messages]
"""


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    talk = [{"from": "human", "value": "A"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "C"}]
    rows = {"asked": [{"question": f"Q{i}", "meta": {"n": i}} for i in range(6)],
            "talks": [{"id": f"t{i}", "conversations": talk, "meta": {"n": -i}} for i in range(3)]}  # fmt: skip
    for name, content in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return [
        *SMALL, "launcher=inline", "n_seqs=4", "generation.n_responses=2", "generation.max_new_tokens=4",
        "dataset.files.asked=asked.jsonl", "dataset.files.asked.weight=1", "dataset.files.asked.fields.prompt=question",
        "dataset.files.talks=talks.jsonl", "dataset.files.talks.weight=2",
        "dataset.files.talks.fields.messages=conversations",
        "algorithm.reward_function=null", "algorithm.rewards.last=rewards.py:last",
        "algorithm.rewards.turns={function: rewards.py:turns, weight: 0.5}",
    ]  # fmt: skip


def lines(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "generations.jsonl").read_text().splitlines()]


def test_rows_of_people_are_trained_on_written_and_resumed(overrides: list[str], tmp_path: Path) -> None:
    assert cli.main(["run", "grpo", *overrides, "steps=3", "run_dir=whole"]) == 0
    assert cli.main(["run", "grpo", *overrides, "steps=1", "run_dir=parts"]) == 0
    assert cli.main(["run", "grpo", *overrides, "steps=3", "run_dir=parts", "resume=auto"]) == 0
    written = lines("whole")
    assert [line["sample"] for line in written] == [line["sample"] for line in lines("parts")]
    assert sum(line["file"] == "talks.jsonl" for line in written[: 2 * 8]) >= 8  # of 9 samples an epoch, 6 are talks
    for line in written:
        rows = [json.loads(text) for text in Path(line["file"]).read_text().splitlines()]
        row = next(row for i, row in enumerate(rows) if line["row_id"] == row.get("id", str(i)))
        is_talk = line["file"] == "talks.jsonl"
        assert line["row"]["meta"] == row["meta"]
        assert line["reward_parts"] == {"last": row["meta"]["n"], "turns": 4 if is_talk else 2}
        assert line["rewards"] == row["meta"]["n"] + 0.5 * line["reward_parts"]["turns"]
        assert line["advantage"] == 0.0  # both responses to a prompt have one reward
        assert ("messages" in line) == is_talk
        if is_talk:
            assert [message["content"] for message in line["messages"]] == ["A", "b", "C", line["response"]]
        else:
            assert line["prompt"] == row["question"]

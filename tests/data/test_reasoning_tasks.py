"""`reasoning_gym:<task>` as a dataset, and the verifiers that read its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realrl.config.compose import compose
from realrl.config.paths import check_paths
from realrl.config.schema import DatasetConfig
from realrl.data.datasets import load_dataset
from realrl.data.kinds import DatasetKind
from realrl.data.reasoning_tasks import FIELD, _pack, _unpack, parse_task_path, task_entry, task_rows
from realrl.data.tiny import tiny_tokenizer
from realrl.errors import ConfigError, DataError
from tests.config.declared import experiment


def test_a_path_names_tasks_and_settings() -> None:
    parsed = parse_task_path(
        "reasoning_gym:chain_sum?size=5&min_terms=2&allow_negation=true&instruction=Only%20the+sum."
    )
    common = {"size": 5, "seed": 0, "instruction": "Only the sum."}
    assert parsed == {"chain_sum": {**common, "min_terms": 2, "allow_negation": True}}
    assert parse_task_path("reasoning_gym:x") == {"x": {"size": 500, "seed": 0, "instruction": ""}}


def test_several_tasks_share_size_and_seed() -> None:
    parsed = parse_task_path("reasoning_gym:a+b?seed=3&b.depth=[1,2]&a.kind=hard")
    assert parsed == {
        "a": {"size": 500, "seed": 3, "instruction": "", "kind": "hard"},
        "b": {"size": 500, "seed": 3, "instruction": "", "depth": [1, 2]},
    }


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reasoning_gym:", "names no task"),
        ("reasoning_gym:a+?size=3", "names no task"),
        ("reasoning_gym:a?size", "Settings are written name=value"),
        ("reasoning_gym:a+b?depth=3", r"setting 'depth' belongs to none of the tasks a, b\n  Write it as a.depth"),
        ("reasoning_gym:a?c.depth=3", r"setting 'c.depth' belongs to none of the tasks a"),
    ],
)
def test_a_malformed_path(path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_task_path(path)


def test_on_the_command_line_it_needs_no_quotes_of_the_grammar(tmp_path: Path) -> None:
    for path in ("reasoning_gym:a?size=5&a.x=it's", "reasoning_gym:a"):
        config = compose(experiment(), [f"dataset.path={path}", f"run_dir={tmp_path}"])
        assert config.dataset.path == path
        check_paths(config, cache_dir=tmp_path)


def test_the_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"dataset\.path=reasoning_gym:chain_sum needs .*reasoning-gym") as error:
        task_rows("reasoning_gym:chain_sum")
    assert "pip install 'realrl[rewards]'" in str(error.value)


# ---------------------------------------------------------------- with the package


@pytest.fixture(scope="module")
def gym() -> Any:
    return pytest.importorskip("reasoning_gym")


SUMS = "reasoning_gym:chain_sum?size=4&seed=7&min_terms=2&max_terms=2"


def test_rows_follow_from_the_path(gym: Any) -> None:
    rows = [row.fields for row in task_rows(SUMS)]
    assert rows == [row.fields for row in task_rows(SUMS)]
    expected = gym.create_dataset("chain_sum", size=4, seed=7, min_terms=2, max_terms=2)
    assert [row["prompt"] for row in rows] == [entry["question"] for entry in expected]
    assert [row["answer"] for row in rows] == [entry["answer"] for entry in expected]
    assert [row["id"] for row in rows] == [f"chain_sum/{i}" for i in range(4)]
    assert rows[0]["prompt"] != task_rows(SUMS.replace("seed=7", "seed=8"))[0].fields["prompt"]


def test_a_task_may_have_an_instruction_of_its_own() -> None:
    parsed = parse_task_path(
        "reasoning_gym:chain_sum+lcm?size=9&chain_sum.size=5&instruction=Think.&lcm.instruction=Answer%3A"
    )
    assert parsed == {
        "chain_sum": {"size": 5, "seed": 0, "instruction": "Think."},
        "lcm": {"size": 9, "seed": 0, "instruction": "Answer:"},
    }


def test_an_instruction_stands_below_the_question(gym: Any) -> None:
    with_it = task_rows(SUMS + "&instruction=Give+the+number.")[0].fields
    assert with_it["prompt"] == task_rows(SUMS)[0].fields["prompt"] + "\nGive the number."


def test_a_task_is_a_dataset(gym: Any) -> None:
    config = DatasetConfig(path=SUMS, chat_template=True)
    dataset = load_dataset(config, DatasetKind.PROMPT, tiny_tokenizer())
    sample = dataset.samples(["s"], [2])
    row = json.loads(bytes(sample["metadata"].tolist()))
    assert row["answer"] == task_rows(SUMS)[2].fields["answer"]
    assert tiny_tokenizer().decode(sample["prompt_ids"]).startswith("<|user|>State the final answer")
    answers = load_dataset(config, DatasetKind.PROMPT_ANSWER, tiny_tokenizer())
    assert not answers.samples(["s"], [0])["prompt_mask"].all()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reasoning_gym:chain_sums", "no task 'chain_sums'. Did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum?min_term=2", "no setting 'min_term'. Did you mean 'min_terms'"),
        ("reasoning_gym:chain_sum?min_terms=5&max_terms=2", "task chain_sum refuses its settings: max_terms"),
        ("reasoning_gym:chain_sum?size=-5", "size=-5 of task chain_sum must be a whole number >= 1"),
        ("reasoning_gym:chain_sum?size=2.5", "size=2.5 of task chain_sum must be a whole number >= 1"),
        ("reasoning_gym:chain_sum?seed=null", "seed=None of task chain_sum must be a whole number >= 0"),
    ],
)
def test_what_the_package_does_not_know(gym: Any, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        task_rows(path)


def arrived(task: str) -> dict[str, Any]:
    """A row as a reward function gets it."""
    [row] = task_rows(f"reasoning_gym:{task}?size=1&seed=3")
    config = DatasetConfig(path=f"reasoning_gym:{task}?size=1&seed=3", max_prompt_tokens=10_000)
    sample = load_dataset(config, DatasetKind.PROMPT, tiny_tokenizer()).samples(["s"], [0])
    fields: dict[str, Any] = json.loads(bytes(sample["metadata"].tolist()))
    assert fields["answer"] == row.fields["answer"]
    return fields


def test_entries_travel_as_json() -> None:
    entry = {"a": (1, [2.5, None]), "b": {1: "x", (2, 3): True}, "c": {"d": {}}, "e": ()}
    assert _unpack(json.loads(json.dumps(_pack(entry)))) == entry
    with pytest.raises(TypeError, match="set is not packed"):
        _pack({"a": {1, 2}})


# What the second draws comes from the global generator.
@pytest.mark.parametrize("task", ["chain_sum", "list_functions", "family_relationships"])
def test_the_task_scores_its_own_answer(gym: Any, task: str) -> None:
    from realrl.rewards.verify_reasoning import reasoning_gym

    row = arrived(task)
    assert "entry" in row[FIELD]
    _, entry = task_entry(row[FIELD])
    fresh = gym.create_dataset(task, size=1, seed=3)
    assert task_entry({k: v for k, v in row[FIELD].items() if k != "entry"})[1] == entry
    assert task == "list_functions" or entry == fresh[0]
    answer, none = row["answer"], fresh.score_answer(None, entry)
    assert reasoning_gym("", f"thinking\n<answer>{answer}</answer>\nbye", row) == fresh.score_answer(answer, entry) == 1
    assert reasoning_gym("", f"thinking\n{answer}\n\n", row) == 1
    assert reasoning_gym("", f"thinking\n{answer}\n\n", row, answer_in="tag") == none
    assert reasoning_gym("", "", row) < 1


def test_where_the_answer_is(gym: Any) -> None:
    from realrl.rewards.verify_reasoning import find_answer

    text = "<answer>1</answer> no: <answer>\n2 </answer>\n<sum>3</sum> \n"
    assert find_answer(text, "tag_or_last_line", "answer") == "2"
    assert find_answer(text, "tag", "sum") == "3"
    assert find_answer(text, "tag", "result") is None
    assert find_answer(text, "tag_or_last_line", "result") == "<sum>3</sum>"
    assert find_answer(text, "last_line", "answer") == "<sum>3</sum>"
    assert find_answer(" x\ny ", "response", "answer") == "x\ny"
    assert find_answer(" \n", "last_line", "answer") is None
    with pytest.raises(ValueError, match="answer_in='line': must be one of"):
        find_answer(text, "line", "answer")


def test_other_rows_are_refused(gym: Any) -> None:
    from realrl.rewards.verify_reasoning import reasoning_gym

    with pytest.raises(KeyError, match=r"needs dataset\.path=reasoning_gym:<task>"):
        reasoning_gym("", "2", {"answer": "2"})


def test_a_row_that_cannot_be_made_is_named(gym: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise IndexError("nothing to choose from")

    monkeypatch.setattr("realrl.data.reasoning_tasks._entry", fail)
    with pytest.raises(DataError, match=r"task chain_sum, row 1 cannot be made: IndexError: nothing to choose from"):
        task_rows("reasoning_gym:chain_sum?size=2")

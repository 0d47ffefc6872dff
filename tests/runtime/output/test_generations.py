"""``generations.jsonl`` and what an evaluation prints and writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realrl.config.compose import compose
from realrl.data.rows import SampleStore
from realrl.data.sample import SequenceSample
from realrl.data.tiny import tiny_tokenizer
from realrl.errors import RunError
from realrl.experiment.discovery import load_experiment
from realrl.experiment.planning import plan_run
from realrl.runtime.output.evaluation_file import evaluation_line, evaluation_table, write_evaluation
from realrl.runtime.output.generations import GenerationsFile
from realrl.runtime.worker.sample_text import read_samples
from realrl.sched.events import ReportSamples, SampleContents
from realrl.sched.messages import KeySchema, Per, ReadSamples
from realrl.sched.track.readout import Readout

ONE = Readout({"": "actor"}, {"": "actor_gen"})
TWO = Readout({"": "actor", "other_": "opponent"}, {"": "actor_gen", "other_": "opponent_gen"})


FILES = {"": "data.jsonl"}
ORIGIN = {"file": "data.jsonl", "row_id": "x"}


def contents(sample_id: str, **columns: tuple[float | bool | str, ...]) -> SampleContents:
    return SampleContents(sample_id, {"actor_gen": 3}, columns)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_holds_one_response(tmp_path: Path) -> None:
    file = GenerationsFile(tmp_path / "g.jsonl", ONE, files=FILES, last_step=0)
    assert not file.path.exists()
    columns = {"prompt": ("p", "p"), "response": ("ä", "b"), "prompt_tokens": (1.0, 1.0), "response_tokens": (2.0, 1.0)}
    file.write(ReportSamples(4, 1, (contents("1/x", **columns, rewards=(0.5, float("nan")), truncated=(True, False),
                                             score=(7.0,)),)))  # fmt: skip
    assert lines(file.path) == [
        {"step": 4, "epoch": 1, "sample": "1/x", **ORIGIN, "response_index": 0, "role": "actor", "version": 3,
         "prompt": "p", "response": "ä", "prompt_tokens": 1, "response_tokens": 2, "rewards": 0.5, "truncated": True,
         "score": 7.0},
        {"step": 4, "epoch": 1, "sample": "1/x", **ORIGIN, "response_index": 1, "role": "actor", "version": 3,
         "prompt": "p", "response": "b", "prompt_tokens": 1, "response_tokens": 1, "rewards": None, "truncated": False,
         "score": 7.0},
    ]  # fmt: skip


def test_numbers_of_other_sequences_are_left_out(tmp_path: Path) -> None:
    file = GenerationsFile(tmp_path / "g.jsonl", ONE, files=FILES, last_step=0)
    three = {"prompt": ("p",) * 3, "response": ("a", "b", "c"), "prompt_tokens": (1.0,) * 3,
             "response_tokens": (1.0,) * 3, "rewards": (0.0, 1.0, 2.0)}  # fmt: skip
    file.write(ReportSamples(1, 1, (contents("1/x", **three, best_weights=(1.5, 0.5)),)))  # of two that were chosen
    readout = replace(ONE, apart=frozenset({"best_weights"}))
    chosen = GenerationsFile(tmp_path / "c.jsonl", readout, files=FILES, last_step=0)
    chosen.write(ReportSamples(1, 1, (contents("1/x", **three, best_weights=(1.5,)),)))  # one, or all in their order
    for written in (lines(file.path), lines(chosen.path)):
        assert [line["rewards"] for line in written] == [0.0, 1.0, 2.0]
        assert not any("best_weights" in line for line in written)


def test_two_players_have_lines_of_their_own(tmp_path: Path) -> None:
    file = GenerationsFile(tmp_path / "g.jsonl", TWO, files=FILES, last_step=0)
    mine = {"prompt": ("p",), "response": ("a",), "prompt_tokens": (1.0,), "response_tokens": (1.0,), "rewards": (1.0,)}
    other = {f"other_{name}": values for name, values in {**mine, "response": ("b",), "rewards": (2.0,)}.items()}
    file.write(ReportSamples(1, 1, (contents("1/x", **mine, **other),)))
    found = [(line["call"], line["role"], line["version"], line["response"], line["rewards"])
             for line in lines(file.path)]  # fmt: skip
    assert found == [("actor_gen", "actor", 3, "a", 1.0), ("opponent_gen", "opponent", 0, "b", 2.0)]


def test_a_resumed_run_takes_back_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 2, "torn', encoding="utf-8")
    GenerationsFile(path, ONE, files=FILES, last_step=2)
    assert lines(path) == [{"step": 1}, {"step": 2}]
    GenerationsFile(path, ONE, files=FILES, last_step=0)
    assert lines(path) == []
    assert [item.name for item in tmp_path.iterdir()] == ["g.jsonl"]


def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(RunError, match="holds something that no run wrote: b'dear diary"):
        GenerationsFile(path, ONE, files=FILES, last_step=1)
    assert path.read_text() == "dear diary\n"
    assert [item.name for item in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = GenerationsFile(tmp_path / "no" / "g.jsonl", ONE, files=FILES, last_step=0)
    report = ReportSamples(
        1, 1, (contents("1/x", prompt=("p",), response=("a",), prompt_tokens=(1.0,), response_tokens=(1.0,)),)
    )
    with pytest.raises(RunError, match=r"g\.jsonl: No such file"):
        file.write(report)


def test_a_worker_tells_text_and_numbers_of_its_rows() -> None:
    tokenizer = tiny_tokenizer()
    prompt, responses = tokenizer.encode("AB:"), [[*tokenizer.encode("xyz"), tokenizer.eos_token_id], [0xC3]]
    tokens = [[torch.tensor([*prompt, *response]) for response in responses]]
    masks = [[torch.tensor([True] * len(prompt) + [False] * len(response)) for response in responses]]
    store = SampleStore()
    store.put(
        SequenceSample.from_lists(
            ("1/a",),
            {
                "input_ids": (KeySchema("int64", Per.TOKEN), tokens),
                "prompt_mask": (KeySchema("bool", Per.TOKEN), masks),
                "rewards": (KeySchema("float32", Per.SEQUENCE), [[torch.tensor(0.5), torch.tensor(-1.0)]]),
                "truncated": (KeySchema("bool", Per.SEQUENCE), [[torch.tensor(False), torch.tensor(True)]]),
            },
        )
    )
    request = ReadSamples(0, 1, {"": ("1/a",)}, {"": "actor"}, {"rewards": ("1/a",), "truncated": ("1/a",)})
    found, rows = read_samples(store, request, lambda role: {"actor": tokenizer}[role])
    assert rows == {}
    assert found == {
        "prompt": {"1/a": ("AB:", "AB:")},
        "response": {"1/a": ("xyz", "\N{REPLACEMENT CHARACTER}")},
        "prompt_tokens": {"1/a": (3.0, 3.0)},
        "response_tokens": {"1/a": (4.0, 1.0)},
        "rewards": {"1/a": (0.5, -1.0)},
        "truncated": {"1/a": (False, True)},
    }
    assert type(found["truncated"]["1/a"][0]) is bool


def test_text_stays_in_its_order_where_something_was_put_in_between(tmp_path: Path) -> None:
    """As a generate call with tools gives it: the prompt, a question to a tool, what it said, the answer."""
    tokenizer = tiny_tokenizer()
    texts = [("AB:", True), ("1+1=", False), ("2;", True), ("two", False)]
    tokens = torch.tensor([token for text, _ in texts for token in tokenizer.encode(text)])
    mask = torch.tensor([flag for text, flag in texts for _ in tokenizer.encode(text)])
    row = torch.tensor(list(b'{"n": 1}'), dtype=torch.uint8)
    store = SampleStore()
    columns = {"input_ids": (KeySchema("int64", Per.TOKEN), [[tokens]]),
               "prompt_mask": (KeySchema("bool", Per.TOKEN), [[mask]]),
               "metadata": (KeySchema("uint8", Per.TOKEN), [[row]])}  # fmt: skip
    store.put(SequenceSample.from_lists(("1/a",), columns))
    found, rows = read_samples(
        store, ReadSamples(0, 1, {"": ("1/a",)}, {"": "actor"}, {}, ("1/a",)), lambda _: tokenizer
    )
    assert rows == {"1/a": '{"n": 1}'}
    file = GenerationsFile(tmp_path / "g.jsonl", ONE, files=FILES, last_step=0)
    row_of = {name: values["1/a"] for name, values in found.items()}
    file.write(ReportSamples(1, 1, (SampleContents("1/a", {}, row_of, {}, rows["1/a"]),)))
    [line] = lines(file.path)
    assert (line["prompt"], line["response"]) == ("AB:", "1+1=2;two")
    assert (line["prompt_tokens"], line["response_tokens"]) == (5, 7)
    assert line["messages"] == [
        {"role": "user", "content": "AB:"}, {"role": "assistant", "content": "1+1="},
        {"role": "tool", "content": "2;"}, {"role": "assistant", "content": "two"},
    ]  # fmt: skip
    assert line["row"] == {"n": 1}
    assert "turns" not in line


def test_a_line_tells_where_its_row_is_and_what_was_noted(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "q"}]
    row = json.dumps({"prompt": asked, "messages": asked, "answer": {"n": [1]}, "tests": "x" * 5000})
    columns = {"prompt": ("<q>",), "response": ("r",), "prompt_tokens": (1.0,), "response_tokens": (1.0,),
               "rewards": (0.1 + 0.2,)}  # fmt: skip
    notes = {"reward_parts/math": (1 / 3,), "reward_parts/length": (float("inf"),), "advantage": (-1234567.8,)}
    file = GenerationsFile(tmp_path / "g.jsonl", ONE, files={"a": "a.jsonl", "b": "b.jsonl"}, last_step=0)
    file.write(ReportSamples(1, 1, (SampleContents("3/b/t/7", {}, columns, notes, row),)))
    [line] = lines(file.path)
    assert line.pop("messages") == [*asked, {"role": "assistant", "content": "r"}]
    assert {name: line[name] for name in list(line)[2:] if name not in ("role", "version", "response_index")} == {
        "sample": "3/b/t/7", "file": "b.jsonl", "row_id": "t/7", "prompt": "<q>", "response": "r", "prompt_tokens": 1,
        "response_tokens": 1, "rewards": 0.3, "reward_parts": {"math": 0.333333, "length": None},
        "advantage": -1234570.0, "row": {"answer": {"n": [1]}}, "long_fields": ["tests"],
    }  # fmt: skip


METRICS = {
    "eval/reward/mean": 0.5,
    "eval/reward/stderr": 0.125,
    "eval/response_length/mean": 7.0,
    "eval/n_samples": 9.0,
    "reward/mean": 3.0,
}


def test_results_are_shown_with_their_errors(tmp_path: Path) -> None:
    assert evaluation_line(METRICS) == "reward 0.5 ± 0.12"
    assert evaluation_table(METRICS) == {"reward": "0.5 ± 0.12", "response_length": "7", "samples": "9"}
    experiment = load_experiment("ppo")
    plan = plan_run(compose(experiment, ["eval.only=true"]), experiment)
    write_evaluation(tmp_path / "eval.json", plan, METRICS)
    assert json.loads((tmp_path / "eval.json").read_text()) == {
        "experiment": "ppo",
        "models": {"actor": "tiny", "reward": "tiny"},
        "data": "tiny",
        "n_samples": 9,
        "metrics": {
            "reward": {"value": 0.5, "stderr": 0.125},
            "response_length": {"value": 7.0, "stderr": None},
        },
    }

"""`load_dataset`: what rows become, and a message for every unusable file or row."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from realrl.config.schema import DatasetConfig
from realrl.data.datasets import Dataset, load_dataset, other_rows
from realrl.data.kinds import DatasetKind
from realrl.data.tiny import tiny_tokenizer
from realrl.errors import DataError

TOKENIZER = tiny_tokenizer()
PROMPT, ANSWER, PAIR = DatasetKind.PROMPT, DatasetKind.PROMPT_ANSWER, DatasetKind.PREFERENCE_PAIR
UNPAIRED = DatasetKind.UNPAIRED
CHAT = [{"role": "user", "content": "hi"}]
RENDERED = "<|user|>hi<|end|><|assistant|>"


def write(path: Path, rows: list[Any]) -> Path:
    """Rows in the format that the suffix names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def load(path: Path | str, kind: DatasetKind = PROMPT, **options: Any) -> Dataset:
    return load_dataset(DatasetConfig(path=str(path), **options), kind, TOKENIZER)


def texts(dataset: Dataset, key: str = "input_ids") -> list[list[str]]:
    """Per sample, per sequence, decoded."""
    sample = dataset.samples(dataset.row_ids, range(len(dataset)))
    return [[TOKENIZER.decode(tokens) for tokens in sequences] for sequences in sample.sequences(key)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_formats_agree(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"d{suffix}", [{"prompt": "one", "id": "x", "other": 1}, {"prompt": "zwö", "id": "y"}])
    dataset = load(path)
    assert dataset.row_ids == ("x", "y")
    assert texts(dataset, "prompt_ids") == [["one"], ["zwö"]]
    assert (len(dataset), dataset.n_dropped, dataset.notes) == (2, 0, ())


def test_prompts(tmp_path: Path) -> None:
    sample = load(write(tmp_path / "d.jsonl", [{"prompt": "ab"}, {"prompt": "c"}])).samples(["1/1", "1/0"], [1, 0])
    assert sample.keys == PROMPT.keys
    assert sample.ids == ("1/1", "1/0")
    assert sample["prompt_ids"].tolist() == [99, 97, 98]
    assert sample["prompt_ids"].dtype == torch.int64


def test_other_fields_of_a_prompt_are_its_metadata(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "answer": 4, "tags": ["é", None], "id": "x"}, {"prompt": "c"}, {"prompt": "d", "n": 1.5}]
    sample = load(write(tmp_path / "d.jsonl", rows)).samples(["s", "t", "u"], [2, 0, 1])
    found = [json.loads(bytes(part.tolist())) for part in sample.samples("metadata")]
    assert found == [{"n": 1.5}, {"answer": 4, "tags": ["é", None]}, {}]
    assert sample["metadata"].dtype == torch.uint8
    assert load(tmp_path / "d.jsonl").max_token_id == ord("d")


def test_the_digest_is_of_what_rows_hold(tmp_path: Path) -> None:
    def digest(rows: list[dict[str, Any]], kind: DatasetKind = PROMPT, name: str = "d.jsonl") -> str:
        return load(write(tmp_path / name, rows), kind).digest

    row, answered = {"prompt": "ab"}, {"prompt": "ab", "answer": "c"}
    assert digest([row, row]) == digest([row, row], name="other.json")
    many = ([row], [row, row], [{"prompt": "ac"}], [{"prompt": "ab", "n": 1}], [{"prompt": "ab", "n": 2}])
    labels = [{**answered, "label": True}, {**answered, "label": False}]
    digests = [digest(rows) for rows in many]
    digests += [digest([answered], ANSWER), digest([{"prompt": "a", "answer": "bc"}], ANSWER)]
    digests += [digest(labels, UNPAIRED), digest(labels[::-1], UNPAIRED)]
    assert len(set(digests)) == len(digests)


def test_values_that_json_lacks_become_text(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", [{"prompt": "a", "on": datetime(2024, 2, 29, 12), "n": Decimal("1.5")}])
    [row] = [json.loads(bytes(part.tolist())) for part in load(path).samples(["s"], [0]).samples("metadata")]
    assert row == {"on": "2024-02-29T12:00:00", "n": "1.5"}


@pytest.mark.parametrize("field", ["answer", "response", "completion"])
def test_answers_end_and_are_masked(tmp_path: Path, field: str) -> None:
    sample = load(write(tmp_path / "d.jsonl", [{"prompt": "ab", field: "xyz"}]), ANSWER).samples(["s"], [0])
    assert sample.keys == ANSWER.keys
    assert sample["input_ids"].tolist() == [97, 98, 120, 121, 122, 256]
    assert sample["prompt_mask"].tolist() == [True, True, False, False, False, False]


def test_pairs_are_two_sequences_chosen_first(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "good", "rejected": "no"}, {"prompt": "q", "chosen": "a", "rejected": "b"}]
    sample = load(write(tmp_path / "d.jsonl", rows), PAIR).samples(["s", "t"], [0, 1])
    assert sample.keys == PAIR.keys
    assert sample.seqlens["input_ids"] == sample.seqlens["prompt_mask"] == ((6, 4), (3, 3))
    assert texts(load(tmp_path / "d.jsonl", PAIR)) == [["pgood<|end|>", "pno<|end|>"], ["qa<|end|>", "qb<|end|>"]]
    assert sample["prompt_mask"][:10].tolist() == [True, *[False] * 5, True, *[False] * 3]


def test_an_unpaired_row_has_its_label_and_another_row_s_answer(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "answer": "good", "label": True},
        {"prompt": "p", "completion": "bad", "label": False},
        {"prompt": "q", "answer": "so", "label": False},
    ]
    dataset = load(write(tmp_path / "d.jsonl", rows), UNPAIRED)
    end = "<|end|>"
    assert texts(dataset) == [[f"pgood{end}", f"pso{end}"], [f"pbad{end}", f"pso{end}"], [f"qso{end}", f"qgood{end}"]]
    sample = dataset.samples(["s", "t"], [2, 0])
    assert sample.keys == UNPAIRED.keys
    assert sample["label"].tolist() == [False, True]
    assert sample["prompt_mask"][:8].tolist() == [True, False, False, False, True, False, False, False]
    assert dataset.samples([], [])["label"].tolist() == []


def test_partners_are_usable_rows_and_do_not_depend_on_what_is_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": p, "answer": a, "label": True} for p, a in (("a", "1"), ("b", "long answer"), ("c", "3"))]
    dataset = load(write(tmp_path / "d.jsonl", rows), UNPAIRED, max_answer_tokens=4)
    assert dataset.row_ids == ("0", "2")
    assert texts(dataset) == [["a1<|end|>", "a3<|end|>"], ["c3<|end|>", "c1<|end|>"]]
    alone = dataset.samples(["s"], [1])
    assert alone == dataset.samples(["r", "s"], [0, 1]).select(["s"])
    with pytest.raises(DataError, match="has a single usable row"):
        load(write(tmp_path / "one.jsonl", rows[:1]), UNPAIRED)


@pytest.mark.parametrize(
    ("prompts", "others"),
    [
        ("ab", [1, 0]),
        ("abc", [1, 2, 0]),
        ("aab", [2, 2, 0]),
        ("abb", [1, 0, 0]),
        ("aba", [1, 2, 1]),
        ("aabba", [2, 2, 4, 4, 2]),
        ("aaa", [1, 2, 0]),
    ],
)
def test_partners_have_other_prompts(prompts: str, others: list[int]) -> None:
    assert other_rows(prompts) == others


@pytest.mark.parametrize("extra", [{}, {"prompt": ""}, {"prompt": None}])
def test_a_pair_may_stand_alone(tmp_path: Path, extra: dict[str, Any]) -> None:
    dataset = load(write(tmp_path / "d.jsonl", [{"chosen": "good", "rejected": "bad", **extra}]), PAIR)
    assert texts(dataset) == [["good<|end|>", "bad<|end|>"]]
    assert not dataset.samples(["s"], [0])["prompt_mask"].any()


def test_an_incomplete_answer_does_not_end(tmp_path: Path) -> None:
    rows = [{"chosen": "a", "rejected": "b", "complete": complete} for complete in (True, False)]
    dataset = load(write(tmp_path / "d.jsonl", rows), PAIR)
    assert texts(dataset) == [["a<|end|>", "b<|end|>"], ["a", "b"]]


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT, "chosen": [{"role": "assistant", "content": "yes"}], "rejected": "no"}]
    dataset = load(write(tmp_path / "d.jsonl", rows), PAIR)
    assert texts(dataset) == [[f"{RENDERED}yes<|end|>", f"{RENDERED}no<|end|>"]]
    assert dataset.samples(["s"], [0]).select(["s"])["prompt_mask"].sum() == 2 * (5)


def test_strings_go_through_the_chat_template_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "hi"}])
    assert texts(load(path, chat_template=True), "prompt_ids") == [[RENDERED]]
    assert texts(load(path), "prompt_ids") == [["hi"]]


def test_templated_and_plain_rows_keep_their_order(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": CHAT, "answer": "2"}, {"prompt": "c", "answer": "3"}]
    dataset = load(write(tmp_path / "d.jsonl", rows), ANSWER)
    assert texts(dataset) == [["a1<|end|>"], [f"{RENDERED}2<|end|>"], ["c3<|end|>"]]


def test_a_row_may_appear_under_several_ids(tmp_path: Path) -> None:
    sample = load(write(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": "b"}])).samples(["1/0", "2/0"], [0, 0])
    assert sample["prompt_ids"].tolist() == [97, 97]
    assert load(tmp_path / "d.jsonl").samples([], []).n_rows("prompt_ids") == 0


def test_blank_lines_and_byte_order_marks_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\n\n')
    assert load(tmp_path / "d.jsonl").row_ids == ("0", "1")


def test_long_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        {"id": "fits", "prompt": "1234", "answer": "123"},
        {"id": "long prompt", "prompt": "12345", "answer": "1"},
        {"id": "both", "prompt": "12345", "answer": "12345"},
        {"id": "long answer", "prompt": "1", "answer": "1234"},
    ]
    dataset = load(write(tmp_path / "d.jsonl", rows), ANSWER, max_prompt_tokens=4, max_answer_tokens=4)
    assert dataset.row_ids == ("fits",)
    assert dataset.n_dropped == 3
    assert dataset.notes == (
        "2 of 4 prompts longer than 4 tokens were dropped",
        "1 of 4 answers longer than 4 tokens was dropped",
    )
    assert texts(dataset) == [["1234123<|end|>"]]


def test_a_long_rejected_answer_drops_the_pair(tmp_path: Path) -> None:
    rows = [{"chosen": "a", "rejected": "b"}, {"chosen": "a", "rejected": "bbbb"}]
    assert load(write(tmp_path / "d.jsonl", rows), PAIR, max_answer_tokens=4).n_dropped == 1


@pytest.mark.parametrize("kind", DatasetKind)
def test_tiny_needs_no_file(kind: DatasetKind) -> None:
    dataset = load("tiny", kind)
    assert len(dataset) == 512
    assert dataset.samples(["a", "b"], [0, 511]).keys == kind.keys


# ---------------------------------------------------------------- refusals

GOOD = {"prompt": "p"}


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (PROMPT, "text", r"d.jsonl, line 2 is a JSON string, not an object"),
        (PROMPT, 3, r"line 2 is a JSON number, not an object"),
        (PROMPT, None, r"line 2 is a JSON null, not an object"),
        (PROMPT, {"promt": "a"}, r"line 2 has no \"prompt\"; its fields are 'promt'. Did you mean 'promt'"),
        (PROMPT, {}, r"line 2 has no \"prompt\"; it is an empty object"),
        (PROMPT, {"prompt": " \n"}, r"line 2 has an empty prompt"),
        (PROMPT, {"prompt": 5}, r"line 2 has a prompt of type int"),
        (PROMPT, {"prompt": []}, r"line 2 has a prompt without messages"),
        (PROMPT, {"prompt": [*CHAT, "hi"]}, r"line 2: message 2 of its prompt is not an object"),
        (PROMPT, {"prompt": [{"role": "user"}]}, r"line 2: message 1 of its prompt is not an object"),
        (PROMPT, {"prompt": "a", "id": [1]}, r"line 2 has an id that is neither a string nor a number: \[1\]"),
        (PROMPT, {"prompt": "a", "id": True}, r"line 2 has an id that is neither"),
        (PROMPT, {"prompt": "a", "id": "0"}, r"line 2 has the id '0', which .*d.jsonl, line 1 has already"),
        (PROMPT, {"prompt": "a", "complete": 1}, r"line 2 has a field complete that is neither true nor false: 1"),
        (ANSWER, {"prompt": "a"}, r"line 2 has no \"answer\"; its fields are 'prompt'"),
        (ANSWER, {"prompt": "a", "answer": ""}, r"line 2 has an empty answer"),
        (ANSWER, {"prompt": "a", "answer": 3}, r"line 2 has a answer of type int"),
        (ANSWER, {"prompt": "a", "answer": "b", "response": "c"}, r"line 2 has both 'answer' and 'response'"),
        (ANSWER, {"prompt": "a", "answer": CHAT}, r"line 2: its answer must be one assistant message"),
        (PAIR, {"prompt": "a", "chosen": "b"}, r"line 2 has no \"rejected\""),
        (PAIR, {"prompt": "a", "rejected": "b"}, r"line 2 has no \"chosen\""),
        (UNPAIRED, {"prompt": "a", "answer": "b"}, r"line 2 has no \"label\"; its fields are 'prompt', 'answer'"),
        (UNPAIRED, {"prompt": "a", "answer": "b", "label": 1}, r"line 2 has a label that is neither true nor false: 1"),
        (UNPAIRED, {"prompt": "a", "label": True}, r"line 2 has no \"answer\""),
    ],
)
def test_unusable_row(tmp_path: Path, kind: DatasetKind, row: object, message: str) -> None:
    fields = {"answer": "x"} if kind in (ANSWER, UNPAIRED) else {"chosen": "x", "rejected": "y"}
    good = {**GOOD, **fields, **({"label": True} if kind is UNPAIRED else {})}
    path = write(tmp_path / "d.jsonl", [good, row])
    with pytest.raises(DataError, match=message) as caught:
        load(path, kind)
    assert caught.value.exit_code == 2
    assert str(path) in caught.value.message


def test_not_json_on_line_17(tmp_path: Path) -> None:
    lines = [json.dumps(GOOD)] * 20
    lines[16] = '{"prompt": "unfinished'
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"d.jsonl, line 17 is not JSON: .*\n  A .jsonl file holds one JSON object"):
        load(tmp_path / "d.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"prompt": "a"},\n{"prompt" "b"}]', "d.json, line 2 is not JSON: Expecting ':' delimiter"),
        (b'{"prompt": "a"}\n{"prompt": "b"}', "line 2 follows a complete JSON value\n  Call the file .jsonl"),
        (b'{"prompt": "a"}', "holds one JSON object, not a list of objects"),
        (b'[{"prompt": "\xff"}]', "is not JSON: .*utf-8"),
        (b'[{"prompt": "a"}, ["b"]]', "d.json, row 2 is a JSON list, not an object"),
        (b"[]", "d.json is empty"),
        (b" ", "d.json is empty"),
        (b"[" * 100_000, "d.json is not JSON: .*recursion"),
    ],
)
def test_broken_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "d.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "d.json")


def test_invalid_utf8_in_json_lines(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n')
    with pytest.raises(DataError, match=r"d.jsonl, line 2 is not JSON"):
        load(tmp_path / "d.jsonl")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"d.jsonl is empty"):
        load(tmp_path / "d.jsonl")


def test_missing_file(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [GOOD])
    with pytest.raises(DataError, match=r"trian.jsonl does not exist. Did you mean 'train.jsonl'"):
        load(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"nowhere/d.jsonl does not exist\.\n"):
        load(tmp_path / "nowhere" / "d.jsonl")


def test_unknown_suffix(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("prompt\na\n")
    with pytest.raises(DataError, match=r"unknown suffix '.csv'\n  Known suffixes: .jsonl, .json, .parquet"):
        load(tmp_path / "d.csv")


def test_broken_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"d.parquet is not a readable parquet file"):
        load(tmp_path / "d.parquet")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow, which is not installed\n  pip install 'realrl\[parquet\]'"):
        load(tmp_path / "d.parquet")


def test_duplicate_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl", [{"prompt": "b", "id": "x"}, {"prompt": "b", "id": "y"}, {"prompt": "b", "id": "x"}]
    )
    with pytest.raises(DataError, match=r"d.jsonl, line 3 has the id 'x', which .*d.jsonl, line 1 has already"):
        load(path)


def test_all_rows_too_long(tmp_path: Path) -> None:
    rows = [{"prompt": "12345", "answer": "1"}, {"prompt": "1234", "answer": "12345"}]
    path = write(tmp_path / "d.jsonl", rows)
    with pytest.raises(DataError, match=r"all 2 prompts of .* longer than 3 tokens\n  .*; the shortest has 4"):
        load(path, max_prompt_tokens=3)
    with pytest.raises(DataError, match=r"no row of .* is left: 1 of 2 prompts .*; 1 of 2 answers"):
        load(path, ANSWER, max_prompt_tokens=4, max_answer_tokens=2)
    with pytest.raises(DataError, match=r"all 2 answers of .*\n  Raise dataset.max_answer_tokens; the shortest has 2"):
        load(path, ANSWER, max_answer_tokens=1)


def test_no_chat_template(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": CHAT}])
    plain = tiny_tokenizer()
    plain.chat_template = None
    with pytest.raises(DataError, match=r"line 1 needs a chat template, and the tokenizer has none"):
        load_dataset(DatasetConfig(path=str(path)), PROMPT, plain)
    plain.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        DataError, match=r"line 1 does not fit: the tokenizer's chat template fails: roles must alternate"
    ):
        load_dataset(DatasetConfig(path=str(path)), PROMPT, plain)


def test_chat_template_without_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"chosen": "a", "rejected": "b"}])
    with pytest.raises(DataError, match=r"line 1 has no prompt to put into the chat template"):
        load(path, PAIR, chat_template=True)


def test_a_tokenizer_that_makes_no_token(tmp_path: Path) -> None:
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"</s>": 0}, [])), eos_token="</s>")
    with pytest.raises(DataError, match=r"the tokenizer makes no token of row '0' of"):
        load_dataset(DatasetConfig(path=str(write(tmp_path / "d.jsonl", [GOOD]))), PROMPT, empty)


# ---------------------------------------------------------------- names of fields, several files


def names(**given: str) -> dict[str, Any]:
    return {"fields": {name: field.replace("__", ".") for name, field in given.items()}}


def test_fields_have_other_names(tmp_path: Path) -> None:
    rows = [{"question": "ab", "meta": {"gold": "xyz", "n": 1}, "key": 7, "prompt": "hidden", "more": [{"a": None}]}]
    path = write(tmp_path / "d.jsonl", rows)
    options = names(prompt="question", answer="meta__gold", id="key")
    assert texts(load(path, ANSWER, **options)) == [["abxyz<|end|>"]]
    dataset = load(path, **options)
    assert (dataset.row_ids, texts(dataset, "prompt_ids")) == (("7",), [["ab"]])
    [row] = [json.loads(bytes(part.tolist())) for part in dataset.samples(["s"], [0]).samples("metadata")]
    assert row == {"meta": {"gold": "xyz", "n": 1}, "more": [{"a": None}], "answer": "xyz"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "qestion"}, "dataset.fields.prompt=qestion: no row of {path} has such a field. "
                                "Did you mean 'question'?\n  Its fields are 'question', 'meta'."),
        ({"prompt": "question", "answer": "meta__none"}, "dataset.fields.answer=meta.none: no row of {path} has such"),
        ({"prompt": "question", "answer": "meta__gold"},
         '{path}, line 2 has no "meta.gold" (dataset.fields.answer); its fields are'),
        ({}, "A row holds prompt and answer, or messages; dataset.fields.NAME=FIELD says what the file calls one of"),
    ],
)  # fmt: skip
def test_names_that_a_file_does_not_have(tmp_path: Path, given: dict[str, str], message: str) -> None:
    path = write(tmp_path / "d.jsonl", [{"question": "ab", "meta": {"gold": "x"}}, {"question": "c", "meta": {}}])
    with pytest.raises(DataError) as caught:
        load(path, ANSWER, **names(**given))
    assert message.format(path=path) in str(caught.value)


def test_rows_of_several_files_begin_with_the_name_of_theirs(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", [{"question": "a"}, {"question": "b", "id": "x"}])
    two = write(tmp_path / "two.json", [{"prompt": "c"}])
    files = {"one": {"path": str(one), **names(prompt="question")}, "two": {"path": str(two)}}
    dataset = load_dataset(DatasetConfig.model_validate({"files": files}), PROMPT, TOKENIZER)
    assert dataset.row_ids == ("one/0", "one/x", "two/0")
    assert texts(dataset, "prompt_ids") == [["a"], ["b"], ["c"]]
    folder = tmp_path / "parts"
    folder.mkdir()
    write(folder / "1.jsonl", [{"prompt": "a"}])
    write(folder / "2.jsonl", [{"prompt": "b"}])
    assert load(folder).row_ids == ("0", "1")

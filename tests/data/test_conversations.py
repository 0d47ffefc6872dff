"""Conversations in rows: what is learned of them, under several chat templates, and messages for unusable ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realrl.config.schema import DatasetConfig
from realrl.data.datasets import Dataset, answer_in, load_dataset
from realrl.data.kinds import DatasetKind
from realrl.data.tiny import tiny_tokenizer
from realrl.errors import DataError

PROMPT, ANSWER, PAIR = DatasetKind.PROMPT, DatasetKind.PROMPT_ANSWER, DatasetKind.PREFERENCE_PAIR
UNPAIRED = DatasetKind.UNPAIRED
END = "<|end|>"
# Closes turns with a line, like ChatML; drops thoughts of earlier answers, like Qwen 3; closes nothing.
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}(hm){% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BARE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


TWO_TURNS = [user("u1"), said("a1"), user("u2"), said("a2")]


def load(folder: Path, rows: list[Any], kind: DatasetKind, template: str = "", **options: Any) -> Dataset:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return load_dataset(DatasetConfig(path=str(path), **options), kind, tokenizer)


def parts(dataset: Dataset) -> list[list[tuple[str, str]]]:
    """Per sequence of the first row: its text in runs of given ("-") and learned ("+") tokens."""
    sample, tokenizer, found = dataset.samples(["s"], [0]), tiny_tokenizer(), []
    for tokens, masks in zip(sample.sequences("input_ids")[0], sample.sequences("prompt_mask")[0], strict=True):
        runs: list[tuple[str, list[int]]] = []
        for token, is_given in zip(tokens.tolist(), masks.tolist(), strict=True):
            sign = "-" if is_given else "+"
            if not runs or runs[-1][0] != sign:
                runs.append((sign, []))
            runs[-1][1].append(token)
        found.append([(sign, tokenizer.decode(ids)) for sign, ids in runs])
    return found


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", [("-", "<|user|>u1<|end|><|assistant|>"), ("+", "a1<|end|>"), ("-", "<|user|>u2<|end|><|assistant|>"),
              ("+", "a2<|end|>")]),
        (CHATML, [("-", "<|user|>u1<|end|>\n<|assistant|>"), ("+", "a1<|end|>"),
                  ("-", "\n<|user|>u2<|end|>\n<|assistant|>"), ("+", "a2<|end|>")]),
        (THINKING, [("-", "<|user|>u1<|end|>\n<|assistant|>"), ("+", "a1<|end|>"),
                    ("-", "\n<|user|>u2<|end|>\n<|assistant|>"), ("+", "(hm)a2<|end|>")]),
        (BARE, [("-", "u:u1\na:"), ("+", "a1\n"), ("-", "u:u2\na:"), ("+", "a2\n<|end|>")]),
    ],
)  # fmt: skip
def test_all_answers_of_a_conversation_are_learned(
    tmp_path: Path, template: str, expected: list[tuple[str, str]]
) -> None:
    dataset = load(tmp_path, [{"messages": [*TWO_TURNS, user("thanks")]}], ANSWER, template)
    assert parts(dataset) == [expected]
    assert dataset.prompt_lens[0] == len(tiny_tokenizer().encode(expected[0][1]))


@pytest.mark.parametrize("template", ["", CHATML])
def test_one_turn_is_a_prompt_with_its_answer(tmp_path: Path, template: str) -> None:
    forms = [
        {"prompt": [user("hi")], "answer": "yes"},
        {"prompt": [user("hi")], "completion": [said("yes")]},
        {"prompt": [user("hi")], "answer": [user("hi"), said("yes")]},
        {"messages": [user("hi"), said("yes")]},
        {"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {**said("yes"), "name": None}]},
    ]
    digests = {load(tmp_path, [form], ANSWER, template).digest for form in forms}
    assert len(digests) == 1
    assert parts(load(tmp_path, forms[:1], ANSWER))[0][-1] == ("+", f"yes{END}")


def test_a_system_message_comes_first_and_an_incomplete_answer_does_not_end(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "s"}, *TWO_TURNS], "complete": False}
    found = parts(load(tmp_path, [row], ANSWER, CHATML))[0]
    assert found[0] == ("-", "<|system|>s<|end|>\n<|user|>u1<|end|>\n<|assistant|>")
    assert (found[1], found[-1]) == (("+", f"a1{END}"), ("+", "a2"))


def test_what_a_tool_says_is_given(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    messages = [user("1+1"), call, {"role": "tool", "content": "2"}, said("two")]
    template = CHATML.replace("{{ m.content | trim }}", "{% if m.tool_calls %}!{{ m.tool_calls[0].name }}{% endif %}"
                              "{{ m.content }}")  # fmt: skip
    assert parts(load(tmp_path, [{"messages": messages}], ANSWER, template))[0][1:] == [
        ("+", f"!add{END}"), ("-", f"\n<|tool|>2{END}\n<|assistant|>"), ("+", f"two{END}"),
    ]  # fmt: skip


def test_a_conversation_as_prompt_leaves_its_last_answer_out(tmp_path: Path) -> None:
    dataset = load(tmp_path, [{"messages": TWO_TURNS, "source": {"n": [1, {"a": None}]}}], PROMPT)
    sample = dataset.samples(["s"], [0])
    text = tiny_tokenizer().decode(sample["prompt_ids"])
    assert text == "<|user|>u1<|end|><|assistant|>a1<|end|><|user|>u2<|end|><|assistant|>"
    metadata = bytes(sample["metadata"].tolist())
    assert json.loads(metadata) == {
        "prompt": TWO_TURNS[:3], "messages": TWO_TURNS, "source": {"n": [1, {"a": None}]},
    }  # fmt: skip
    assert answer_in(metadata) == "a2"


def test_messages_of_a_prompt_do_not_change_what_a_checkpoint_knows_of_its_data(tmp_path: Path) -> None:
    """Digests of the first version that had metadata; a resumed run compares them."""
    rows = [{"prompt": "ab", "answer": 4, "id": "x"}, {"prompt": [user("hi")], "n": 1.5}]
    assert load(tmp_path, rows, PROMPT).digest == "b1be8f86c8e67d8b"
    pairs = [{"prompt": [user("hi")], "chosen": [said("yes")], "rejected": "no"}]
    assert load(tmp_path, pairs, PAIR).digest == "eff4c93f38b279ef"


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [user("u"), said("yes")], "rejected": [user("u"), said("no")]},
        {"prompt": "u", "chosen": [user("u"), said("yes")], "rejected": [user("u"), said("no")]},
        {"prompt": [user("u")], "chosen": [user("u"), said("yes")], "rejected": [said("no")]},
        {"prompt": [user("u")], "chosen": [said("yes")], "rejected": "no"},
    ],
)
def test_pairs_of_conversations_share_their_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    assert parts(load(tmp_path, [row], PAIR)) == [
        [("-", "<|user|>u<|end|><|assistant|>"), ("+", f"{answer}{END}")] for answer in ("yes", "no")
    ]


def test_pairs_part_at_the_first_answer_that_differs(tmp_path: Path) -> None:
    row = {"chosen": TWO_TURNS, "rejected": [*TWO_TURNS[:2], user("other"), said("bad")]}
    chosen, rejected = parts(load(tmp_path, [row], PAIR))
    assert chosen[0] == rejected[0] == ("-", "<|user|>u1<|end|><|assistant|>")
    assert [text for sign, text in rejected if sign == "+"] == [f"a1{END}", f"bad{END}"]
    same_first = {"chosen": TWO_TURNS, "rejected": [*TWO_TURNS[:3], said("bad")]}
    chosen, rejected = parts(load(tmp_path, [same_first], PAIR))
    assert [text for sign, text in rejected if sign == "+"] == [f"bad{END}"]
    assert chosen[0] == rejected[0]


def test_a_label_judges_the_last_answer(tmp_path: Path) -> None:
    rows = [{"messages": TWO_TURNS, "label": True}, {"prompt": [user("q")], "answer": "b", "label": False}]
    own, other = parts(load(tmp_path, rows, UNPAIRED))
    assert [text for sign, text in own if sign == "+"] == [f"a2{END}"]
    assert [text for sign, text in other if sign == "+"] == [f"b{END}"]


def test_long_conversations_are_dropped_by_what_follows_their_prompt(tmp_path: Path) -> None:
    rows = [{"messages": TWO_TURNS}, {"messages": TWO_TURNS[:2]}]
    dataset = load(tmp_path, rows, ANSWER, max_answer_tokens=5)
    assert (dataset.row_ids, dataset.notes) == (("1",), ("1 of 2 answers longer than 5 tokens was dropped",))


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (ANSWER, {"messages": "hi"}, "has a messages of type str"),
        (ANSWER, {"messages": []}, "has a messages without messages"),
        (ANSWER, {"messages": [user("u")]}, "its messages has no assistant message\n  Write the messages in"),
        (ANSWER, {"messages": [said("a"), user("u"), said("b")]}, "its messages has no message before the answer"),
        (ANSWER, {"messages": [{"role": "user"}]}, "message 1 of its messages is not an object with the strings role"),
        (ANSWER, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1 of its messages is not"),
        (ANSWER, {"messages": [{"from": 5, "value": "x"}]}, "message 1 of its messages is not"),
        (PROMPT, {"messages": [said("a")]}, "its messages has no message before the answer"),
        (PAIR, {"chosen": TWO_TURNS, "rejected": [user("x"), said("b")]}, "its chosen and its rejected do not begin"),
        (PAIR, {"chosen": TWO_TURNS, "rejected": TWO_TURNS[:3]}, "its rejected must be one assistant message, or a"),
        (UNPAIRED, {"messages": TWO_TURNS}, 'has no "label"'),
    ],
)  # fmt: skip
def test_unusable_conversations(tmp_path: Path, kind: DatasetKind, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, [row], kind)
    assert message in str(caught.value)
    assert f"{tmp_path}/d.jsonl, line 1" in caught.value.message


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages | length }}", "renders the first 1 messages in another way when an answer follows"),
        (THINKING.replace("<|end|>", ""), "and closes it with no special token, so that its end cannot be told"),
        ("{{ 1 / 0 }}", "chat template fails: division by zero"),
    ],
)
def test_templates_that_hide_turns(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(DataError, match=r"d\.jsonl, line 1 does not fit: ") as caught:
        load(tmp_path, [{"messages": TWO_TURNS}], ANSWER, template)
    assert message in str(caught.value)

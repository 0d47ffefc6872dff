"""The tiny preset's tokenizer and toy task."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.data.kinds import DatasetKind
from realrl.data.tiny import VOCAB_SIZE, tiny_tokenizer, toy_reward, toy_rows
from realrl.data.tokenizer import encode_batch

TOKENIZER = tiny_tokenizer()
EOS_ID, PAD_ID = 256, 257


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40).filter(lambda text: "<|" not in text))
def test_tokens_are_bytes(text: str) -> None:
    """All text but the names of special tokens."""
    (ids,) = encode_batch(TOKENIZER, [text], with_start=True)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_every_byte_has_its_token() -> None:
    assert len(TOKENIZER) == VOCAB_SIZE == 260
    assert (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (EOS_ID, PAD_ID)
    assert encode_batch(TOKENIZER, ["a<|end|>"], with_start=False) == [[97, 256]]
    assert TOKENIZER.decode([97, 256], skip_special_tokens=True) == "a"


def test_transformers_reads_the_saved_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert again.is_fast
    assert again("Hé\n")["input_ids"] == list("Hé\n".encode())
    assert (again.eos_token_id, again.pad_token_id) == (EOS_ID, PAD_ID)
    chat = [{"role": "user", "content": "hi"}]
    rendered = again.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|user|>hi<|end|><|assistant|>"


def reward_of(text: str, *, ended: bool = False) -> float:
    return toy_reward([], [*text.encode(), *([EOS_ID] if ended else [])])


def test_reward_is_the_fraction_of_letters() -> None:
    assert reward_of("abcz") == 1.0
    assert reward_of("AB1!") == 0.0
    assert reward_of("a1") == 0.5
    assert reward_of("") == 0.0
    assert reward_of("", ended=True) == 0.0
    assert reward_of("abc", ended=True) == 0.75
    assert toy_reward(torch.tensor([1]), torch.tensor([97, 200])) == 0.5


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
def test_reward_is_between_0_and_1(ids: list[int]) -> None:
    assert 0.0 <= toy_reward([], ids) <= 1.0


@pytest.mark.parametrize("kind", DatasetKind)
def test_rows_depend_on_the_seed_alone(kind: DatasetKind) -> None:
    rows = toy_rows(kind, 20, seed=3)
    assert rows == toy_rows(kind, 20, seed=3) == toy_rows(kind, 40, seed=3)[:20]
    assert rows != toy_rows(kind, 20, seed=4)
    assert len({row["id"] for row in rows}) == 20
    assert len({row["prompt"] for row in rows}) > 10


def test_rows_agree_with_the_reward() -> None:
    for row in toy_rows(DatasetKind.PROMPT_ANSWER, 100, seed=0):
        assert reward_of(row["answer"]) == 1.0
    for row in toy_rows(DatasetKind.PREFERENCE_PAIR, 100, seed=0):
        assert reward_of(row["chosen"]) == 1.0
        assert reward_of(row["rejected"]) <= 1 / 3
        assert len(row["chosen"]) == len(row["rejected"])

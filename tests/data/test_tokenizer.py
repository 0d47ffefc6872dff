"""`load_tokenizer`: folders that work, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from realrl.data.tiny import tiny_tokenizer
from realrl.data.tokenizer import encode_batch, load_tokenizer
from realrl.errors import AssetError


def write_words(folder: Path, *, post: object = None, **settings: str) -> Path:
    """A word-level tokenizer folder."""
    words = Tokenizer(models.WordLevel({"[U]": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="[U]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if post is not None:
        words.post_processor = post
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_tiny_needs_no_folder() -> None:
    assert len(load_tokenizer("tiny")) == 260


def test_a_folder_is_read_and_padding_defaults_to_the_end_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_words(tmp_path / "m", eos_token="</s>")))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    assert encode_batch(tokenizer, ["a b", "b"], with_start=True) == [[3, 4], [4]]
    assert encode_batch(tokenizer, [], with_start=True) == []
    assert tokenizer.decode([3, 4]) == "a b"


def test_a_padding_token_is_kept(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token_id == 257


def test_the_start_token_is_added_to_prompts_and_the_end_token_is_not(tmp_path: Path) -> None:
    post = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    folder = write_words(tmp_path / "m", post=post, bos_token="<s>", eos_token="</s>")
    tokenizer = load_tokenizer(str(folder))
    assert encode_batch(tokenizer, ["a", ""], with_start=True) == [[1, 3], [1]]
    assert encode_batch(tokenizer, ["a", ""], with_start=False) == [[3], []]


def test_a_start_token_that_equals_the_end_token_is_kept(tmp_path: Path) -> None:
    post = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    folder = write_words(tmp_path / "m", post=post, bos_token="</s>", eos_token="</s>")
    assert encode_batch(load_tokenizer(str(folder)), ["a"], with_start=True) == [[2, 3]]


# ---------------------------------------------------------------- refusals


def test_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(AssetError, match=r"smolm2 does not exist. Did you mean 'smollm2'") as caught:
        load_tokenizer(str(tmp_path / "smolm2"))
    assert caught.value.exit_code == 2
    with pytest.raises(AssetError, match=r"does not exist"):
        load_tokenizer(str(tmp_path / "no" / "such"))


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(AssetError, match=r"f is a file, not a folder"):
        load_tokenizer(str(tmp_path / "f"))


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AssetError, match=r"holds no tokenizer: expected tokenizer.json, found config.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "Nonsense"}}', "\x00"])
def test_broken_tokenizer_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(AssetError, match=r"cannot be read: .*\n  Fetch its files again"):
        load_tokenizer(str(tmp_path))


def test_cut_off_tokenizer_file(tmp_path: Path) -> None:
    file = write_words(tmp_path / "m", eos_token="</s>") / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(AssetError, match=r"cannot be read"):
        load_tokenizer(str(file.parent))


def test_no_end_token(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"has no end-of-sequence token"):
        load_tokenizer(str(write_words(tmp_path / "m")))


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text("raise SystemExit(0)")
    with pytest.raises(AssetError, match=r"cannot be read"):
        load_tokenizer(str(tmp_path))


def test_deep_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(AssetError, match=r"cannot be read: .*recursion"):
        load_tokenizer(str(tmp_path))

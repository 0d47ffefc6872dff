"""Files beside a model that its checkpoints keep."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from realrl.model.files.companions import read_companions, write_companions


def folder_with(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_the_first_folder_goes_first_and_the_others_complete_it(tmp_path: Path) -> None:
    model = folder_with(tmp_path / "model", generation_config__json="new", config__json="{}", README__md="hello")
    checkpoint = folder_with(tmp_path / "checkpoint", generation_config__json="old", merges__txt="a b")
    found = read_companions([model, checkpoint], generates=True)
    assert found == {"generation_config.json": b"new", "merges.txt": b"a b"}
    assert read_companions([model, tmp_path / "nowhere"], generates=False) == {}, "a critic samples nothing"


def test_what_cannot_be_kept_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = folder_with(tmp_path / "model")
    with (model / "tokenizer.model").open("wb") as file:
        file.truncate((32 << 20) + 1)
    (model / "vocab.json").mkdir()
    with caplog.at_level(logging.WARNING):
        assert read_companions([model], generates=True) == {}
    assert "tokenizer.model is not kept in checkpoints: it has more than 33554432 bytes" in caplog.text


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "actor", chat_template__jinja="the tokenizer's")
    write_companions({"chat_template.jinja": b"old", "vocab.txt": b"a"}, folder)
    assert (folder / "chat_template.jinja").read_text() == "the tokenizer's"
    assert (folder / "vocab.txt").read_bytes() == b"a"

"""Files and folders that a configuration names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realrl.config.compose import compose
from realrl.config.paths import check_paths
from realrl.errors import AssetError, ConfigError, DataError
from tests.config.declared import experiment

LONG = 300 * "x"  # no file system takes such a name


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(*overrides: str) -> None:
    check_paths(compose(experiment(), overrides), cache_dir=Path("cache"))


def test_what_is_there_passes(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("{}\n")
    check()
    check("models.actor.path=model", "dataset.path=data.jsonl", "run_dir=new/deep", "resume=auto")
    check(f"resume={tmp_path}")


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        (
            "models.actor.path=nowhere",
            AssetError,
            r"models\.actor\.path=nowhere: there is no such folder\n  Give a fol",
        ),
        ("models.ref.path=empty", AssetError, r"models\.ref\.path=empty: there is no config\.json in this folder"),
        ("models.actor.path=cache/model", AssetError, r"no such folder\n  run: python scripts/fetch_assets\.py"),
        ("models.ref.path=runs/a/checkpoints/step_3/ref", AssetError, "An earlier run writes it there: train that"),
        ("models.ref.path='~/model'", AssetError, "The shell did not expand ~"),
        (
            "dataset.path=nowhere.jsonl",
            DataError,
            r"dataset\.path=nowhere\.jsonl: there is no such file\n  Give a JSON",
        ),
        ("dataset.path=empty", DataError, r"dataset\.path=empty: is a folder, not a file"),
        ("dataset.path=cache/a.jsonl", AssetError, r"no such file\n  run: python scripts/fetch_assets\.py"),
        (
            "resume=nowhere",
            ConfigError,
            r"resume=nowhere: there is no such folder; use never, auto, or the folder of a",
        ),
        ("run_dir=file/run", ConfigError, r"run_dir=file/run: '.*/file' is not a folder"),
        (f"run_dir={LONG}", ConfigError, "is no usable path: File name too long"),
        (f"resume={LONG}", ConfigError, "there is no such folder"),
        (f"models.actor.path={LONG}", AssetError, "there is no such folder"),
        (f"dataset.path={LONG}", DataError, "there is no such file"),
    ],
)
def test_what_is_missing(tmp_path: Path, override: str, error: type[Exception], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=message):
        check(override)


def test_a_folder_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere, so ask for a refusal
    with pytest.raises(ConfigError, match=r"run_dir=out: no permission to write in '.*'; give another folder"):
        check("run_dir=out")

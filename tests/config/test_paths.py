"""Files and folders that a configuration names."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from realrl.config.compose import compose
from realrl.config.paths import check_paths, find_data_files, with_hub_names
from realrl.config.schema import RunConfig
from realrl.errors import AssetError, ConfigError, DataError, UsageError
from realrl.experiment.discovery import load_experiment
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
        ("dataset.path=empty", DataError, r"dataset\.path: empty holds no file with one of the suffixes"),
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


@pytest.mark.parametrize("name", ["run", "run/checkpoints/latest"])
def test_a_run_is_no_model_but_has_some(tmp_path: Path, name: str) -> None:
    for folder in ("run", "run/checkpoints/latest/actor"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    given = "run/checkpoints/latest/actor"
    with pytest.raises(
        AssetError, match=rf"models\.actor\.path={name}: .* holds some\n  Give one of them, such as {given}"
    ):
        check(f"models.actor.path={name}")
    check(f"models.actor.path={given}")


def test_a_folder_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere, so ask for a refusal
    with pytest.raises(ConfigError, match=r"run_dir=out: no permission to write in '.*'; give another folder"):
        check("run_dir=out")


def test_a_folder_that_cannot_be_made_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^run_dir=/proc/x: it cannot be made: No such file or directory; give another"
    ):
        check("run_dir=/proc/x")
    check(f"run_dir={tmp_path}/a/b")
    assert list(tmp_path.iterdir()) == []  # what was made is gone again


# ---------------------------------------------------------------- folders, patterns, names of the Hub


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("files", "path", "expected"),
    [
        (("b.jsonl", "a.jsonl", "README.md", "dataset_infos.json"), "", ["a.jsonl", "b.jsonl"]),
        (("data/train-00001.parquet", "data/train-00000.parquet", "data/test-0.parquet"), "",
         ["data/train-00000.parquet", "data/train-00001.parquet"]),
        (("data/train-0.parquet", "data/test-0.parquet"), "/data/test*", ["data/test-0.parquet"]),
        (("train/0.jsonl", "test/0.jsonl"), "", ["train/0.jsonl"]),
        (("x/a.jsonl", "y/b.json"), "/*/*.json*", ["x/a.jsonl", "y/b.json"]),
        (("constraint.jsonl", "one.jsonl"), "", ["constraint.jsonl", "one.jsonl"]),
    ],
)  # fmt: skip
def test_files_of_folders_and_patterns(tmp_path: Path, files: tuple[str, ...], path: str, expected: list[str]) -> None:
    make(tmp_path, *files)
    assert find_data_files(f"{tmp_path}{path}") == [str(tmp_path / name) for name in expected]


def test_tasks_with_settings_are_no_pattern() -> None:
    tasks = "reasoning_gym:chain_sum+syllogism?size=100&chain_sum.max_terms=2"
    assert find_data_files(tasks) == [tasks]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("readme.txt",), "holds no file with one of the suffixes .jsonl, .json, .parquet"),
        (("main/train-0.parquet", "socratic/train-0.parquet"), "holds files in several folders or formats: "),
        (("a.jsonl", "a.parquet"), "Name one of them, or all under dataset.files."),
    ],
)
def test_folders_that_leave_a_choice(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        find_data_files(str(make(tmp_path, *files)))


def test_a_folder_of_too_many_files_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrl.config.paths._MOST_ENTRIES", 2)
    with pytest.raises(DataError, match="holds more than 2 files and folders"):
        find_data_files(str(make(tmp_path, "a.jsonl", "b.jsonl", "c.jsonl")))


def hub_with(folder: Path) -> Path:
    """A cache of huggingface_hub, as it lays one out."""
    make(folder / "models--org--m", "refs/main", "snapshots/c1/config.json", "snapshots/c2/config.json")
    make(
        folder / "datasets--org--d",
        "refs/main",
        "snapshots/c3/main/train-0.parquet",
        "snapshots/c3/main/test-0.parquet",
    )
    (folder / "models--org--m/refs/main").write_text("c1")
    (folder / "datasets--org--d/refs/main").write_text("c3\n")
    return folder


def composed(overrides: list[str], hub: Path) -> RunConfig:
    return with_hub_names(compose(load_experiment("ppo"), overrides), hub)


def test_names_stand_for_what_the_cache_of_the_hub_holds(tmp_path: Path) -> None:
    hub = hub_with(tmp_path)
    overrides = [
        "models.actor.path=org/m",
        "models.ref.path=org/m@c2",
        "dataset.path=org/d",
        "eval.path=org/d/main/test",
    ]
    config = composed([*overrides, "eval.path=org/d/main/test", "eval.every_steps=1"], hub)
    assert config.models["actor"].path == str(hub / "models--org--m/snapshots/c1")
    assert config.models["ref"].path == str(hub / "models--org--m/snapshots/c2")
    [train], [test] = find_data_files(config.dataset.path), find_data_files(config.eval.path)
    assert (Path(train).name, Path(test).name) == ("train-0.parquet", "test-0.parquet")
    check_paths(config, cache_dir=tmp_path / "cache")
    files = composed(["dataset.files.a=org/d/main/test-0.parquet"], hub).dataset.files
    assert files["a"].path == str(hub / "datasets--org--d/snapshots/c3/main/test-0.parquet")


def test_what_is_on_disk_or_not_in_the_cache_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make(tmp_path, "org/m/config.json"))
    hub = hub_with(tmp_path / "hub")
    paths = ["models.actor.path=org/m", "models.ref.path=org/other", "dataset.path=org/other"]
    config = composed(paths, hub)
    assert (config.models["actor"].path, config.models["ref"].path) == ("org/m", "org/other")
    assert config.dataset.path == "org/other"


@pytest.mark.parametrize(
    ("override", "command"),
    [
        ("models.actor.path=org/m", "run 'hf download org/m' first"),
        ("models.actor.path=org/m@v2", "run 'hf download org/m --revision v2' first"),
        ("dataset.path=org/d/main", "run 'hf download --repo-type dataset org/d' first"),
    ],
)
def test_a_name_that_is_not_in_the_cache_says_how_to_fetch_it(tmp_path: Path, override: str, command: str) -> None:
    config = composed([override], tmp_path)
    with pytest.raises(UsageError, match="no such name in the local cache of huggingface_hub") as caught:
        check_paths(config, cache_dir=tmp_path / "cache")
    assert f"Nothing is downloaded by name: {command}" in str(caught.value)

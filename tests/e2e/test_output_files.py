"""Results go into regular files, whatever a path names: nothing hangs, no device is replaced, a link stays one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realrl import cli
from tests.helpers.runs import SMALL

Captured = pytest.CaptureFixture[str]
GEN = ("gen", "preset=tiny", "generation.max_new_tokens=4")


@pytest.fixture(params=["pipe", "device", "link to a device"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / "place.svg"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        return "/dev/null"
    else:
        path.symlink_to("/dev/zero")
    return str(path)


def test_no_output_goes_into_what_is_no_file(place: str, tmp_path: Path, capfd: Captured) -> None:
    before = os.lstat(place)
    run = f"run_dir={tmp_path / 'run'}"
    commands = {
        (*GEN, run, "--out", place): "save.generations_path",
        ("run", "ppo", *SMALL, run, f"save.generations_path={place}"): "save.generations_path",
        ("doctor", "ppo", "preset=tiny", "--no-models", "--json", place): "--json",
    }
    if place.endswith(".svg"):
        commands["graph", "ppo", "--out", place] = "the picture"
    for command, what in commands.items():
        assert cli.main(command) == 2, command
        told = capfd.readouterr().err
        assert what in told
        assert "not a file" in told
    after = os.lstat(place)
    assert (before.st_mode, before.st_ino) == (after.st_mode, after.st_ino)


def run_among_pipes(folder: Path, *names: str, launcher: str = "inline") -> int:
    (folder / "logs").mkdir(parents=True)
    for name in names:
        os.mkfifo(folder / name)
    return cli.main(["run", "ppo", *SMALL, "steps=1", f"launcher={launcher}", f"run_dir={folder}"])


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("metrics.jsonl", "inline"),
        ("logs/master.log", "inline"),
        ("logs/worker_0.log", "local"),
        pytest.param("metrics.jsonl", "local", marks=pytest.mark.slow),
        pytest.param("logs/master.log", "local", marks=pytest.mark.slow),
    ],
)
def test_pipes_in_a_run_folder_end_the_run_with_a_message(
    name: str, launcher: str, tmp_path: Path, capfd: Captured
) -> None:
    assert run_among_pipes(tmp_path / "run", name, launcher=launcher) in (1, 2)
    assert "it is a pipe, not a file" in " ".join(capfd.readouterr().err.split())


def test_pipes_in_a_run_folder_are_set_aside_where_a_new_file_is_made(tmp_path: Path) -> None:
    names = ("config.json", "trace.json")
    assert run_among_pipes(tmp_path / "run", *names) == 0
    assert all((tmp_path / "run" / name).is_file() for name in names)


def test_a_link_to_the_output_stays_one(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").symlink_to("elsewhere.jsonl")
    assert cli.main([*GEN, "launcher=inline", "--out", str(tmp_path / "out.jsonl"), f"run_dir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "out.jsonl").is_symlink()
    assert (tmp_path / "elsewhere.jsonl").read_text().count("\n") > 0

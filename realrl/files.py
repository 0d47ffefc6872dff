"""Files that realrl writes and reads again: regular ones only, never a device, a pipe or a socket.

The kind is read from the open file, so that nobody can put another one in its place between the look and the writing.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

CACHE_VARIABLE = "REALRL_CACHE"
_FLAGS = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # to open a pipe must not wait for its other end


def cache_dir() -> Path:
    """Return the cache folder: the environment variable ``REALRL_CACHE``, else ``~/.cache/realrl``.

    Raises:
        RuntimeError: there is no home.
    """
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/realrl").expanduser()


def open_output(path: str | Path, *, append: bool = False) -> FileIO:
    """Open a regular file for writing, and make it if there is none; a link is followed.

    Args:
        append: True writes after what the file holds, False empties it first.

    Raises:
        OSError: the file cannot be opened, or is none; `strerror` says why.
    """
    file = FileIO(_open(path, os.O_RDWR | os.O_CREAT | (os.O_APPEND if append else 0)), "r+b")
    if not append:
        file.truncate(0)
    return file


def open_input(path: str | Path) -> FileIO:
    """Open a regular file for reading. Raises as `read_input` does."""
    return FileIO(_open(path, os.O_RDONLY), "rb")


def read_input(path: str | Path, *, most_bytes: int = -1) -> bytes:
    """Return what a regular file holds, no more than its first `most_bytes` if these are given.

    Raises:
        OSError: as for `open_output`, and if there is no such file.
    """
    with open_input(path) as file:
        return file.read(most_bytes)


def write_output(path: str | Path, content: bytes, *, append: bool = False) -> None:
    """Write all of `content`. Arguments and errors are those of `open_output`."""
    with open_output(path, append=append) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]


def why_no_output(path: str | Path) -> str:
    """Return the reason why `path`, which exists or not, is no regular file to write to; "" if it may be one."""
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return _why_not(kind)


def _open(path: str | Path, flags: int) -> int:
    reason = why_no_output(path)  # before it is opened: that alone can move a tape
    if not reason:
        descriptor = os.open(path, flags | _FLAGS, 0o666)
        reason = _why_not(os.fstat(descriptor).st_mode)
        if not reason:
            os.set_blocking(descriptor, True)
            return descriptor
        os.close(descriptor)
    raise OSError(errno.EINVAL, reason, str(path))


def _why_not(mode: int) -> str:
    if stat.S_ISREG(mode):
        return ""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file"

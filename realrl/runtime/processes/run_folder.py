"""The folder of a run: made for it, and locked against other runs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from realrl.errors import ConfigError

LOCK_FILE = ".lock"
_OWNER_ONLY = 0o700  # rows of the dataset and what users set may be nobody else's


def make_new_folder(base: Path) -> Path:
    """A folder named after the time, and after a number when another run started in the same second."""
    name = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"_{i}" for i in range(1, 1000))):
        with contextlib.suppress(FileExistsError):
            return _make_folder(base / (name + suffix), exist_ok=False)
    raise ConfigError(f"{base} holds a thousand runs of this second", remedy="Choose a folder with run_dir=PATH.")


def _make_folder(folder: Path, *, exist_ok: bool) -> Path:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(_OWNER_ONLY, exist_ok=exist_ok)
    except OSError as err:
        if isinstance(err, FileExistsError) and not exist_ok:
            raise
        raise ConfigError(
            f"run_dir={folder} cannot be made: {err.strerror}", remedy="Choose another folder with run_dir=PATH."
        ) from err
    return folder


def check_checkpoints(folder: Path) -> None:
    """Refuse a folder that is there and cannot hold checkpoints.

    Raises:
        ConfigError: names it.
    """
    reason = ""
    if os.path.lexists(folder) and not folder.is_dir():
        reason = os.strerror(errno.EEXIST)
    elif folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        reason = "no permission to write there"
    if reason:
        raise _no_checkpoints(folder, reason)


def make_checkpoints(folder: Path) -> None:
    """Make the folder now: the first checkpoint may be days away."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as err:
        raise _no_checkpoints(folder, err.strerror or str(err)) from err


def _no_checkpoints(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{folder} cannot hold checkpoints: {reason}",
        remedy="Move it away, or choose another folder with run_dir=PATH.",
    )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[tuple[Path, int]]:
    """Make the folder, and lock it against other runs; gives folder and lock.

    The system takes the lock back when the last process that holds it has ended: this one, or its master. A run that is
    refused leaves no folder behind that was not there before.

    Raises:
        ConfigError: another run holds the lock, or there cannot be one.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = _lock(folder)
    try:
        yield folder, lock
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK_FILE).unlink()
            for path in made:
                path.rmdir()  # unless something is in it
        fcntl.flock(lock, fcntl.LOCK_UN)  # also for copies that user code may have forked
        os.close(lock)


def _lock(folder: Path) -> int:
    """Make the folder and lock its lock file; returns its descriptor."""
    path, lock = folder / LOCK_FILE, -1
    while True:
        _make_folder(folder, exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), path.stat()):
                os.ftruncate(lock, 0)
                os.write(lock, b"%d\n" % os.getpid())
                return lock
            os.close(lock)
        except FileNotFoundError:  # a run that ended meanwhile has removed the file or the folder
            continue
        except BlockingIOError:
            raise _busy(folder, lock) from None
        except OSError as err:
            raise _without_locks(folder, err) from err


def check_unlocked(folder: Path) -> None:
    """Refuse a folder in which a run is at work; nothing is locked or changed.

    Raises:
        ConfigError: names the process of that run, or says why the folder cannot have a lock.
    """
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as err:
        raise _without_locks(folder, err) from err
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(folder, lock) from None
    os.close(lock)


def _busy(folder: Path, lock: int) -> ConfigError:
    return ConfigError(
        f"another run is going on in run_dir={folder}: process {_read_holder(lock)}",
        remedy="Wait for its end, or choose another folder.",
    )


def _without_locks(folder: Path, err: OSError) -> ConfigError:
    return ConfigError(
        f"run_dir={folder} cannot be locked against other runs: {err.strerror}",
        remedy="Choose another folder with run_dir=PATH, on a writable file system that has locks.",
    )


def _read_holder(lock: int) -> str:
    """The process that holds the lock, which may be about to write it down; closes the descriptor."""
    for _ in range(100):
        if holder := os.pread(lock, 32, 0).strip():
            break
        time.sleep(0.01)
    os.close(lock)
    return holder.decode() or "unknown"

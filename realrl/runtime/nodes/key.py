"""The key of a run on several machines: 32 bytes, which admit an agent; and the file by which agents join.

It comes by the environment, or from a file that only its owner can read. Arguments, logs and run folders never have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import stat
from pathlib import Path

from realrl.errors import UsageError
from realrl.files import open_input

KEY_VARIABLE = "REALRL_KEY"
KEY_BYTES = 32
_MOST_BYTES = 16_384


def new_key() -> bytes:
    """Return a key that nobody can guess."""
    return secrets.token_bytes(KEY_BYTES)


def take_key() -> bytes | None:
    """Return the key in the environment, if there is one, and remove it there: children, and /proc, lack it then.

    Raises:
        UsageError: it is no key.
    """
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        return None
    _wipe(KEY_VARIABLE)
    del os.environ[KEY_VARIABLE]
    return _parsed(text, f"the environment variable {KEY_VARIABLE}")


def _wipe(name: str) -> None:
    """Overwrite a variable where the system shows the environment with which this process was started."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(name.encode())
    if place:
        ctypes.memset(place, ord("x"), len(ctypes.string_at(place)))


def _parsed(text: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(
            f"{where} holds no key: it has {2 * KEY_BYTES} hexadecimal digits",
            remedy="Make one with: realrl node --new-key",
        )
    return key


def write_join_file(path: Path, place: str, key: bytes, run_dir: Path) -> None:
    """Write address and key of a run for its agents; nobody but the owner can read the file.

    One that is there of this run folder, which only one run uses at a time, is what a killed run has left.

    Raises:
        UsageError: it cannot be written, or is there already for another run.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _run_dir_of(path) == str(run_dir):
            path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = "it is there already" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(
            f"cluster.join_file={path} cannot be written: {why}",
            remedy="Choose another file, which all machines can read; or remove it, if no run is going on with it.",
        ) from error
    with os.fdopen(descriptor, "w") as file:
        json.dump({"address": place, "key": key.hex(), "run_dir": str(run_dir)}, file)
        file.write("\n")


def _run_dir_of(path: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError), open_input(path) as file:
        return str(json.loads(file.read(_MOST_BYTES))["run_dir"])
    return None


def read_join_file(path: Path) -> tuple[str, bytes]:
    """Return address and key.

    Raises:
        UsageError: there is no such file, other users can read it, or it is of another kind.
    """
    try:
        with open_input(path) as file:
            status, text = os.fstat(file.fileno()), file.read(_MOST_BYTES)
    except OSError as error:
        raise UsageError(
            f"--join {path}: {error.strerror}", remedy="`realrl run` with launcher=external tells the file's name."
        ) from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(f"--join {path}: other users can read this key", remedy=f"chmod 600 {path}")
    try:
        found = json.loads(text)
        place, key = str(found["address"]), str(found["key"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"--join {path}: this is no file of a run", remedy="`realrl run` with launcher=external tells its name."
        ) from None
    return place, _parsed(key, str(path))

"""Libraries of C++: built with the machine's compiler at their first use, and kept in a cache folder."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_COMPILE_SECONDS = 300
AS_PYTHON = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off")  # flags: sums and products are rounded one by one


class UnavailableError(Exception):
    """There is no library here; the message gives the reason."""


@dataclass(frozen=True)
class Library:
    """A library to build.

    Attributes:
        name: of its files.
        sources: what it depends on; the first one is compiled.
        flags: of the compiler; the linker gets none of them.
        purpose: what it is for, in words.
        loss: what is done without a compiler, in words.
    """

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    purpose: str
    loss: str


def load(
    library: Library, functions: Mapping[str, tuple[Any, Sequence[Any]]], folder: Callable[[], Path]
) -> ctypes.CDLL:
    """Return a library with the types of its functions; the first call on a machine compiles it.

    Args:
        functions: name -> type of the result, types of arguments.
        folder: returns where libraries are kept; raises RuntimeError if there is no place.

    Raises:
        UnavailableError: there is no compiler, or ``REALRL_KERNELS=0``.
    """
    if os.environ.get("REALRL_KERNELS") == "0":
        raise UnavailableError("REALRL_KERNELS=0 turns realrl's off")
    try:
        loaded = ctypes.CDLL(str(build(folder(), library)))
    except RuntimeError as error:
        raise UnavailableError(f"there is no folder to compile realrl's in: {error}") from error
    except OSError as error:
        raise UnavailableError(f"realrl's cannot be loaded: {error}") from error
    for name, (result, arguments) in functions.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


def build(folder: Path, library: Library) -> Path:
    """Find the library for its source, flags and compiler in `folder`, or compile it there.

    Raises:
        UnavailableError: no compiler, one that fails, or a folder that cannot be used.
    """
    try:
        command = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    except ValueError as error:
        raise UnavailableError(f"CXX={os.environ['CXX']!r} is not a command: {error}") from error
    if not shutil.which(command[0]):
        raise UnavailableError(f"there is no C++ compiler ({command[0] or 'g++'}); {library.loss}")
    texts = (path.read_text("utf-8") for path in library.sources)
    version = _digest("\0".join((*command, *library.flags, *texts)).encode())
    try:
        found = _find(folder, library, version)
        if found is None:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "lock", "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the others wait for it
                found = _find(folder, library, version) or _make(folder, library, version, command)
    except OSError as error:
        raise UnavailableError(f"realrl's cannot be compiled: {error}") from error
    return found


def _find(folder: Path, library: Library, version: str) -> Path | None:
    """Find the library by the digests of its sources and of itself: loading half a file would end the process."""
    for path in folder.glob(f"{library.name}-{version}-*.so"):
        if path.stem.rpartition("-")[2] == _digest(path.read_bytes()):
            return path
    return None


def _make(folder: Path, library: Library, version: str, command: list[str]) -> Path:
    logger.info("compiling %s, once on this machine", library.purpose)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled = _compile(command, library, Path(scratch))
        return compiled.replace(folder / f"{library.name}-{version}-{_digest(compiled.read_bytes())}.so")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(command: list[str], library: Library, scratch: Path) -> Path:
    compiled, linked = scratch / f"{library.name}.o", scratch / f"{library.name}.so"
    for arguments in (
        [*command, *library.flags, "-c", str(library.sources[0]), "-o", str(compiled)],
        # without -fopenmp: its functions shall come from the runtime that torch has loaded
        [*command, "-shared", str(compiled), "-o", str(linked)],
    ):
        _call(command[0], arguments)
    return linked


def _call(compiler: str, arguments: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{compiler} took longer than {_COMPILE_SECONDS} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise UnavailableError(f"{compiler} cannot compile realrl's: {lines[0]}")

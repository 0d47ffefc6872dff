"""Survey of this machine, for comparison with the other machines of a run. Imports no torch unless there are GPUs."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from realrl.config.reward_options import RewardOptions
from realrl.config.schema import RunConfig
from realrl.errors import UsageError
from realrl.experiment.loading import files_of_users, split_name
from realrl.experiment.rewards import reward_parts
from realrl.files import read_input, write_output
from realrl.runtime.launchers.base import available_cores
from realrl.runtime.processes.machine import accelerators
from realrl.sched.nodes.messages import Examine, Examined, NodeFacts

CODE = "code of realrl"
_PACKAGES = ("realrl", "torch")
_OF_CODE = (".py", ".cpp", ".h")
_NONCE, _OF_DOCTOR = ".nonce-", ".realrl-doctor-"
SHARED_MEMORY = "/dev/shm"
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")  # by which kernels are chosen
_PATIENCE_S = 5.0  # for a file that another machine has just written into a shared folder


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on most."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def code_digests() -> dict[str, str]:
    """Digest of realrl's own files, experiments included."""
    digest = hashlib.sha256()
    for package in ("realrl", "realrl_experiments"):
        spec = importlib.util.find_spec(package)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            files = (path for path in Path(folder).rglob("*") if path.suffix in _OF_CODE)
            for name, path in sorted((str(path.relative_to(folder)), path) for path in files):
                digest.update(f"{package}/{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return {CODE: digest.hexdigest()}


def facts() -> NodeFacts:
    """Return what an agent tells of its machine."""
    found, (cpu, features) = accelerators(), _cpu()
    return NodeFacts(
        versions=versions(),
        digests=code_digests(),
        n_accelerators=found.count,
        n_cores=available_cores(),
        memory_bytes=_memory_bytes(),
        cpu=cpu,
        cpu_features=features,
        accelerator=found.name,
        accelerator_bytes=found.memory_bytes,
    )


def files_of_run(config: RunConfig) -> dict[str, str]:
    """Path -> digest of the user's own files that are imported for a run: experiment, interfaces, rewards."""
    paths = files_of_users()
    if isinstance(config.algorithm, RewardOptions):
        names = (part.function for part in reward_parts(config.algorithm).values())
        paths += [os.path.abspath(where) for where, _ in map(_split, names) if where.endswith(".py")]
    return file_digests(paths)


def _split(name: str) -> tuple[str, str]:
    try:
        return split_name(name)
    except UsageError:  # a built-in one
        return "", name


def file_digests(paths: Iterable[str]) -> dict[str, str]:
    """Path -> digest of those files that can be read."""
    found = {}
    for path in dict.fromkeys(paths):
        with contextlib.suppress(OSError):
            found[path] = hashlib.sha256(read_input(path)).hexdigest()
    return found


def write_nonce(run_dir: Path) -> tuple[str, str]:
    """Write a file that only who shares the run folder can read; returns its name and content."""
    for old in run_dir.glob(f"{_NONCE}*"):  # of a master that was killed
        old.unlink(missing_ok=True)
    return _write_nonce(run_dir, _NONCE)


def put_nonce(folder: Path) -> tuple[str, str]:
    """Write such a file into a folder where a run may be going on, or none; returns its name and content.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        return _write_nonce(folder, _OF_DOCTOR)
    except OSError as error:
        raise UsageError(
            f"nothing can be written to {folder}: {error.strerror}", remedy="Choose run_dir=PATH."
        ) from error


def _write_nonce(folder: Path, prefix: str) -> tuple[str, str]:
    name, content = prefix + secrets.token_hex(8), secrets.token_hex(16)
    write_output(folder / name, content.encode())
    return name, content


def look(examine: Examine) -> Examined:
    """Look at the run folder, the working directory and the files that a master asks for."""
    run_dir = Path(examine.run_dir)
    nonce = _read_nonce(run_dir / examine.nonce_file)
    problem = ""
    if nonce and not os.access(run_dir, os.W_OK | os.X_OK):
        problem = f"may not write to the run folder {run_dir}"
    elif nonce and not os.path.isdir(examine.directory):
        problem = f"has no folder {examine.directory}, in which the run was started"
    return Examined(nonce, problem, file_digests(examine.files), _free_bytes(str(run_dir), SHARED_MEMORY))


def _free_bytes(*folders: str) -> dict[str, int]:
    found = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            found[folder] = shutil.disk_usage(folder).free
    return found


def _read_nonce(path: Path) -> str:
    deadline_s = time.monotonic() + (_PATIENCE_S if path.parent.is_dir() else 0.0)
    while True:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return read_input(path, most_bytes=100).decode()
        if time.monotonic() >= deadline_s:
            return ""
        time.sleep(0.1)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _cpu() -> tuple[str, tuple[str, ...]]:
    """Architecture, name and a digest of the features of the processor; and those features that matter most."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.machine(), ()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    features = " ".join(sorted(flags[1].split())) if flags else ""
    mark = hashlib.sha256(features.encode()).hexdigest()[:8]
    known = tuple(feature for feature in _FEATURES if feature in features.split())
    return f"{platform.machine()} {name[1] if name else ''} {mark}", known

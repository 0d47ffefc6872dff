"""Checkpoints on disk, as the master sees them: a folder that appears whole or not at all.

checkpoints/
  .step_40.partial/      being written; never read
  step_40/
    actor/               Hugging Face format, tokenizer included
    state/manifest.json  written by the master: step, loader position, experiment, files and their sizes
    state/actor.safetensors, ...   optimizer, schedule and interface state, written by the workers
  latest -> step_40
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from realrl.errors import AssetError, CheckpointError, ConfigError
from realrl.plan.cursor import CursorState
from realrl.runtime.run_plan import RunPlan

CHECKPOINTS = "checkpoints"
MANIFEST_VERSION = 1


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint holds.

    Attributes:
        experiment: name of the algorithm that wrote it.
        step: steps completed.
        cursor: loader position after these steps, as the master's state gives it.
        versions: role -> train_step calls done.
        files: path inside the checkpoint -> size in bytes.
    """

    experiment: str
    step: int
    cursor: CursorState
    versions: dict[str, int]
    files: dict[str, int]
    manifest_version: int = MANIFEST_VERSION


@dataclass(frozen=True)
class CheckpointStore:
    """The `checkpoints/` folder of one run of `experiment`; keeps the newest `keep` checkpoints."""

    root: Path
    keep: int
    experiment: str

    def partial(self, step: int) -> Path:
        """An empty folder to write step `step` into, on the same file system as the final one."""
        self.discard_unfinished()
        folder = self.root / f".step_{step}.partial"
        (folder / "state").mkdir(parents=True)
        return folder

    def commit(self, step: int, cursor: CursorState, versions: Mapping[str, int]) -> Path:
        """Make the partial folder of `step` the newest checkpoint, then delete the oldest ones.

        Raises:
            CheckpointError: the folder could not be completed; earlier checkpoints are untouched.
        """
        partial, final = self.root / f".step_{step}.partial", self.root / f"step_{step}"
        try:
            files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
            manifest = Manifest(self.experiment, step, cursor, dict(versions), files)
            with open(partial / "state" / "manifest.json", "wb") as out:
                out.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
                out.flush()
                os.fsync(out.fileno())
            if final.exists():
                shutil.rmtree(final)
            os.rename(partial, final)
            self._point_latest_to(final)
        except OSError as err:
            raise self.save_failed(err, step) from err
        for old in self._all()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def discard_unfinished(self) -> None:
        """Remove what was written of checkpoints that failed, here or in an earlier run that was killed."""
        for folder in self.root.glob(".step_*.partial"):
            shutil.rmtree(folder, ignore_errors=True)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        found = self._all()
        return found[-1] if found else None

    def save_failed(self, err: OSError, step: int) -> CheckpointError:
        """The error that a full disk or an unwritable folder becomes."""
        previous = self.latest()
        kept = f"The previous checkpoint {previous} is whole." if previous else "There is no earlier checkpoint."
        where = err.filename or "unknown file"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written: {err.strerror or err} ({where})",
            remedy=f"{kept} Free some space, then continue with resume=auto and the same run_dir.",
            step=step,
        )

    def _all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        found = [p for p in self.root.glob("step_*") if (p / "state" / "manifest.json").is_file()]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))

    def _point_latest_to(self, folder: Path) -> None:
        link = self.root / ".latest.new"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        os.replace(link, self.root / "latest")


def checkpoint_store(plan: RunPlan, root: Path) -> CheckpointStore:
    """The checkpoints of a run of this plan."""
    return CheckpointStore(root, keep=plan.config.save.keep, experiment=plan.experiment.name)


def read_manifest(folder: Path, experiment: str) -> Manifest:
    """Read and verify a checkpoint's manifest.

    Raises:
        AssetError: there is none, it is damaged or belongs to another algorithm, or a file is missing or torn.
    """
    path = folder / "state" / "manifest.json"
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as err:
        raise AssetError(
            f"'{folder}' is not a checkpoint: {path} cannot be read ({err.strerror})",
            remedy="Give the folder of one step, such as runs/ppo/first/checkpoints/step_40.",
        ) from err
    except (msgspec.MsgspecError, json.JSONDecodeError) as err:
        raise AssetError(
            f"the checkpoint manifest {path} is damaged: {err}",
            remedy=f"Remove {folder} to continue from the checkpoint before it, or from the beginning.",
        ) from err
    if manifest.manifest_version != MANIFEST_VERSION:
        raise AssetError(f"{path} has manifest version {manifest.manifest_version}; this is version {MANIFEST_VERSION}")
    if manifest.experiment != experiment:
        raise AssetError(f"'{folder}' was written by experiment '{manifest.experiment}', not '{experiment}'")
    for name, size in manifest.files.items():
        file = folder / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes long"
            raise AssetError(
                f"checkpoint file {file} is {state}; the manifest says {size} bytes",
                remedy=f"Remove {folder} to continue from the checkpoint before it, or from the beginning.",
            )
    return manifest


def find_resume(resume: str, store: CheckpointStore) -> Path | None:
    """The checkpoint folder that `resume=never|auto|PATH` means, or None to start from the beginning."""
    if resume == "never":
        return None
    if resume == "auto":
        return store.latest()
    folder = Path(resume)
    if not folder.is_dir():
        raise ConfigError(f"resume='{resume}' is no folder", remedy="Use never, auto, or the folder of a checkpoint.")
    return folder

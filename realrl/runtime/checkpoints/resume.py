"""Where a run begins: in a folder that no other run has filled, at the first step or after that of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from realrl.config.schema import RunConfig
from realrl.errors import ConfigError
from realrl.experiment.run_plan import RunPlan
from realrl.runtime.checkpoints.store import (
    CHECKPOINTS,
    CheckpointStore,
    Resume,
    checkpoint_store,
    find_resume,
    load_manifest,
)
from realrl.runtime.output.metrics import FILE_NAME as METRICS_FILE
from realrl.sched.master.master_plan import STEP_PLACEHOLDER, MasterPlan, plan_master
from realrl.sched.outbox import Owner
from realrl.sched.track.track_plan import ResumePoint, plan_track


def refuse_mixing(config: RunConfig) -> None:
    """A folder or file with the results of a run takes those of another one only when that one resumes it.

    Raises:
        ConfigError: names the key.
    """
    folder = Path(config.run_dir)
    is_filled = _is_filled(folder / METRICS_FILE) or any(folder.glob("checkpoints/step_*"))
    if config.run_dir and config.resume == "never" and is_filled:
        raise ConfigError(
            f"run_dir={folder} holds the results of an earlier run",
            remedy="Continue it with resume=auto, or choose another folder.",
        )
    path = Path(config.save.generations_path)
    if not config.save.generations_path:
        return
    if path.is_dir() or (config.resume == "never" and _is_filled(path)):
        state = "is a folder" if path.is_dir() else "holds something already"
        raise ConfigError(f"save.generations_path={path} {state}", remedy="Choose another file, or remove this one.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"save.generations_path={path}: there is no folder {path.absolute().parent}")


def find_beginning(plan: RunPlan) -> tuple[Resume, MasterPlan]:
    """Where the run begins, and what its master makes of that, without a look at models and data.

    Raises:
        AssetError: a file of the checkpoint is missing or torn.
        ConfigError: the checkpoint has no step left to do, or cannot be continued with these settings.
    """
    store = checkpoint_store(plan, Path(plan.config.run_dir) / CHECKPOINTS)
    found = find_resume(plan.config.resume, store)
    return found, make_master_plan(plan, store, found.folder)


def newest(store: CheckpointStore, first: Resume) -> Resume:
    """The newest whole checkpoint of a run, or where it began.

    A run that continues from another folder may find older ones in its own, which an earlier run left.

    Raises:
        AssetError: there are checkpoints, and none of them is whole.
    """
    found = find_resume("auto", store)
    if found.folder is None:
        return Resume(first.folder)
    if first.folder is not None and first.folder.resolve().parent != store.root.resolve():
        is_older = load_manifest(found.folder).step <= load_manifest(first.folder).step
        return Resume(first.folder) if is_older else found
    return found


def make_master_plan(plan: RunPlan, store: CheckpointStore, resume_from: Path | None) -> MasterPlan:
    """What the state machine needs of a run plan and the checkpoint that it continues from.

    Raises:
        ConfigError: the checkpoint holds samples of steps of another size, or has no step left to do.
        AssetError: its manifest cannot be read.
    """
    resume = None
    if resume_from is not None:
        manifest = load_manifest(resume_from)
        resume = ResumePoint(manifest.step, manifest.cursor, manifest.versions, manifest.in_flight)
        if manifest.in_flight.calls and manifest.n_seqs != plan.samples_per_step:
            raise ConfigError(
                f"the checkpoint {resume_from} holds samples of later steps of {manifest.n_seqs} samples each, and "
                f"n_seqs={plan.samples_per_step}",
                remedy=f"Resume with n_seqs={manifest.n_seqs}.",
            )
    evaluation = None
    if plan.evaluation is not None:
        evaluation = plan_track(
            plan.evaluation.graph,
            plan.evaluation.allocations,
            plan.config,
            dataset_rank=plan.dataset_rank,
            hooks=plan.evaluation.hooks,
            owner=Owner.EVALUATION,
        )
    main = plan_track(
        plan.graph,
        plan.allocations,
        plan.config,
        dataset_rank=plan.dataset_rank,
        hooks=plan.hooks,
        resume=resume,
    )
    return plan_master(main, evaluation, str(store.root / f".step_{STEP_PLACEHOLDER}.partial"))


def _is_filled(file: Path) -> bool:
    """An empty file is what a run leaves that failed before its first step."""
    return file.exists() and file.stat().st_size > 0

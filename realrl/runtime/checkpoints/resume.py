"""Start of a run: at the first step or after a checkpoint, in a folder without results of another run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from realrl.config.schema import RunConfig
from realrl.config.serialize import CONFIG_FILE, changed_settings
from realrl.errors import ConfigError
from realrl.experiment.run_plan import RunPlan
from realrl.files import why_no_output
from realrl.plan.hooks import NO_OVERLAP, Overlap
from realrl.runtime.checkpoints.store import (
    CHECKPOINTS,
    CheckpointStore,
    Manifest,
    Resume,
    checkpoint_store,
    find_resume,
    load_manifest,
    schedules_of,
)
from realrl.runtime.output.metrics import FILE_NAME as METRICS_FILE
from realrl.sched.master.master_plan import STEP_PLACEHOLDER, MasterPlan, plan_master
from realrl.sched.outbox import Owner
from realrl.sched.track.track_plan import ResumePoint, plan_track

_MOST_TOLD = 8  # settings


def refuse_mixing(config: RunConfig) -> None:
    """Refuse to write results where those of another run are, unless this run resumes it.

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
    reason = why_no_output(path)
    if not reason and config.resume == "never" and _is_filled(path):
        reason = "it holds something already"
    if reason:
        raise ConfigError(
            f"save.generations_path={path} cannot be written: {reason}",
            remedy="Choose another file, or remove this one.",
        )
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"save.generations_path={path}: there is no folder {path.absolute().parent}")


def find_beginning(plan: RunPlan) -> tuple[Resume, MasterPlan]:
    """Find the checkpoint to continue from and make the master's plan, without reading models and data.

    Raises:
        AssetError: a file of the checkpoint is missing or torn.
        ConfigError: the checkpoint has no step left to do, or cannot be continued with these settings.
    """
    store = checkpoint_store(plan, Path(plan.config.run_dir) / CHECKPOINTS)
    found = find_resume(plan.config.resume, store)
    notes: list[str] = []
    if found.folder is not None:
        notes = [*_changed_notes(plan, found.folder), *_schedule_notes(plan, load_manifest(found.folder))]
    return replace(found, notes=(*found.notes, *notes)), make_master_plan(plan, store, found.folder)


def _changed_notes(plan: RunPlan, folder: Path) -> Iterator[str]:
    """Tell of settings that are not those of the steps before, as far as the run's folder has them."""
    try:
        changed = changed_settings((folder.parents[1] / CONFIG_FILE).read_bytes(), plan.config)
    except (OSError, ConfigError):  # a checkpoint may be moved out of its run's folder
        return
    told = [f"{path}={json.dumps(now)} (it was {json.dumps(before)})" for path, (before, now) in changed.items()]
    if told:
        more = f", and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
        yield f"settings are not those of the steps before: {', '.join(told[:_MOST_TOLD])}{more}"


def _schedule_notes(plan: RunPlan, manifest: Manifest) -> Iterator[str]:
    """Tell of roles whose learning rate goes on as another schedule has it than that of the steps done before."""
    for role, n_steps in schedules_of(plan).items():
        before, optimizer = manifest.schedules.get(role, n_steps), plan.config.models[role].optimizer
        is_warming_up = manifest.step < optimizer.warmup_fraction * max(before, n_steps)
        if before != n_steps and (is_warming_up or optimizer.schedule != "constant"):
            yield (
                f"the learning rate of role '{role}' followed a schedule of {before} steps, and goes on as one of "
                f"{n_steps} has it from step {manifest.step + 1} on; models.{role}.optimizer.schedule_steps sets it"
            )


def newest(store: CheckpointStore, first: Resume) -> Resume:
    """The newest whole checkpoint of a run, or else the one that it began from.

    If a run continues from another folder, its own may hold older checkpoints of an earlier run; they do not count.

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


def make_master_plan(
    plan: RunPlan, store: CheckpointStore, resume_from: Path | None, *, overlap: Overlap = NO_OVERLAP
) -> MasterPlan:
    """Plan the master's state machine for a run plan and the checkpoint that it continues from.

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
    return plan_master(replace(main, overlap=overlap), evaluation, str(store.partial(STEP_PLACEHOLDER)))


def _is_filled(file: Path) -> bool:
    """True if the file has content; a run that fails before its first step leaves an empty one."""
    return file.exists() and file.stat().st_size > 0

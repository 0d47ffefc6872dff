"""Start of runs from the command line: the plan, the checks that all commands share, and what they say of it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from realrl.cli.clusters.jobs import hand_to_slurm, join_instead
from realrl.cli.machines import settle
from realrl.cli.plan import PLAN_FILE, plan_now
from realrl.cli.plan_view import print_plan
from realrl.cli.unused import check_used
from realrl.errors import ConfigError, UsageError, one_screen
from realrl.runtime.launchers.base import available_cores

if TYPE_CHECKING:
    from realrl.config.schema import RunConfig
    from realrl.doctor.findings import Finding
    from realrl.experiment.declaration import Experiment
    from realrl.experiment.run_plan import RunPlan
    from realrl.plan.hooks import Overlap
    from realrl.runtime.checkpoints.store import Resume

_NAMING = ("preset", "plan", "model", "models", "dataset", "eval")  # sections of overrides that name models or data


def start(
    experiment: Experiment,
    config: RunConfig,
    options: argparse.Namespace,
    opened: Callable[[Path], None] = lambda _: None,
) -> int:
    """Check the run, then start it, or show its plan; `opened` gets the run folder.

    Raises:
        UsageError: the run is refused; nothing was started.
    """
    from realrl.config.paths import check_paths
    from realrl.experiment.discovery import GIVEN
    from realrl.files import cache_dir

    overrides = options.arguments[1:]
    if options.hardware is not None and not options.dry_run:
        raise UsageError("--hardware: a run takes the machine that it is on", remedy="Add --dry-run.")
    if not options.dry_run and options.sbatch is None and (code := join_instead(config)) is not None:
        return code
    notes_of_load = () if options.dry_run else _share_cores(config)
    files = dict[str, bytes]()
    if config.allocation.mode == "auto":
        config, _ = settle(config, options.hardware) if options.hardware is not None else (config, ())
        config, text = plan_now(experiment, config, overrides)
        files |= {PLAN_FILE: text.encode()} if text else {}
    settled, notes = settle(config, options.hardware)
    plan = plan_of(experiment, settled, overrides)
    check_paths(settled, cache_dir=cache_dir().absolute())  # before a run folder is made
    refuse_unnamed(experiment, settled, overrides)
    if not options.dry_run and (code := hand_to_slurm(experiment.name, settled, options)) is not None:
        return code
    if options.dry_run:
        resume = checked(plan, is_elsewhere=options.hardware is not None)
        print_plan(plan, resume, notes=notes, overlap=foresee_overlap(plan))
        return 0
    from realrl.runtime.processes.start import Watch, start_run

    def check(plan: RunPlan) -> Resume:
        return checked(plan, holds_lock=bool(config.run_dir)).noting(notes_of_load)

    can_be_typed = not options.arguments[0].startswith(GIVEN)
    watch = Watch(("realrl", "run", *options.arguments) if can_be_typed else (), opened)
    return start_run(experiment, config, check=check, decide=decide_overlap, files=files, watch=watch)


def _share_cores(config: RunConfig) -> tuple[str, ...]:
    """Let threads of workers inside this process sleep while they wait, if others need its cores; return a note of it.

    OpenMP asks when torch is imported. An experiment that has imported it has decided.
    """
    from realrl.runtime.processes.load import waiting_now

    if config.launcher != "inline" or config.cluster.device == "cuda" or "torch" in sys.modules:
        return ()
    found, notes = waiting_now(available_cores(), os.environ)
    os.environ.update(found)
    return notes


def plan_of(experiment: Experiment, config: RunConfig, overrides: Sequence[str]) -> RunPlan:
    """Return calls, graph and allocations; refuse keys that this experiment would ignore.

    Raises:
        UsageError: see `plan_run`.
    """
    from realrl.experiment.planning import plan_run

    if config.allocation.mode == "auto":
        config, _ = plan_now(experiment, config, overrides)
    plan = plan_run(config, experiment)
    check_used(overrides, plan)
    return plan


def refuse_unnamed(experiment: Experiment, config: RunConfig, overrides: Sequence[str]) -> None:
    """Refuse a run whose models and data nobody has named: the toy task would be a surprise.

    Raises:
        ConfigError: says what to name.
    """
    from realrl.config.overrides import parse_overrides
    from realrl.config.schema import BUILT_IN

    named = {edit.path.partition(".")[0] for edit in parse_overrides(overrides)[0]}
    paths = {*config.dataset.paths.values(), *(model.path for model in config.models.values())}
    if named.intersection(_NAMING) or config.preset or paths != {BUILT_IN}:
        return
    roles = [name for name, role in experiment.roles.items() if role.path_from is None and role.head != "none"]
    raise ConfigError(
        f"experiment '{experiment.name}' was given neither a model nor data",
        remedy="Add preset=tiny for a toy task with random models, or give yours: "
        f"models.{roles[0]}.path=FOLDER dataset.path=FILE.",
    )


def checked(plan: RunPlan, *, is_elsewhere: bool = False, holds_lock: bool = False) -> Resume:
    """Refuse a plan that cannot run, or print warnings about it; return its starting point."""
    from realrl.doctor.findings import refuse
    from realrl.doctor.preflight import preflight
    from realrl.doctor.run_under_check import RunUnderCheck

    run = RunUnderCheck(plan, is_elsewhere=is_elsewhere, holds_lock=holds_lock)
    findings = preflight(run)
    refuse(findings)
    print_warnings(findings)
    return run.beginning[0]


def print_warnings(findings: Sequence[Finding]) -> None:
    """Print warnings to stderr, but for notes on the checkpoint, which come with the run's beginning."""
    from realrl.doctor.findings import Status

    for one in findings:
        if one.status is Status.WARNING and one.check != "checkpoint":
            text = f"{one.check}: {one.message}" + (f"\n  {one.remedy}" if one.remedy else "")
            print(one_screen(f"realrl: warning: {text}"), file=sys.stderr)


def decide_overlap(plan: RunPlan) -> Overlap:
    """Decide which parameters come early or stay; torch is imported only where some could."""
    from realrl.plan.hooks import NO_OVERLAP

    if not plan.may_overlap:
        return NO_OVERLAP
    from realrl.doctor.memory import decide_overlap as decide

    return decide(plan)


def foresee_overlap(plan: RunPlan) -> Overlap:
    """Return the decision of a run on this machine; none without its devices, or if a model cannot be read."""
    from dataclasses import replace

    from realrl.plan.hooks import NO_OVERLAP
    from realrl.runtime.processes.machine import accelerators, check_devices, on_machine

    if not plan.may_overlap:
        return NO_OVERLAP
    found = accelerators()
    config, _ = on_machine(plan.config, found)
    try:
        check_devices(config, found)
        return decide_overlap(replace(plan, config=config))
    except UsageError:
        return NO_OVERLAP

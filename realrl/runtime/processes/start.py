"""Start of a run from a resolved configuration: checks, run folder, launcher."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace as replace_struct

from realrl.config.schema import RunConfig
from realrl.config.secrets import masked_argument
from realrl.config.serialize import CONFIG_FILE, dump_config, recorded_config
from realrl.errors import ConfigError, MachinesError
from realrl.experiment.declaration import Experiment
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.files import write_output
from realrl.plan.hooks import NO_OVERLAP, Overlap
from realrl.runtime.checkpoints.resume import newest
from realrl.runtime.checkpoints.store import CHECKPOINTS, Resume, checkpoint_store, load_manifest
from realrl.runtime.launchers.base import available_cores
from realrl.runtime.launchers.local import DEFAULT_HOST
from realrl.runtime.nodes.key import take_key
from realrl.runtime.nodes.prepare import open_nodes
from realrl.runtime.nodes.started import StartedAgents
from realrl.runtime.output.logs import log_path
from realrl.runtime.processes.load import CoreShare, lasting_cores_of_others, share_cores
from realrl.runtime.processes.machine import Accelerators, accelerators, on_machine, worker_environments
from realrl.runtime.processes.recovery import Recover
from realrl.runtime.processes.run_folder import locked, make_checkpoints, make_new_folder
from realrl.runtime.processes.session import SessionStart
from realrl.runtime.processes.supervise import run_inline, run_supervised
from realrl.runtime.worker.heartbeat import heartbeat_interval_s

_SIGNAL_RECEIVED = 128  # exit codes from here on are those of signals


@dataclass(frozen=True)
class Watch:
    """Wishes of whoever starts a run: what to hear of it, and what to tell the user.

    Attributes:
        command: the words that started the run, for the user to continue it after an interruption.
        opened: gets the run folder, before the run begins.
    """

    command: Sequence[str] = ()
    opened: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True)
class _Workers:
    """Things that workers get: what each runs, its environment and threads where all are here, and the user's key."""

    host: str
    environments: tuple[dict[str, str], ...]
    key: bytes | None
    n_threads: int


def start_run(
    experiment: Experiment,
    config: RunConfig,
    *,
    check: Callable[[RunPlan], Resume],
    decide: Callable[[RunPlan], Overlap] = lambda _: NO_OVERLAP,
    files: Mapping[str, bytes] | None = None,
    watch: Watch | None = None,
    host: str = DEFAULT_HOST,
) -> int:
    """Lock the run folder, check the run, run to the end; returns the exit code.

    Args:
        check: refusal of a plan that cannot run, with a `UsageError`; it returns the starting point. Where `run_dir` is
            given, no other run is at work there meanwhile.
        decide: decision, for a plan that passed the checks, about parameters that come early or stay.
        files: name -> content of further files of the run folder.
        watch: see `Watch`.
        host: dotted path of the factory of each worker's host.

    Raises:
        UsageError: the configuration, the graph, the allocation, a model, the dataset or the checkpoint to resume from
            is unusable, or another run is using the folder; nothing started.
    """
    key = take_key()
    found = accelerators()
    config, notes = on_machine(config, found)
    plan = plan_run(config, experiment)
    written, watch = files or {}, watch or Watch()

    def run(run_dir: Path, lock: int, resume: Resume) -> int:
        environments, cores = _worker_environments(plan, found, resume)
        workers = _Workers(host, environments, key, cores.n_threads)
        watch.opened(run_dir)
        code = _run(plan, run_dir, resume.noting((*notes, *cores.notes)), lock, workers, decide(plan), written)
        return _told(code, plan, run_dir, watch.command)

    if config.run_dir:
        with locked(Path(config.run_dir).absolute()) as (run_dir, lock):
            return run(run_dir, lock, check(plan))
    resume = check(plan)
    with locked(make_new_folder(Path("runs").absolute() / experiment.name)) as (run_dir, lock):
        return run(run_dir, lock, resume)


def _worker_environments(
    plan: RunPlan, found: Accelerators, resume: Resume
) -> tuple[tuple[dict[str, str], ...], CoreShare]:
    """Return the environment variables of each worker, and how they share this machine's cores."""
    environments, cluster = worker_environments(plan, found, os.environ), plan.config.cluster
    if cluster.device != "cpu" or plan.config.launcher != "local":
        return environments, CoreShare(0, {})
    n_cores, n_before = available_cores(), None
    if resume.folder is not None:
        n_before = load_manifest(resume.folder).n_threads
    n_busy = lasting_cores_of_others(n_cores)
    cores = share_cores(n_busy, n_cores, cluster.n_devices_per_node, os.environ, n_before=n_before)
    return tuple({**own, **cores.variables} for own in environments), cores


def _told(exit_code: int, plan: RunPlan, run_dir: Path, command: Sequence[str]) -> int:
    """Tell the user how to go on with a run that a signal ended; returns its exit code."""
    newest = checkpoint_store(plan, run_dir / CHECKPOINTS).latest()
    if (exit_code < _SIGNAL_RECEIVED and exit_code != MachinesError.exit_code) or newest is None:
        return exit_code
    if load_manifest(newest).is_last:
        told = f"the last step was complete: {newest}"
    elif command:
        words = [masked_argument(word) for word in command if not word.lstrip("+").startswith("resume=")]
        if not any(word.lstrip("+").startswith("run_dir=") for word in words):
            near = run_dir.is_relative_to(Path.cwd())
            words.append(f"run_dir={run_dir.relative_to(Path.cwd()) if near else run_dir}")
        told = f"continue after {newest.name.replace('_', ' ')} with: {shlex.join([*words, 'resume=auto'])}"
    else:
        told = (
            f"continue after {newest.name.replace('_', ' ')} with the same settings, run_dir={run_dir} and resume=auto"
        )
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"realrl: {told}", file=sys.stderr, flush=True)
    return exit_code


def _run(
    plan: RunPlan,
    run_dir: Path,
    resume: Resume,
    lock: int,
    workers: _Workers,
    overlap: Overlap,
    files: Mapping[str, bytes],
) -> int:
    """Run in a locked folder, after the checks."""
    config, save = plan.config, plan.config.save
    if plan.changed_roles and save.writes:
        make_checkpoints(run_dir / CHECKPOINTS)
    changes: dict[str, object] = {"run_dir": str(run_dir)}
    if config.save.generations_path:
        path = str(Path(config.save.generations_path).absolute())
        changes["save"] = config.save.model_copy(update={"generations_path": path})
    config = config.model_copy(update=changes)
    for name, content in files.items():
        _write(run_dir / name, content)
    _write(run_dir / CONFIG_FILE, recorded_config(config, os.getcwd()))
    start = SessionStart(
        run=dump_config(config),
        run_dir=str(run_dir),
        track=config.track,
        show=config.show,
        port=config.cluster.master_port,
        resume_from="" if resume.folder is None else str(resume.folder.resolve()),
        notes=resume.notes,
        overlap=overlap,
        environments=workers.environments,
        n_threads=workers.n_threads,
        host=workers.host,
        heartbeat_s=heartbeat_interval_s(plan.n_workers, config.cluster.worker_timeout_s),
    )
    if config.launcher == "inline":
        return run_inline(start)
    if config.is_on_machines:
        with open_nodes(plan, run_dir, workers.key, log_path(run_dir, None).parent) as nodes:
            return _supervised(plan, replace_struct(start, nodes=nodes.start), resume, lock, nodes.agents)
    return _supervised(plan, start, resume, lock)


def _supervised(
    plan: RunPlan, start: SessionStart, resume: Resume, lock: int, agents: StartedAgents | None = None
) -> int:
    config, run_dir = plan.config, Path(start.run_dir)
    store = checkpoint_store(plan, run_dir / CHECKPOINTS)
    recover = Recover(config.recover.retries, lambda: newest(store, resume), config.cluster.worker_timeout_s)
    return run_supervised(start, recover, inherited=(lock,), agents=agents)


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        write_output(temporary, content)
        os.replace(temporary, path)
    except OSError as err:
        raise ConfigError(
            f"{path} cannot be written: {err.strerror}", remedy="Choose another folder with run_dir=PATH."
        ) from err

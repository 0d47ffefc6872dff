"""Start of a run from a resolved configuration: checks, run folder, launcher."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from realrl.config.schema import RunConfig
from realrl.config.serialize import dump_config, shown_config
from realrl.errors import ConfigError
from realrl.experiment.declaration import Experiment
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.files import write_output
from realrl.plan.hooks import NO_OVERLAP, Overlap
from realrl.runtime.checkpoints.resume import newest, refuse_mixing
from realrl.runtime.checkpoints.store import CHECKPOINTS, Resume, checkpoint_store
from realrl.runtime.processes.machine import accelerators, check_devices, on_machine, worker_environments
from realrl.runtime.processes.preflight import check_inputs
from realrl.runtime.processes.recovery import Recover
from realrl.runtime.processes.session import SessionStart
from realrl.runtime.processes.supervise import run_inline, run_supervised

CONFIG_FILE = "config.json"
LOCK_FILE = ".lock"
_OWNER_ONLY = 0o700  # rows of the dataset and what users set may be nobody else's


def start_run(
    experiment: Experiment,
    config: RunConfig,
    *,
    decide: Callable[[RunPlan], Overlap] = lambda _: NO_OVERLAP,
    files: Mapping[str, bytes] | None = None,
) -> int:
    """Check what can be checked, make the run folder, run to the end; returns the exit code.

    Args:
        decide: decision, for a plan that passed the checks, about parameters that come early or stay.
        files: name -> content of further files of the run folder.

    Raises:
        UsageError: the configuration, the graph, the allocation, a model, the dataset or the checkpoint to resume from
            is unusable, or another run is using the folder; nothing started.
    """
    if config.cluster.n_nodes > 1:
        raise ConfigError(
            f"cluster.n_nodes={config.cluster.n_nodes}, but this version starts workers on one machine only",
            remedy="Use cluster.n_nodes=1; --dry-run and realrl graph show plans for more nodes.",
        )
    found = accelerators()
    config, notes = on_machine(config, found)
    check_devices(config, found)
    plan = plan_run(config, experiment)
    environments, written = worker_environments(plan, found, os.environ), files or {}
    if config.run_dir:
        with _locked(Path(config.run_dir).absolute()) as (run_dir, lock):
            refuse_mixing(config)  # reads the folder, so no other run may be at work there
            return _run(plan, run_dir, _noting(check_inputs(plan), notes), lock, environments, decide(plan), written)
    refuse_mixing(config)
    resume = _noting(check_inputs(plan), notes)
    with _locked(_make_new_folder(Path("runs").absolute() / experiment.name)) as (run_dir, lock):
        return _run(plan, run_dir, resume, lock, environments, decide(plan), written)


def _noting(resume: Resume, notes: tuple[str, ...]) -> Resume:
    """Return the starting point with further notes to the user, before its own."""
    return replace(resume, notes=(*notes, *resume.notes))


def _run(
    plan: RunPlan,
    run_dir: Path,
    resume: Resume,
    lock: int,
    environments: tuple[dict[str, str], ...],
    overlap: Overlap,
    files: Mapping[str, bytes],
) -> int:
    """Run in a locked folder, after the checks."""
    config, save = plan.config, plan.config.save
    if plan.changed_roles and (save.at_end or save.every_steps or save.every_epochs or save.every_s):
        _check_checkpoints(run_dir / CHECKPOINTS)
    changes: dict[str, object] = {"run_dir": str(run_dir)}
    if config.save.generations_path:
        path = str(Path(config.save.generations_path).absolute())
        changes["save"] = config.save.model_copy(update={"generations_path": path})
    config = config.model_copy(update=changes)
    for name, content in files.items():
        _write(run_dir / name, content)
    _write(run_dir / CONFIG_FILE, json.dumps(shown_config(config), indent=2).encode() + b"\n")
    start = SessionStart(
        run=dump_config(config),
        run_dir=str(run_dir),
        track=config.track,
        port=config.cluster.master_port,
        resume_from="" if resume.folder is None else str(resume.folder.resolve()),
        notes=resume.notes,
        overlap=overlap,
        environments=environments,
    )
    if config.launcher == "inline":
        return run_inline(start)
    store = checkpoint_store(plan, run_dir / CHECKPOINTS)
    recover = Recover(config.recover.retries, lambda: newest(store, resume), config.cluster.worker_timeout_s)
    return run_supervised(start, recover, inherited=(lock,))


def _make_new_folder(base: Path) -> Path:
    """A folder named after the time, and after a number when another run started in the same second."""
    name = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"_{i}" for i in range(1, 1000))):
        with contextlib.suppress(FileExistsError):
            return _make_folder(base / (name + suffix), exist_ok=False)
    raise ConfigError(f"{base} holds a thousand runs of this second", remedy="Choose a folder with run_dir=PATH.")


def _make_folder(folder: Path, *, exist_ok: bool) -> Path:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(_OWNER_ONLY, exist_ok=exist_ok)
    except OSError as err:
        if isinstance(err, FileExistsError) and not exist_ok:
            raise
        raise ConfigError(
            f"run_dir={folder} cannot be made: {err.strerror}", remedy="Choose another folder with run_dir=PATH."
        ) from err
    return folder


def _check_checkpoints(folder: Path) -> None:
    """Make the folder now: the first checkpoint may be days away."""
    try:
        folder.mkdir(exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission to write there"
    except OSError as err:
        reason = err.strerror or str(err)
    if reason:
        raise ConfigError(
            f"{folder} cannot hold checkpoints: {reason}",
            remedy="Move it away, or choose another folder with run_dir=PATH.",
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[tuple[Path, int]]:
    """Make the folder, and lock it against other runs; gives folder and lock.

    The system takes the lock back when the last process that holds it has ended: this one, or its master. A run that is
    refused leaves no folder behind that was not there before.

    Raises:
        ConfigError: another run holds the lock, or there cannot be one.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = _lock(folder)
    try:
        yield folder, lock
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK_FILE).unlink()
            for path in made:
                path.rmdir()  # unless something is in it
        fcntl.flock(lock, fcntl.LOCK_UN)  # also for copies that user code may have forked
        os.close(lock)


def _lock(folder: Path) -> int:
    """Make the folder and lock its lock file; returns its descriptor."""
    path, lock = folder / LOCK_FILE, -1
    while True:
        _make_folder(folder, exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), path.stat()):
                os.ftruncate(lock, 0)
                os.write(lock, b"%d\n" % os.getpid())
                return lock
            os.close(lock)
        except FileNotFoundError:  # a run that ended meanwhile has removed the file or the folder
            continue
        except BlockingIOError:
            raise ConfigError(
                f"another run is going on in run_dir={folder}: process {_read_holder(lock)}",
                remedy="Wait for its end, or choose another folder.",
            ) from None
        except OSError as err:
            raise ConfigError(
                f"run_dir={folder} cannot be locked against other runs: {err.strerror}",
                remedy="Choose another folder with run_dir=PATH, on a writable file system that has locks.",
            ) from err


def _read_holder(lock: int) -> str:
    """The process that holds the lock, which may be about to write it down; closes the descriptor."""
    for _ in range(100):
        if holder := os.pread(lock, 32, 0).strip():
            break
        time.sleep(0.01)
    os.close(lock)
    return holder.decode() or "unknown"


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        write_output(temporary, content)
        os.replace(temporary, path)
    except OSError as err:
        raise ConfigError(
            f"{path} cannot be written: {err.strerror}", remedy="Choose another folder with run_dir=PATH."
        ) from err

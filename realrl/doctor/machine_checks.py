"""Checks of a run's surroundings: files, run folder, devices, disk, port, optional packages."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import socket
from pathlib import Path

from realrl.config.paths import check_paths
from realrl.config.reward_options import RewardOptions
from realrl.config.schema import REASONING_TASKS, RunConfig
from realrl.doctor.findings import Finding, Status
from realrl.doctor.run_under_check import RunUnderCheck
from realrl.errors import ConfigError, UsageError, counted
from realrl.experiment.rewards import reward_parts
from realrl.experiment.states import role_states
from realrl.files import cache_dir
from realrl.plan.backends import BACKENDS
from realrl.plan.memory.plan import checkpoint_bytes, show_bytes
from realrl.runtime.checkpoints.resume import refuse_mixing
from realrl.runtime.checkpoints.store import CHECKPOINTS
from realrl.runtime.launchers.base import available_cores
from realrl.runtime.nodes.addresses import listen, master_address
from realrl.runtime.nodes.meeting import join_port
from realrl.runtime.nodes.started import check_srun
from realrl.runtime.processes.load import cores_of_others, is_crowded
from realrl.runtime.processes.machine import check_devices as check_devices_here
from realrl.runtime.processes.run_folder import check_checkpoints, check_unlocked
from realrl.runtime.ray.address import check_ray
from realrl.sched.nodes.jobs import allocation_of, job_of

EXTRAS = {
    "pyarrow": "parquet",
    "tensorboard": "track",
    "wandb": "track",
    "math_verify": "rewards",
    "reasoning_gym": "rewards",
    **{rules.package: rules.extra for rules in BACKENDS.values() if rules.package},
}
"""Module -> the extra that brings it."""


def check_files(run: RunUnderCheck) -> list[Finding]:
    """Check that models and datasets of the configuration exist, and that the run folder can."""
    check_paths(run.config, cache_dir=cache_dir().absolute())
    return [Finding(Status.OK, f"models, data and {_run_folder(run)}/")]


def check_run_folder(run: RunUnderCheck) -> list[Finding]:
    """Check that results can be written, and would not mix with those of another run, earlier or at work."""
    folder = Path(run.config.run_dir).absolute()
    if run.config.run_dir and not run.holds_lock:
        check_unlocked(folder)
    refuse_mixing(run.config)
    if run.config.run_dir and run.plan.changed_roles and run.config.save.writes:
        check_checkpoints(folder / CHECKPOINTS)
    return [Finding(Status.OK, f"{_run_folder(run)}/ holds nothing of another run")]


def check_devices(run: RunUnderCheck) -> list[Finding]:
    """Check that this machine has a device for each worker of a node, or one if they share devices."""
    cluster, kind = run.config.cluster, run.config.cluster.device
    is_planned = run.device_memory_bytes is not None
    if run.config.is_on_machines:
        check_machines(run.config)
        asks_ray = run.config.launcher == "ray" and not is_planned
        where = f" (Ray cluster: {check_ray(cluster, os.environ)})" if asks_ray else ""
        each = f"each of {cluster.n_nodes} machines is looked at when it joins{where}"
        return [Finding(Status.OK, f"{run.plan.n_workers} of type {kind}; {each}")]
    try:
        check_devices_here(run.config, run.found)
    except ConfigError as error:
        if not is_planned:
            raise
        return [Finding(Status.WARNING, f"planned for other machines than this one: {error.message}")]
    if cluster.n_nodes > 1:
        message = (
            f"cluster.n_nodes={cluster.n_nodes}, but launcher={run.config.launcher} starts workers on one machine only"
        )
        remedy = "Use launcher=slurm or ray, or launcher=external and `realrl node` on each machine (docs/clusters.md)."
        return [Finding(Status.WARNING if is_planned else Status.PROBLEM, message, remedy)]
    message = f"{run.plan.n_workers} of type {kind}"
    if cluster.shares_devices:
        message = f"{run.plan.n_workers} workers share {run.found.count} of type cuda" if kind == "cuda" else message
        message += "; what they send each other goes through host memory (cluster.shares_devices, for tests)"
    return [Finding(Status.OK, message)]


def check_machines(config: RunConfig) -> None:
    """Check that the job in which the run is started has enough machines.

    Raises:
        UsageError: it has not, or srun is missing, or would be started several times.
    """
    name, n_there, wanted = "SLURM", 0, config.cluster.n_nodes
    allocation = allocation_of(os.environ) if config.launcher == "slurm" else None
    if allocation is not None:
        n_there = len(allocation.hosts)
    elif config.launcher == "external" and (job := job_of(os.environ)) is not None and job.is_everywhere:
        name, n_there = job.launcher, job.n_machines
    if 0 < n_there < wanted:
        raise UsageError(
            f"the job of {name} has {counted(n_there, 'machine')}, and the plan needs {wanted}",
            remedy=f"Ask for {wanted}, or use cluster.n_nodes={n_there}.",
        )
    if allocation is None:
        return
    if allocation.n_tasks > 1:
        raise UsageError(
            f"launcher=slurm starts agents itself, and SLURM has started this {allocation.n_tasks} times",
            remedy="Leave srun before it out, or take launcher=external.",
        )
    check_srun()


def check_disk(run: RunUnderCheck) -> list[Finding]:
    """Check that the run folder's disk has room for the checkpoints that stay, and for the one being written."""
    folder = _run_folder(run).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    states = role_states(run.plan, run.models)
    one = sum(checkpoint_bytes(state) for state in states.values() if state.is_changed)
    if not one:
        return [Finding(Status.OK, f"{show_bytes(free)} free in {existing}; nothing is trained")]
    save = run.config.save
    if not save.writes:
        return [Finding(Status.OK, f"{show_bytes(free)} free in {existing}; no checkpoint is written")]
    most = save.keep + 1 + bool(save.keep_best) if save.is_regular else 1
    message = (
        f"a checkpoint takes {show_bytes(one)}, {most} at most exist at a time; {show_bytes(free)} free in {existing}"
    )
    if most * one > free:
        return [Finding(Status.PROBLEM, message, "Set run_dir to a larger disk, or lower save.keep.")]
    return [Finding(Status.OK, message)]


def check_load(run: RunUnderCheck) -> list[Finding]:
    """Check that workers on the CPU have its cores for themselves."""
    if run.config.cluster.device == "cuda":
        return [Finding(Status.OK, "workers compute on GPUs")]
    n_busy, n_cores = cores_of_others(), available_cores()
    message = f"other work takes {n_busy:.1f} of {n_cores} cores now"
    if not is_crowded(n_busy, n_cores):
        return [Finding(Status.OK, message)]
    return [Finding(Status.WARNING, message, "End it, or expect steps to take several times as long.")]


def check_port(run: RunUnderCheck) -> list[Finding]:
    """Check that the port that the master is to listen on is free."""
    cluster, port = run.config.cluster, run.config.cluster.master_port
    if run.config.is_on_machines:
        address, port = master_address(cluster), join_port(cluster, job_of(os.environ))
        listen(address, port).close()
        return [Finding(Status.OK, f"machines join at {address}:{port or 'a free port'}")]
    if port == 0 or run.config.launcher == "inline":
        return [Finding(Status.OK, "the master takes a socket file" if port == 0 else "one process needs no port")]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            reason = f"port {port} on 127.0.0.1 is taken by another program" if is_taken else error.strerror
            remedy = "Choose another port, or 0 for a socket file; `ss -ltnp` lists who listens."
            return [Finding(Status.PROBLEM, f"cluster.master_port={port}: {reason}", remedy)]
    return [Finding(Status.OK, f"{port} is free")]


def check_packages(run: RunUnderCheck) -> list[Finding]:
    """Check that the optional packages that this run needs are installed."""
    needed = _needed_modules(run)
    missing = [module for module in needed if not _is_installed(module)]
    if missing:
        extras = ",".join(dict.fromkeys(EXTRAS[module] for module in missing))
        message = f"not installed, but needed: {', '.join(missing)}"
        return [Finding(Status.PROBLEM, message, f"pip install 'realrl[{extras}]'")]
    return [Finding(Status.OK, f"needed: {', '.join(needed) or 'no optional one'}")]


def _is_installed(module: str) -> bool:
    package = module.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def _needed_modules(run: RunUnderCheck) -> list[str]:
    config = run.config
    needed: list[str] = list(config.track)
    trained = [name for name, role in run.plan.roles.items() if role.trainable]
    needed += [BACKENDS[config.models[name].backend].package for name in trained]
    for _, path, _ in run.sources:
        needed += ["pyarrow"] if path.endswith(".parquet") else []
        needed += ["reasoning_gym"] if path.startswith(REASONING_TASKS) else []
    if isinstance(config.algorithm, RewardOptions):
        needed += [part.function for part in reward_parts(config.algorithm).values()]
    return [module for module in dict.fromkeys(needed) if module in EXTRAS]


def _run_folder(run: RunUnderCheck) -> Path:
    return Path(run.config.run_dir or f"runs/{run.plan.experiment.name}")

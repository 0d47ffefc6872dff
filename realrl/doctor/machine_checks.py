"""Checks of a run's surroundings (files, devices, disk, ports, optional packages), and those of its start."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from dataclasses import replace
from pathlib import Path

from realrl.config.paths import check_paths
from realrl.config.reward_options import RewardOptions
from realrl.config.schema import REASONING_TASKS
from realrl.cpu import describe
from realrl.data.assets.store import cache_dir
from realrl.doctor.findings import Finding, Status
from realrl.doctor.run_under_check import RunUnderCheck
from realrl.engine import device as devices
from realrl.errors import ConfigError
from realrl.experiment.rewards import reward_parts
from realrl.experiment.states import role_states
from realrl.plan.backends import BACKENDS
from realrl.plan.memory.plan import checkpoint_bytes, show_bytes
from realrl.runtime.processes.preflight import check_inputs

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
    """Check that models, datasets and the run folder of the configuration exist."""
    check_paths(run.config, cache_dir=cache_dir().absolute())
    return [Finding(Status.OK, f"models, data and {_run_folder(run)}/")]


def check_devices(run: RunUnderCheck) -> list[Finding]:
    """Check that this machine has a device for each worker of a node, or one if they share devices."""
    cluster = run.config.cluster
    try:
        for local_rank in reversed(range(cluster.n_needed_per_node)):  # the first stays chosen
            devices.resolve_device(cluster.device, local_rank)
    except ConfigError as error:
        if run.device_memory_bytes is None:
            raise
        return [Finding(Status.WARNING, f"planned for other machines than this one: {error.message}")]
    message = f"{run.plan.n_workers} of type {run.device.type}"
    if cluster.shares_devices:
        found = devices.device_count()
        message = f"{run.plan.n_workers} workers share {found} of type cuda" if run.device.type == "cuda" else message
        message += "; what they send each other goes through host memory (cluster.shares_devices, for tests)"
    if cluster.n_nodes > 1:
        status = Status.PROBLEM if run.device_memory_bytes is None else Status.WARNING
        message += f" on {cluster.n_nodes} nodes, but this version starts workers on one machine only"
        return [Finding(status, message, "Use cluster.n_nodes=1; plans for more nodes can be made and drawn.")]
    if run.device.type == "cpu":
        message += f"; generation with {describe()}"
    return [Finding(Status.OK, message)]


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
    is_regular = save.every_steps or save.every_epochs or save.every_s
    most = save.keep + 1 + bool(save.keep_best) if is_regular else 1
    message = (
        f"a checkpoint takes {show_bytes(one)}, {most} at most exist at a time; {show_bytes(free)} free in {existing}"
    )
    if most * one > free:
        return [Finding(Status.PROBLEM, message, "Set run_dir to a larger disk, or lower save.keep.")]
    return [Finding(Status.OK, message)]


def check_port(run: RunUnderCheck) -> list[Finding]:
    """Check that the port that the master is to listen on is free."""
    port = run.config.cluster.master_port
    if port == 0:
        return [Finding(Status.OK, "the master takes a socket file")]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            message = f"cluster.master_port={port}: {error.strerror}"
            return [Finding(Status.PROBLEM, message, "Choose another port, or 0 for a socket file.")]
    return [Finding(Status.OK, f"{port} is free")]


def check_packages(run: RunUnderCheck) -> list[Finding]:
    """Check that the optional packages that this run needs are installed."""
    needed = _needed_modules(run)
    installed = [module for module in EXTRAS if _is_installed(module)]
    missing = [module for module in needed if module not in installed]
    if missing:
        extras = ",".join(dict.fromkeys(EXTRAS[module] for module in missing))
        message = f"not installed, but needed: {', '.join(missing)}"
        return [Finding(Status.PROBLEM, message, f"pip install 'realrl[{extras}]'")]
    message = f"needed: {', '.join(needed) or 'no optional one'}; installed: {', '.join(installed) or 'none'}"
    return [Finding(Status.OK, message)]


def _is_installed(module: str) -> bool:
    package = module.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def _needed_modules(run: RunUnderCheck) -> list[str]:
    config = run.config
    needed: list[str] = list(config.track)
    trained = [name for name, role in run.plan.roles.items() if role.trainable]
    needed += [BACKENDS[config.models[name].backend].package for name in trained]
    for path in (config.dataset.path, config.eval.path):
        needed += ["pyarrow"] if path.endswith(".parquet") else []
        needed += ["reasoning_gym"] if path.startswith(REASONING_TASKS) else []
    if isinstance(config.algorithm, RewardOptions):
        needed += [part.function for part in reward_parts(config.algorithm).values()]
    return [module for module in dict.fromkeys(needed) if module in EXTRAS]


def check_start(run: RunUnderCheck) -> list[Finding]:
    """Repeat the checks of `realrl run` before it starts workers, such as that of the checkpoint to resume from."""
    config = run.config
    if not config.run_dir:
        config = config.model_copy(update={"run_dir": str(_run_folder(run))})
    resume = check_inputs(replace(run.plan, config=config))
    if resume.notes:
        message = f"realrl run would start this, but not where it ended: {'; '.join(resume.notes)}"
        return [Finding(Status.WARNING, message)]
    where = "" if resume.folder is None else f", from {resume.folder} on"
    return [Finding(Status.OK, f"realrl run would start this{where}")]


def _run_folder(run: RunUnderCheck) -> Path:
    return Path(run.config.run_dir or f"runs/{run.plan.experiment.name}")

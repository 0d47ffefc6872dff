"""Commands that a job scheduler starts on every machine, or that are to be given to one."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from realrl.errors import MachinesError, UsageError
from realrl.sched.nodes.jobs import Job, allocation_of, job_of
from realrl.sched.nodes.slurm import Request, sbatch_line, script

if TYPE_CHECKING:
    from realrl.config.schema import RunConfig

_LOOK_S = 0.2
_PATIENCE_S = 300.0


def machines_of_job() -> int:
    """Return the number of machines of the job that this process belongs to; 0 if it is not known, or there is none."""
    job = job_of(os.environ)
    return 0 if job is None else job.n_machines


def place_in_job() -> Job | None:
    """Return the job of this process, and tell what of its environment is surprising; None without a job.

    Raises:
        UsageError: a variable has no such value.
    """
    job = job_of(os.environ)
    if job is None:
        return None
    if job.others:
        _say(f"{job.launcher} has started this, so its variables count, and not those of {', '.join(job.others)}")
    if job.launcher == "mpirun" and job.local_rank == 0:
        from realrl.runtime.launchers.base import available_cores

        n_here, n_all = available_cores(), os.cpu_count() or 1
        if n_here < n_all:
            _say(f"mpirun binds this process to {n_here} of {n_all} cores; `mpirun --bind-to none` gives it all")
    return job


def is_surplus(job: Job | None) -> bool:
    """Return True, and say so, if this process is not the first of its job on this machine: one serves it all."""
    if job is None or not job.local_rank:
        return False
    _say(
        f"process {job.local_rank} of {job.launcher} on this machine has nothing to do: process 0 starts all workers "
        "here, so one for each machine is enough"
    )
    return True


def join_instead(config: RunConfig) -> int | None:
    """Join the run, where another machine of the job leads it; returns the exit code, or None if this process leads.

    Raises:
        UsageError: the environment has wrong values, or does not tell where the run is.
        MachinesError: the run has not begun in time.
    """
    if config.launcher != "external":
        return None
    job = place_in_job()
    if is_surplus(job):
        return 0
    if job is None or not job.is_everywhere or not job.index:
        return None
    from realrl.runtime.nodes.agent import JobPlace, run_agent
    from realrl.runtime.nodes.key import take_key

    key, place = take_key(), JobPlace(job.index, job.n_machines)
    limit_s = config.cluster.start_timeout_s
    if key is None:
        path = _join_file(config, job)
        find, awaited = following(path), f"has written no {path}"
        remedy = "Its own output tells why; cluster.join_file must be in a folder that all machines share."
    else:
        host, port = _address(config, job)
        find, awaited = resolving(host, port, key), f"has no address: there is no host {host}"
        remedy = "Give another name or an address: cluster.master_address=ADDRESS"
    _say(f"machine {job.index} of {job.launcher} joins the run that machine 0 leads")
    deadline_s = time.monotonic() + limit_s
    while (found := find()) is None:
        if time.monotonic() > deadline_s:
            raise MachinesError(f"machine 0 of {job.launcher} {awaited}, after {limit_s:g} s", remedy=remedy)
        time.sleep(_LOOK_S)
    is_remade = job.launcher == "Kubernetes"  # machine 0 alone, and then it leads the run again
    return run_agent(*found, place, patience_s=max(limit_s, _PATIENCE_S), outlives_run=is_remade, find=find)


def following(path: Path) -> Callable[[], tuple[str, bytes] | None]:
    """Return a function that reads a join file, or returns None while there is none or it is half written."""
    from realrl.runtime.nodes.key import read_join_file

    def look() -> tuple[str, bytes] | None:
        try:
            return read_join_file(path) if path.is_file() and path.stat().st_size else None
        except UsageError:
            if not path.is_file() or time.time() - path.stat().st_mtime < _LOOK_S * 5:
                return None
            raise

    return look


def resolving(host: str, port: int, key: bytes) -> Callable[[], tuple[str, bytes] | None]:
    """Return a function that looks up a host, or returns None while it has no address: a pod may get another one."""
    from realrl.runtime.nodes.addresses import resolve

    def look() -> tuple[str, bytes] | None:
        try:
            return f"{resolve(host)}:{port}", key
        except UsageError:
            return None

    return look


def _address(config: RunConfig, job: Job) -> tuple[str, int]:
    host = config.cluster.master_address or job.master_host
    port = config.cluster.master_port or job.master_port
    if not host or not port:
        key = "cluster.master_port=PORT" if host else "cluster.master_address=ADDRESS"
        raise UsageError(
            f"machine {job.index} of {job.launcher} does not know the {'port' if host else 'address'} of machine 0",
            remedy=f"Add {key}; or leave REALRL_KEY out, and set cluster.join_file in a folder that all share.",
        )
    return host, port


def _join_file(config: RunConfig, job: Job) -> Path:
    from realrl.runtime.nodes.meeting import join_file_of_job

    path = join_file_of_job(config.cluster, job)
    if path is None:
        raise UsageError(
            f"machine {job.index} of {job.launcher} does not know how to join: the job has no name of its own",
            remedy="Set cluster.join_file=FILE in a folder that all machines share, or REALRL_KEY on each of them.",
        )
    return path


# ---------------------------------------------------------------- SLURM


def hand_to_slurm(name: str, config: RunConfig, options: argparse.Namespace) -> int | None:
    """Write the script for sbatch, or tell how to submit the run, outside an allocation; None inside one.

    Args:
        name: of the job.
        config: with a settled device.

    Raises:
        UsageError: the run is in no allocation, or has no folder; or the script cannot be written.
    """
    wanted = getattr(options, "sbatch", None)
    if wanted is not None and config.launcher != "slurm":
        raise UsageError("--sbatch writes a script for SLURM", remedy="Add launcher=slurm.")
    if config.launcher != "slurm" or (wanted is None and allocation_of(os.environ) is not None):
        return None
    if not config.run_dir:
        raise UsageError(
            "launcher=slurm needs a folder in which a job that is queued again goes on",
            remedy="Add run_dir=FOLDER, in a file system that all machines share.",
        )
    cluster = config.cluster
    request = Request(name, cluster.n_nodes, cluster.n_devices_per_node, cluster.device)
    command = _command(options)
    if wanted is None:
        print(sbatch_line(request, command))
        raise UsageError(
            "launcher=slurm, and this is in no allocation of SLURM: the line above submits the run",
            remedy="Better: --sbatch FILE writes a script, by which SLURM also queues an interrupted run again.",
        )
    from realrl.files import write_output

    path = Path(wanted)
    try:
        write_output(path, script(request, command, os.getcwd()).encode())
        path.chmod(0o700)
    except OSError as error:
        raise UsageError(f"--sbatch {path} cannot be written: {error.strerror}") from error
    print(f"wrote {path}; submit it with: {shlex.join(['sbatch', str(path)])}")
    return 0


def _command(options: argparse.Namespace) -> Sequence[str]:
    """Return words that start the run in a job, where it goes on from what an interrupted one has saved."""
    words = [sys.executable, "-P", "-m", "realrl", options.command, *options.arguments]
    words += ["--out", options.out] if getattr(options, "out", None) else []
    if options.command == "run" and not any(word.lstrip("+").startswith("resume=") for word in options.arguments):
        words.append("resume=auto")
    return words


def _say(text: str) -> None:
    print(f"realrl: {text}", file=sys.stderr, flush=True)

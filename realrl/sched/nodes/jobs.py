"""Environment variables by which launchers of jobs tell processes their place.

Several may have left theirs: torchrun below srun, mpirun in a pod. The one that is closest to the process counts, and
each is usually started by those after it: torchrun, mpirun, SLURM, Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from realrl.errors import UsageError
from realrl.sched.nodes.hostlist import expand_counts, expand_hosts

T = TypeVar("T")
_NO_ID = ("", "none")  # torchrun's, unless the user gives one
OF_TORCHRUN = re.compile(
    r"(TORCHELASTIC|LOCAL|GROUP|ROLE)_\w+|(MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|TORCH_NCCL_ASYNC_ERROR_HANDLING)"
)


@dataclass(frozen=True)
class Job:
    """A process of a job on several machines.

    Attributes:
        index: number of its machine, from 0; numbers may be left out. None if it is not known.
        n_machines: of the job; 0 if it is not known.
        is_everywhere: the same command was started on each machine, and not on this one alone.
        local_rank: number of the process among those of the job on this machine.
        id: name that no other job has, the same on every machine; "" if there is none.
        master_host: name or address of machine 0; "" if it is not known.
        master_port: a port that is free on machine 0 for the run; 0 if none was chosen.
        launcher: name of what started the process.
        others: other launchers whose variables are there, and do not count.
    """

    index: int | None
    n_machines: int = 0
    is_everywhere: bool = True
    local_rank: int = 0
    id: str = ""
    master_host: str = ""
    master_port: int = 0
    launcher: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Allocation:
    """Machines that SLURM has given to a job.

    Attributes:
        hosts: names, in SLURM's order.
        n_cpus: that the job has on each machine, the least of them; 0 if it is not known.
        n_tasks: processes of the step that this one belongs to; 1 in a batch script.
    """

    job: str
    hosts: tuple[str, ...]
    n_cpus: int = 0
    n_tasks: int = 1


def job_of(environment: Mapping[str, str]) -> Job | None:
    """Return what the environment says of a job; None if there is none.

    Raises:
        UsageError: a variable has no such value.
    """
    found = [(name, read) for name, needed, read in _LAUNCHERS if needed <= environment.keys()]
    if not found:
        return None
    (name, read), *others = found
    return replace(read(environment), launcher=name, others=tuple(other for other, _ in others if other != name))


def allocation_of(environment: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of SLURM in which a process is; None outside.

    Raises:
        UsageError: a variable has no such value.
    """
    if "SLURM_JOB_ID" not in environment:
        return None
    hosts = _hosts(environment, "SLURM_JOB_NODELIST")
    counts = _list(environment, "SLURM_JOB_CPUS_PER_NODE", expand_counts)
    n_hosts = len(hosts) or _number(environment, "SLURM_JOB_NUM_NODES", 1)
    return Allocation(
        job=environment["SLURM_JOB_ID"],
        hosts=hosts or ("",) * n_hosts,
        n_cpus=min(counts, default=0),
        n_tasks=_number(environment, "SLURM_STEP_NUM_TASKS", 1),
    )


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for workers: without the ranks of torchrun, which are not theirs."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return dict(environment)
    return {name: value for name, value in environment.items() if OF_TORCHRUN.fullmatch(name) is None}


# ---------------------------------------------------------------- launchers


def _of_torchrun(environment: Mapping[str, str]) -> Job:
    name = environment["TORCHELASTIC_RUN_ID"]
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Job(
        index=_number(environment, "GROUP_RANK"),
        n_machines=_number(environment, "GROUP_WORLD_SIZE", 0),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        id="" if name in _NO_ID else _safe(f"torchrun-{name}-{restarts}"),
        master_host=environment.get("MASTER_ADDR", ""),  # torchrun itself listens on MASTER_PORT
    )


def _of_open_mpi(environment: Mapping[str, str]) -> Job:
    n_ranks = _number(environment, "OMPI_COMM_WORLD_SIZE", 1)
    n_local = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    name = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    return Job(
        index=_number(environment, "OMPI_COMM_WORLD_RANK"),
        n_machines=-(-n_ranks // max(1, n_local)),
        local_rank=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        id=_safe(f"mpirun-{name}") if name else "",
    )


def _of_hydra(environment: Mapping[str, str]) -> Job:
    """The mpirun of MPICH, Intel MPI and MVAPICH."""
    n_local = _number(environment, "MPI_LOCALNRANKS", 1)
    return Job(
        index=_number(environment, "PMI_RANK"),
        n_machines=-(-_number(environment, "PMI_SIZE", 0) // max(1, n_local)),
        local_rank=_number(environment, "MPI_LOCALRANKID"),
    )


def _of_slurm(environment: Mapping[str, str]) -> Job:
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    if (n_machines := _number(environment, "SLURM_STEP_NUM_NODES", 1)) > 1:
        step = environment.get("SLURM_STEP_ID", "0")
        return Job(
            index=_number(environment, "SLURM_NODEID"),
            n_machines=n_machines,
            local_rank=_number(environment, "SLURM_LOCALID", 0),
            id=_safe(f"slurm-{environment['SLURM_JOB_ID']}-{step}-{restarts}"),
            master_host=next(iter(_hosts(environment, "SLURM_STEP_NODELIST")), ""),
        )
    hosts, here = _hosts(environment, "SLURM_JOB_NODELIST"), environment.get("SLURMD_NODENAME")
    return Job(
        index=hosts.index(here) if here in hosts else None,
        n_machines=_number(environment, "SLURM_JOB_NUM_NODES", len(hosts)),
        is_everywhere=False,
        master_host=hosts[0] if hosts else "",
    )


def _of_kubernetes(environment: Mapping[str, str]) -> Job:
    return Job(
        index=_number(environment, "JOB_COMPLETION_INDEX"),
        master_host=environment.get("MASTER_ADDR", ""),
        master_port=_number(environment, "MASTER_PORT", 0),
    )


_LAUNCHERS: tuple[tuple[str, frozenset[str], Callable[[Mapping[str, str]], Job]], ...] = (
    ("torchrun", frozenset({"TORCHELASTIC_RUN_ID", "GROUP_RANK"}), _of_torchrun),
    ("mpirun", frozenset({"OMPI_COMM_WORLD_RANK"}), _of_open_mpi),
    ("mpirun", frozenset({"PMI_RANK", "MPI_LOCALRANKID"}), _of_hydra),
    ("SLURM", frozenset({"SLURM_JOB_ID"}), _of_slurm),
    ("Kubernetes", frozenset({"JOB_COMPLETION_INDEX"}), _of_kubernetes),
)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in environment:
        return default
    text = environment.get(name, "")
    if not text.isdecimal() or len(text) > 9:
        raise UsageError(
            f"the environment variable {name}={text[:40]!r} is no number of a job",
            remedy="Unset it, unless the launcher of the job has set it.",
        )
    return int(text)


def _hosts(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    return _list(environment, name, expand_hosts)


def _list(environment: Mapping[str, str], name: str, expand: Callable[[str], tuple[T, ...]]) -> tuple[T, ...]:
    text = environment.get(name, "")
    try:
        return expand(text) if text else ()
    except ValueError as error:
        raise UsageError(f"the environment variable {name}: {error}", remedy="SLURM sets it; leave it.") from None


def _safe(name: str) -> str:
    """Return a name that can be that of a file."""
    return re.sub(r"[^\w.-]", "_", name)[:100]

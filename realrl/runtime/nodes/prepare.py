"""Start of a run on several machines, on the master's side: where it listens, its key, and how the others join."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from realrl.errors import UsageError
from realrl.experiment.run_plan import RunPlan
from realrl.files import cache_dir
from realrl.runtime.launchers.nodes import NodesStart
from realrl.runtime.nodes.addresses import listen, master_address
from realrl.runtime.nodes.key import new_key, write_join_file
from realrl.runtime.nodes.meeting import join_file_of_job, join_port
from realrl.runtime.nodes.started import AGENTS_LOG, OwnAgent, SrunAgents, StartedAgents
from realrl.runtime.nodes.survey import code_digests, files_of_run, versions
from realrl.runtime.processes.machine import common_environment
from realrl.runtime.ray.start import agents_on_ray
from realrl.sched.nodes.jobs import Job, allocation_of, job_of

_MOST_NAMED = 8


@dataclass(frozen=True)
class OpenNodes:
    """Start message of the master about its machines, and the agents that were started; None if others start them."""

    start: NodesStart
    agents: StartedAgents | None


@contextlib.contextmanager
def open_nodes(plan: RunPlan, run_dir: Path, given: bytes | None, logs: Path) -> Iterator[OpenNodes]:
    """Listen for agents, and start them or tell the user how they join; the file by which they do goes with the block.

    Args:
        given: the key that the user has set; None makes one.
        logs: folder for what the agents write that are started.

    Raises:
        UsageError: there is no address or port to listen on, the key is none, or the file cannot be written; Ray is not
            installed, or its cluster is not there or unfit.
        MachinesError: the cluster of Ray has no room.
    """
    config, cluster = plan.config, plan.config.cluster
    key, job = given or new_key(), job_of(os.environ)
    host = master_address(cluster)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(host, join_port(cluster, job)))
        port = listener.getsockname()[1]
        place = f"{host}:{port}"
        agents: SrunAgents | OwnAgent | None = None

        def join_file() -> Path:
            path = _join_file(plan, run_dir, job)
            write_join_file(path, place, key, run_dir)
            stack.callback(path.unlink, missing_ok=True)
            return path

        if config.launcher == "slurm":
            agents = _by_srun(cluster.n_nodes, join_file(), logs)
        elif config.launcher == "external":
            is_by_file = given is None or cluster.join_file
            how = f"--join {join_file()}" if is_by_file else f"{place}  (with the same REALRL_KEY)"
            if job is not None and job.is_everywhere:
                agents = OwnAgent(place, key, logs / AGENTS_LOG)
                print(f"machine {job.index} of {job.launcher}: this one leads the run, the others join it", flush=True)
            else:
                print(f"on each of {cluster.n_nodes} machines: realrl node {how}", flush=True)
        if agents is not None:
            stack.callback(agents.close)
        start = NodesStart(
            key=key,
            host=host,
            port=port,
            listening=listener.fileno(),
            n_machines=cluster.n_nodes,
            n_workers_each=cluster.n_devices_per_node,
            n_accelerators=cluster.n_needed_per_node if cluster.device == "cuda" else 0,
            lease_s=cluster.lease_s,
            start_timeout_s=cluster.start_timeout_s,
            versions=versions(),
            digests=code_digests(),
            files=files_of_run(config),
            directory=os.getcwd(),
            device=cluster.device,
            environment=common_environment(plan),
        )
        if config.launcher == "ray":
            stack.enter_context(agents_on_ray(cluster, f"realrl {run_dir.name}", start, logs))
        yield OpenNodes(start, agents)


def _by_srun(n_machines: int, path: Path, logs: Path) -> SrunAgents:
    allocation = allocation_of(os.environ)
    assert allocation is not None  # checked before the run
    agents = SrunAgents(allocation, n_machines, path, logs / AGENTS_LOG)
    hosts = allocation.hosts if len(allocation.hosts) <= _MOST_NAMED else (*allocation.hosts[:_MOST_NAMED], "...")
    print(f"srun starts agents on the machines of job {allocation.job}: {', '.join(hosts)}", flush=True)
    return agents


def _join_file(plan: RunPlan, run_dir: Path, job: Job | None) -> Path:
    given = plan.config.cluster.join_file
    known = None if job is None or not job.is_everywhere else join_file_of_job(plan.config.cluster, job)
    name = f"{plan.experiment.name}-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{os.getpid()}.json"
    path = Path(given).absolute() if given else known or cache_dir().absolute() / "join" / name
    if path.resolve().is_relative_to(run_dir.resolve()):
        raise UsageError(
            f"cluster.join_file={given} is in the run folder, which others may read one day",
            remedy="Choose a file elsewhere, in your home for example.",
        )
    return path

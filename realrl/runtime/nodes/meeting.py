"""Port and file by which the machines of a job find each other: all of them know both from the job alone."""

from __future__ import annotations

from pathlib import Path

from realrl.config.schema import ClusterConfig
from realrl.files import cache_dir
from realrl.sched.nodes.jobs import Job


def join_port(cluster: ClusterConfig, job: Job | None) -> int:
    """Return the port where machines join: the user's, or one that the job has for it; 0 for a free one."""
    return cluster.master_port or (0 if job is None or not job.is_everywhere else job.master_port)


def join_file_of_job(cluster: ClusterConfig, job: Job) -> Path | None:
    """Return the join file of a job whose machines all run the same command; None if they cannot know its name."""
    if cluster.join_file:
        return Path(cluster.join_file).absolute()
    return cache_dir().absolute() / "join" / f"{job.id}.json" if job.id else None

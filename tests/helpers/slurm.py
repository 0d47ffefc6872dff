"""A cluster of SLURM on machines that share this one: a controller on the first, a slurmd on each. Needs slurm-wlm."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.machines import Machine, Site, machines

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel", "scontrol", "squeue")
_LIMIT_S = 60.0
_missing = [name for name in PROGRAMS if shutil.which(name) is None]
needs_slurm = pytest.mark.skipif(bool(_missing), reason=f"needs {', '.join(_missing)} (Debian: slurm-wlm)")

CONFIG = """\
ClusterName=test
SlurmctldHost={controller}({address})
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.txt
SlurmdLogFile={folder}/slurmd-%n.txt
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


class Slurm:
    """The cluster: commands of SLURM are typed on its first machine."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.folder = site, folder
        self.config = folder / "slurm.conf"

    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.config)}

    def command(self, *words: str, machine: Machine | None = None, **environment: str) -> list[str]:
        variables = [f"{name}={value}" for name, value in {**self.variables(), **environment}.items()]
        return (machine or self.site.machines[0]).command("env", "-C", str(self.folder), *variables, *words)

    def run(self, *words: str, limit_s: float = _LIMIT_S, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        command = self.command(*words, **environment)
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)

    def said(self, *words: str) -> str:
        """Output of a command that must succeed."""
        done = self.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def submit(self, *words: str, **environment: str) -> str:
        """Submit a job; returns its number."""
        done = self.run("sbatch", "--parsable", *words, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """State of a job, as in COMPLETED or PENDING."""
        return self.shown(job, "JobState")

    def shown(self, job: str, name: str) -> str:
        """A value of `scontrol show job`."""
        words = self.said("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def end_of(self, job: str, limit_s: float) -> str:
        """Wait until a job is over; returns its state."""
        return self.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"), limit_s)

    def wait_for(self, job: str, states: tuple[str, ...], limit_s: float) -> str:
        deadline_s = time.monotonic() + limit_s
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline_s, f"job {job} is {state}"
            time.sleep(0.2)
        return state


@contextmanager
def slurm(folder: Path, *names: str) -> Iterator[Slurm]:
    """Boot machines with SLURM; nothing of it is left after the block."""
    folder.mkdir(exist_ok=True, parents=True)
    with machines(*names) as site:
        cluster = Slurm(site, folder)
        nodes = "\n".join(f"NodeName={m.name} NodeAddr={m.address} CPUs=2" for m in site.machines)
        first = site.machines[0]
        text = CONFIG.format(folder=folder, nodes=nodes, controller=first.name, address=first.address)
        cluster.config.write_text(text)
        (folder / "state").mkdir(exist_ok=True)
        daemons = [(first, ("slurmctld", "-D", "-i"))]
        daemons += [(machine, ("slurmd", "-D", "-N", machine.name)) for machine in site.machines]
        processes = [
            machine.popen(*words, log=folder / f"{words[0]}-{machine.name}.out", cwd=folder, **cluster.variables())
            for machine, words in daemons
        ]
        try:
            deadline_s = time.monotonic() + _LIMIT_S
            while f"idle {len(names)}" not in cluster.run("sinfo", "-h", "-p", "low", "-o", "%T %D").stdout:
                assert time.monotonic() < deadline_s, (folder / f"slurmctld-{first.name}.out").read_text()[-2000:]
                time.sleep(0.1)
            yield cluster
        finally:
            for process in processes:
                process.kill()
                process.wait()

"""SLURM: the command that starts an agent on each machine, what srun says of their ends, and scripts for sbatch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from realrl.sched.nodes.jobs import Allocation
from realrl.sched.nodes.machines import EX_TEMPFAIL

GRACE_S = 60  # between the signal and the end of a job's time
_CORES_PER_GPU = 4
_MOST_RESTARTS = 100
_ENDED = re.compile(r"srun: error: (\S+): tasks? ([\d,\-\[\]]+): (.+)")
_REFUSED = "Exited with exit code 2"


def srun_words(allocation: Allocation) -> list[str]:
    """Return srun and its options: one task on each machine, which has all of the job's cores there.

    One task that ends, or a machine that dies, ends no other: the run decides. Variables of the environment, from which
    srun would take options of another step, are given a value each.
    """
    n = len(allocation.hosts)
    words = ["srun", f"--nodes={n}", f"--ntasks={n}", "--ntasks-per-node=1"]
    words += [f"--cpus-per-task={allocation.n_cpus}"] if allocation.n_cpus else []
    return [*words, "--overlap", "--mpi=none", "--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--export=ALL"]


# ---------------------------------------------------------------- what srun says


@dataclass(frozen=True)
class Loss:
    """So few agents are left that the run cannot go on.

    Attributes:
        exit_code: 75 if another try may do; 2 if an agent was refused; 1 if none was started.
        is_total: no agent is left.
    """

    message: str
    remedy: str
    exit_code: int
    is_total: bool


@dataclass
class Tasks:
    """Agents of one srun, by what it says.

    Attributes:
        n_started: agents.
        n_needed: agents without which the run cannot go on.
    """

    n_started: int
    n_needed: int
    _ended: dict[int, str] = field(default_factory=dict)  # number of a task -> machine and manner
    _srun: int | None = None  # exit code of srun
    _said: str = ""

    def hear(self, line: str) -> None:
        """Take in a line that srun wrote."""
        self._said = line or self._said
        match = _ENDED.fullmatch(line)
        if match is not None:
            self._ended |= dict.fromkeys(_numbers(match[2]), f"{match[1]}: {match[3]}")

    def end(self, exit_code: int) -> None:
        """Note that srun is gone."""
        self._srun = exit_code

    def loss(self) -> Loss | None:
        """Return the loss for which the run cannot go on; None while there are enough agents."""
        n_left = 0 if self._srun is not None else self.n_started - len(self._ended)
        if n_left >= self.n_needed:
            return None
        ends = "; ".join(dict.fromkeys(self._ended.values()))
        if self._srun is not None and not self._ended:
            manner = f"was killed by signal {-self._srun}" if self._srun < 0 else f"ended with exit code {self._srun}"
            said = f": {self._said}" if self._said else ""
            remedy = "Agents end with it. `scontrol show job` tells the state of the job."
            return Loss(f"srun {manner}{said}", remedy, EX_TEMPFAIL if self._srun < 0 else 1, is_total=True)
        exit_code = 2 if any(_REFUSED in manner for manner in self._ended.values()) else EX_TEMPFAIL
        remedy = "The agent has told why, in logs/agents.log of the run folder."
        if exit_code == EX_TEMPFAIL:
            remedy = "Queue the job again: it goes on from the newest checkpoint with resume=auto."
        message = f"too few agents are left, {n_left} of {self.n_started}, and the run needs {self.n_needed}: {ends}"
        return Loss(message, remedy, exit_code, is_total=n_left <= 0)


def _numbers(text: str) -> list[int]:
    """Return the tasks of ``0-2,5``."""
    found: list[int] = []
    for part in text.strip("[]").split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            found += range(int(first), int(last or first) + 1)
    return found


# ---------------------------------------------------------------- sbatch


@dataclass(frozen=True)
class Request:
    """Resources that a run asks SLURM for."""

    name: str
    n_machines: int
    n_devices_each: int
    device: str

    def options(self) -> tuple[str, ...]:
        """Return options of sbatch."""
        on_gpus = self.device == "cuda"
        n_cores = self.n_devices_each * (_CORES_PER_GPU if on_gpus else 1)
        found = [f"--job-name={self.name}", f"--nodes={self.n_machines}", "--ntasks-per-node=1"]
        found += [f"--gpus-per-node={self.n_devices_each}"] if on_gpus else []
        return (
            *found,
            f"--cpus-per-task={n_cores}",
            f"--signal=B:TERM@{GRACE_S}",
            "--requeue",
            "--open-mode=append",
        )


def sbatch_line(request: Request, command: Sequence[str]) -> str:
    """Return a line for the shell that submits a command."""
    return shlex.join(["sbatch", *request.options(), f"--wrap=exec {shlex.join(command)}"])


def script(request: Request, command: Sequence[str], directory: str) -> str:
    """Return a script for sbatch: a run that SLURM interrupts is saved, queued again, and goes on.

    A job that was cancelled is COMPLETING then, and is not queued again.
    """
    options = "\n".join(f"#SBATCH {option}" for option in request.options())
    return f"""\
#!/bin/bash
{options}
# Add what your cluster wants: --partition, --account, --time, --mem. The cores are for the workers of one machine.

cd {shlex.quote(directory)} || exit 2
# The run finishes its step, saves it and ends with 75 when it gets TERM or USR1, which SLURM sends to this shell.
trap 'again=1; kill -TERM "$!" 2> /dev/null' TERM USR1
{shlex.join(command)} &
again=1
while [ "$again" = 1 ]; do again=0; wait "$!"; code=$?; done
if [ "$code" = {EX_TEMPFAIL} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {_MOST_RESTARTS} ] \\
    && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
"""

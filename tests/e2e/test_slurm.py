"""Runs over two machines by SLURM itself: their numbers, what is shown of the key, ends, and interruptions."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_machine_failures import wait_until
from tests.e2e.test_machines import weights
from tests.helpers.machines import needs_machines, python
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, realrl
from tests.helpers.slurm import Slurm, needs_slurm, slurm

pytestmark = [pytest.mark.netns, pytest.mark.timeout(1800), needs_machines, needs_slurm]
N_STEPS = 40
LONG = (f"steps={N_STEPS}", "save.every_steps=1")
LEASE_S = 10.0
LIMIT_S = 500.0
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    with slurm(tmp_path / "slurm", "alpha", "beta") as made:
        yield made


class Alone:
    """The same plans on one machine; each runs once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[tuple[str, ...], Path] = {}

    def run_dir(self, *overrides: str) -> Path:
        if overrides not in self._done:
            folder = self._folder / str(len(self._done))
            words = ["run", "ppo", *SMALL, *overrides, f"run_dir={folder}", "cluster.n_devices_per_node=2"]
            done = realrl(*words, timeout_s=LIMIT_S)
            assert done.returncode == 0, done.stdout + done.stderr
            self._done[overrides] = folder
        return self._done[overrides]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


def words_of(run_dir: Path, *overrides: str) -> list[str]:
    words = [python(), "-m", "realrl", "run", "ppo", *SMALL, "launcher=slurm", f"run_dir={run_dir}", *overrides]
    return ["env", *(f"{name}={value}" for name, value in VARIABLES.items()), *words]


def start(cluster: Slurm, run_dir: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Start a run inside an allocation of two machines, as a person does with salloc."""
    command = cluster.command("salloc", "--nodes=2", "--cpus-per-task=2", *words_of(run_dir, *overrides))
    with (cluster.folder / "run.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def said(cluster: Slurm, name: str = "run.log") -> str:
    return (cluster.folder / name).read_text()


def wait_for(cluster: Slurm, text: str, name: str = "run.log") -> None:
    wait_until(lambda: (cluster.folder / name).exists() and text in said(cluster, name), LIMIT_S)


def running(cluster: Slurm, word: str = "realrl") -> list[list[int]]:
    return [machine.processes(word) for machine in cluster.site.machines]


@pytest.mark.parametrize("plan", [(), ("allocation=split",)], ids=["d2 across", "split"])
def test_numbers_are_those_of_one_machine_and_the_key_is_nowhere(
    cluster: Slurm, tmp_path: Path, alone: Alone, plan: tuple[str, ...]
) -> None:
    expected, run_dir = alone.run_dir(*plan), tmp_path / "run"
    run = start(cluster, run_dir, f"cluster.join_file={tmp_path / 'join.json'}", *plan)
    wait_for(cluster, "step 1/")
    key = re.search(r'"key": "(\w{64})"', (tmp_path / "join.json").read_text())
    assert key is not None
    every = ("sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2> /dev/null; true")
    shown = [machine.run(*every) for machine in cluster.site.machines]
    assert all("realrl" in text for text in shown)
    shown += [cluster.said("scontrol", "show", what) for what in ("job", "step")]
    assert [text for text in shown if key[1] in text] == []
    assert run.wait(LIMIT_S) == 0, said(cluster)
    assert not (tmp_path / "join.json").exists()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if key[1].encode() in path.read_bytes()] == []
    assert running(cluster) == [[], []]
    assert "srun starts agents on the machines of job 1: alpha, beta" in said(cluster)
    assert weights(run_dir) == weights(expected)
    assert_same_numbers(read_metrics(run_dir), read_metrics(expected), rel=0.0, floor=0.0)


def test_everything_ends_when_srun_is_killed(cluster: Slurm, tmp_path: Path) -> None:
    run = start(cluster, tmp_path / "run", "steps=100000")
    wait_for(cluster, "step 2/")
    alpha = cluster.site.machines[0]
    pids = alpha.processes("^srun ")
    for pid in pids:
        alpha.run("kill", "-9", str(pid))
    assert pids
    wait_until(lambda: running(cluster, "worker --rank|realrl node") == [[], []], LEASE_S + 2.0)
    assert run.wait(LIMIT_S) == 75, said(cluster)
    assert running(cluster) == [[], []]
    assert "srun was killed by signal 9" in said(cluster)


def test_an_agent_that_is_lost_ends_the_run_which_needs_it(cluster: Slurm, tmp_path: Path) -> None:
    run = start(cluster, tmp_path / "run", "steps=100000")
    wait_for(cluster, "step 2/")
    beta = cluster.site.machines[1]
    for pid in beta.processes("realrl node"):
        beta.run("kill", "-9", str(pid))
    wait_until(lambda: running(cluster)[1] == [], 2.0)
    assert run.wait(LIMIT_S) == 75, said(cluster)  # it does not wait for another agent: cluster.start_timeout_s is more
    assert "too few agents are left, 1 of 2, and the run needs 2: beta: Killed" in said(cluster)
    wait_until(lambda: running(cluster) == [[], []], LEASE_S + 2.0)


def test_refusals_come_at_once(cluster: Slurm, tmp_path: Path) -> None:
    begin_s = time.monotonic()
    small = start(cluster, tmp_path / "small", "cluster.n_nodes=3")
    assert small.wait(LIMIT_S) == 2
    assert "the job of SLURM has 2 machines, and the plan needs 3" in said(cluster)
    assert "or use cluster.n_nodes=2" in said(cluster)
    took_s = time.monotonic() - begin_s
    print(f"an allocation that is too small: refused after {took_s:.1f} s")
    assert took_s < 10.0
    words = words_of(tmp_path / "twice")
    twice = cluster.run("srun", "--nodes=2", "--ntasks=2", *words, limit_s=LIMIT_S)
    assert twice.returncode == 2
    assert "launcher=slurm starts agents itself, and SLURM has started this 2 times" in twice.stderr
    # A home that the machines do not share: the agent on the other one finds no file.
    beta = cluster.site.machines[1]
    (tmp_path / "hidden").mkdir()
    pid = beta.processes("slurmd -D")[0]
    beta.run("nsenter", f"--target={pid}", "--mount", "mount", "-t", "tmpfs", "none", str(tmp_path / "hidden"))
    run = start(cluster, tmp_path / "run", f"cluster.join_file={tmp_path / 'hidden' / 'join.json'}")
    assert run.wait(LIMIT_S) == 2, said(cluster)
    assert "too few agents are left, 1 of 2, and the run needs 2: beta: Exited with exit code 2" in said(cluster)
    assert "No such file" in (tmp_path / "run" / "logs" / "agents.log").read_text()


def test_every_task_of_a_step_can_run_the_same_command(cluster: Slurm, tmp_path: Path, alone: Alone) -> None:
    expected, run_dir = alone.run_dir(), tmp_path / "run"
    words = words_of(run_dir, "launcher=external")
    done = cluster.run(
        "srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--label", *words, limit_s=LIMIT_S,
        REALRL_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("has nothing to do: process 0 starts all workers here") == 2
    assert weights(run_dir) == weights(expected)


@pytest.mark.parametrize("how", ["TERM to all steps", "USR1 to the batch script", "preemption"])
def test_an_interrupted_job_is_queued_again_and_repeats_no_step(
    cluster: Slurm, tmp_path: Path, alone: Alone, how: str
) -> None:
    expected, run_dir, script = alone.run_dir(*LONG), tmp_path / "run", tmp_path / "run.sbatch"
    words = ("run", "ppo", *SMALL, *LONG, "launcher=slurm", "cluster.n_nodes=2", f"run_dir={run_dir}")
    wrote = realrl(*words, "--sbatch", str(script))
    assert wrote.returncode == 0, wrote.stderr
    assert wrote.stdout == f"wrote {script}; submit it with: sbatch {script}\n"
    job = cluster.submit("--partition=low", f"--output={cluster.folder}/job.log", str(script), **VARIABLES)
    wait_for(cluster, "step 2/", "job.log")
    begin_s = time.monotonic()
    if how == "preemption":
        cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
    elif how.startswith("TERM"):
        cluster.said("scancel", "--signal=TERM", job)
    else:
        cluster.said("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_for(job, ("PENDING",), LIMIT_S)
    assert time.monotonic() - begin_s < 40.0  # the run was saved in 30 s; SLURM looks every few
    assert cluster.shown(job, "Restarts") == "1"
    before = said(cluster, "job.log")
    assert "interrupted by" in before, before
    done = [entry["step"] for entry in read_metrics(run_dir)]
    assert len(done) < N_STEPS
    # Else it waits for two minutes. Within the second of its end slurmd does not start a job again, and SLURM fails it.
    cluster.said("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    assert cluster.end_of(job, LIMIT_S) == "COMPLETED", said(cluster, "job.log")
    after = said(cluster, "job.log").removeprefix(before)
    assert f"resuming from {run_dir}/checkpoints/step_{done[-1]}" in after, after
    assert f"step {done[-1]}/" not in after
    assert [entry["step"] for entry in read_metrics(run_dir)] == list(range(1, N_STEPS + 1))
    assert weights(run_dir) == weights(expected)
    assert running(cluster) == [[], []]


def test_a_cancelled_job_is_not_queued_again(cluster: Slurm, tmp_path: Path) -> None:
    script, run_dir = tmp_path / "run.sbatch", tmp_path / "run"
    words = ("run", "ppo", *SMALL, "steps=100000", "launcher=slurm", "cluster.n_nodes=2", f"run_dir={run_dir}")
    assert realrl(*words, "--sbatch", str(script)).returncode == 0
    job = cluster.submit(f"--output={cluster.folder}/job.log", str(script), **VARIABLES)
    wait_for(cluster, "step 2/", "job.log")
    cluster.said("scancel", job)
    assert cluster.end_of(job, 60.0) == "CANCELLED", said(cluster, "job.log")
    wait_until(lambda: running(cluster) == [[], []], LEASE_S + 10.0)
    assert cluster.state(job) == "CANCELLED"

"""Runs over two machines by torchrun and by mpirun, which start the same command on each of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_machines import weights
from tests.helpers.machines import Machine, Site, machines, needs_machines, python
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, realrl
from tests.helpers.slurm import needs_slurm, slurm

pytestmark = [pytest.mark.netns, pytest.mark.timeout(1800), needs_machines]
TORCHRUN = (python(), "-m", "torch.distributed.run")
LIMIT_S = 500.0
RENDEZVOUS_PORT, JOIN_PORT = 29400, 29500
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def site() -> Iterator[Site]:
    with machines("alpha", "beta") as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same plan on one machine."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    done = realrl("run", "ppo", *SMALL, f"run_dir={folder}", "cluster.n_devices_per_node=2", timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def words_of(run_dir: Path, *overrides: str) -> list[str]:
    return [python(), "-m", "realrl", "run", "ppo", *SMALL, "launcher=external", f"run_dir={run_dir}", *overrides]


def torchrun(
    machine: Machine, folder: Path, number: int, words: list[str], **variables: str
) -> subprocess.Popen[bytes]:
    """Start torchrun on one of two machines; two processes on each, of which one has nothing to do."""
    options = [
        "--nnodes=2", f"--node-rank={number}", "--nproc-per-node=2", "--master-addr=10.77.0.1", "--no-python",
        f"--master-port={RENDEZVOUS_PORT}",
    ]  # fmt: skip
    log = folder / f"{machine.name}.log"
    return machine.popen(*TORCHRUN, *options, *words, log=log, cwd=folder, **{**VARIABLES, **variables})


def ended(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    try:
        return [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check(site: Site, run_dir: Path, alone: Path) -> None:
    assert weights(run_dir) == weights(alone)
    assert_same_numbers(read_metrics(run_dir), read_metrics(alone), rel=0.0, floor=0.0)
    assert [machine.processes("realrl") for machine in site.machines] == [[], []]


@pytest.mark.parametrize("how", ["key and port", "file"])
def test_torchrun_starts_a_run(site: Site, tmp_path: Path, alone: Path, how: str) -> None:
    run_dir = tmp_path / "run"
    key = {"REALRL_KEY": "ab" * 32} if how == "key and port" else {}
    file = tmp_path / "join.json"
    overrides = [f"cluster.master_port={JOIN_PORT}"] if key else [f"cluster.join_file={file}"]
    if not key:  # of a run that was killed, with another key, where nobody listens
        file.write_text(f'{{"address": "10.77.0.1:9", "key": "{"cd" * 32}", "run_dir": "{run_dir}"}}')
        file.chmod(0o600)
    words = words_of(run_dir, *overrides)
    second = torchrun(site.machines[1], tmp_path, 1, words, **key)
    first = torchrun(site.machines[0], tmp_path, 0, words, **key)
    said = {name: tmp_path / f"{name}.log" for name in ("alpha", "beta")}
    assert ended([first, second]) == [0, 0], said["alpha"].read_text() + said["beta"].read_text()
    check(site, run_dir, alone)
    for path in said.values():
        assert path.read_text().count("process 1 of torchrun on this machine has nothing to do") == 1
    assert "machine 0 of torchrun: this one leads the run" in said["alpha"].read_text()
    assert not file.exists()


@needs_slurm
@needs_mpirun
def test_mpirun_starts_a_run_inside_an_allocation(tmp_path: Path, alone: Path) -> None:
    """mpirun starts its processes by srun there, so that they have the variables of both."""
    run_dir = tmp_path / "run"
    with slurm(tmp_path / "slurm", "alpha", "beta") as cluster:
        options = ["--allow-run-as-root", "--oversubscribe", "-N", "2", "--bind-to", "core"]
        options += ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
        words = ["salloc", "--nodes=2", "--ntasks-per-node=2", "mpirun", *options, *words_of(run_dir)]
        done = cluster.run(*words, limit_s=LIMIT_S, REALRL_CACHE=str(tmp_path / "cache"), **VARIABLES)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr.count("has nothing to do: process 0 starts all workers here") == 2
        assert "mpirun has started this, so its variables count, and not those of SLURM" in done.stderr
        assert "`mpirun --bind-to none` gives it all" in done.stderr
        check(cluster.site, run_dir, alone)
    assert list((tmp_path / "cache" / "join").iterdir()) == []


def test_a_job_that_is_smaller_than_the_plan_is_refused(tmp_path: Path) -> None:
    words = words_of(tmp_path / "run", "cluster.n_nodes=3")
    done = subprocess.run(
        [*TORCHRUN, "--nnodes=1", "--nproc-per-node=1", "--no-python", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **VARIABLES},
    )
    assert done.returncode != 0
    assert "the job of torchrun has 1 machine, and the plan needs 3" in done.stderr

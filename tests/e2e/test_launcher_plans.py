"""Every launcher with every plan in both data planes, over two machines: the numbers are those of one machine.

Agents that are typed by hand are in `test_machines`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_job_launchers import JOIN_PORT, LIMIT_S, VARIABLES, ended, needs_mpirun, torchrun
from tests.e2e.test_machines import PLANS, weights
from tests.e2e.test_ray import RayRun, nothing_is_left
from tests.helpers.machines import Site, machines, needs_machines, python
from tests.helpers.ray_cluster import needs_ray, ray_cluster
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, realrl
from tests.helpers.slurm import needs_slurm, slurm

pytestmark = [pytest.mark.netns, pytest.mark.timeout(1800), needs_machines]
PLANES = ("socket", "collective")

Launch = Callable[[Path, list[str]], None]
"""``launch(folder, words)``: run `realrl` with these words over two machines; its own files go to the folder."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plan -> folder of its run on one machine."""
    folders = {plan: tmp_path_factory.mktemp("alone") / "run" for plan in PLANS}
    for plan, folder in folders.items():
        words = ("run", "ppo", *SMALL, *PLANS[plan], f"run_dir={folder}", "cluster.n_devices_per_node=2")
        done = realrl(*words, timeout_s=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
    return folders


def check(launch: Launch, site: Site, folder: Path, alone: dict[str, Path]) -> None:
    """Do all runs, and compare each with that of the same plan on one machine."""
    n_done = 0
    for plan, overrides in PLANS.items():
        for plane in PLANES:
            n_done += 1
            here = folder / str(n_done)
            here.mkdir()
            words = ["run", "ppo", *SMALL, *overrides, f"cluster.data_plane={plane}", f"run_dir={here / 'run'}"]
            launch(here, words)
            assert weights(here / "run") == weights(alone[plan]), (plan, plane)
            assert_same_numbers(read_metrics(here / "run"), read_metrics(alone[plan]), rel=0.0, floor=0.0)
            assert [machine.processes("m realrl") for machine in site.machines] == [[], []], (plan, plane)
    assert n_done == 8


def test_torchrun(tmp_path: Path, alone: dict[str, Path]) -> None:
    with machines("alpha", "beta") as site:

        def launch(folder: Path, words: list[str]) -> None:
            command = [python(), "-m", "realrl", *words, "launcher=external", f"cluster.master_port={JOIN_PORT}"]
            started = [
                torchrun(machine, folder, number, command, REALRL_KEY="ab" * 32)
                for number, machine in enumerate(site.machines)
            ]
            assert ended(started) == [0, 0], (folder / "alpha.log").read_text() + (folder / "beta.log").read_text()

        check(launch, site, tmp_path, alone)


@needs_slurm
@needs_mpirun
def test_mpirun(tmp_path: Path, alone: dict[str, Path]) -> None:
    with slurm(tmp_path / "slurm", "alpha", "beta") as cluster:

        def launch(folder: Path, words: list[str]) -> None:
            options = ["--allow-run-as-root", "-N", "1", "--bind-to", "none"]
            options += ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
            command = [python(), "-m", "realrl", *words, "launcher=external"]
            started = ["salloc", "--nodes=2", "--ntasks-per-node=1", "mpirun", *options, *command]
            done = cluster.run(*started, limit_s=LIMIT_S, REALRL_CACHE=str(folder / "cache"), **VARIABLES)
            assert done.returncode == 0, done.stdout + done.stderr

        check(launch, cluster.site, tmp_path, alone)


@needs_slurm
def test_slurm(tmp_path: Path, alone: dict[str, Path]) -> None:
    with slurm(tmp_path / "slurm", "alpha", "beta") as cluster:

        def launch(folder: Path, words: list[str]) -> None:
            command = [python(), "-m", "realrl", *words, "launcher=slurm", f"cluster.join_file={folder / 'join.json'}"]
            started = ["salloc", "--nodes=2", "--cpus-per-task=2", *command]
            done = cluster.run(*started, limit_s=LIMIT_S, **VARIABLES)
            assert done.returncode == 0, done.stdout + done.stderr

        check(launch, cluster.site, tmp_path, alone)


@needs_ray
def test_ray(tmp_path: Path, alone: dict[str, Path]) -> None:
    with ray_cluster(alpha=2, beta=2) as site:

        def launch(folder: Path, words: list[str]) -> None:
            own = [word for word in words if word not in ("run", "ppo", *SMALL) and not word.startswith("run_dir=")]
            with RayRun(site, folder / "team", *own) as run:
                assert run.end() == {"master": 0}, run.all_said()
            assert nothing_is_left(site)
            run.run_dir.rename(folder / "run")

        check(launch, site, tmp_path, alone)

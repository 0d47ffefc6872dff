"""Machines that do not fit a run: both sides name the machine and the difference, within ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_machines import LIMIT_S, Team
from tests.helpers.machines import Machine, machines, needs_machines, python

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900), needs_machines]
REFUSED_S = 10.0
MINE = "from realrl_experiments.ppo import EXPERIMENT as PPO\n\nEXPERIMENT = PPO.variant('mine', 'my own')\n"


def another_file(beta: Machine, folder: Path) -> None:
    (folder / "other.py").write_text(MINE + "# another one\n")
    beta.run("mount", "--bind", str(folder / "other.py"), str(folder / "mine.py"))


def no_file(beta: Machine, folder: Path) -> None:
    beta.run("mount", "--bind", "/dev/null", str(folder / "mine.py"))


def an_unshared_folder(beta: Machine, folder: Path) -> None:
    beta.run("mount", "-t", "tmpfs", "none", str(folder))


def an_unshared_folder_of_the_same_name(beta: Machine, folder: Path) -> None:
    an_unshared_folder(beta, folder)
    beta.run("mkdir", str(folder / "run"))


def another_version(package: str) -> Callable[[Machine, Path], None]:
    def prepare(beta: Machine, folder: Path) -> None:
        metadata = folder / "packages" / f"{package}-9.9.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")

    return prepare


def nothing(beta: Machine, folder: Path) -> None:
    """Leave it as it is."""


CASES: dict[str, tuple[Callable[[Machine, Path], None], str, tuple[str, ...]]] = {
    "another experiment file": (another_file, "has another mine.py than the master's machine", ()),
    "no experiment file": (no_file, "has no file", ()),
    "another folder": (an_unshared_folder, "does not see the run folder", ()),
    "another folder of the same name": (an_unshared_folder_of_the_same_name, "does not see the run folder", ()),
    "another torch": (another_version("torch"), "has torch 9.9, the master's machine", ()),
    "another realrl": (another_version("realrl"), "has realrl 9.9, the master's machine", ()),
    "too few devices": (nothing, "has 0 CUDA devices, and 1 workers need one each", ("cluster.device=cuda",)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_machine_that_does_not_fit_is_refused_by_name(tmp_path: Path, case: str) -> None:
    prepare, message, overrides = CASES[case]
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    with machines("alpha", "beta") as site:
        run = Team(site, tmp_path, *overrides, experiment=str(mine))
        log = Path("/tmp") / f"{tmp_path.name}-refused.log"  # beta's view of the folder may be another
        try:
            run.wait_for("waiting for 2 machines")
            prepare(site.machines[1], tmp_path)
            agent = site.machines[1].popen(
                python(), "-m", "realrl", "node", run.place, log=log, cwd=Path("/"), REALRL_KEY=run.key,
                PYTHONPATH=str(tmp_path / "packages"),
            )  # fmt: skip
            while "seeks the master" not in log.read_text():  # it has imported everything
                assert agent.poll() is None, log.read_text()
                time.sleep(0.02)
            begin_s = time.monotonic()
            assert (agent.wait(LIMIT_S), run.master.wait(LIMIT_S)) == (2, 2)
            took_s = time.monotonic() - begin_s
            print(f"{case}: {took_s:.1f} s")
            assert f"machine beta {message}" in run.said(), run.said()
            assert f"machine beta {message}" in log.read_text()
            assert took_s < REFUSED_S
        finally:
            log.unlink(missing_ok=True)
            run.close()

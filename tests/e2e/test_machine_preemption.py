"""Runs over machines that a job scheduler wants back: saved within the grace time, queued again, no step done twice."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_machines import LIMIT_S, Team, team, weights
from tests.helpers.machines import needs_machines
from tests.helpers.runs import SMALL, read_metrics, realrl

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900), needs_machines]
GRACE_S = 30.0
N_STEPS = 16
STEPS = (f"steps={N_STEPS}", "save.every_steps=0")  # saved by the signal, and nothing else


@pytest.fixture(scope="module")
def quiet_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("quiet")
    words = ["run", "ppo", *SMALL, *STEPS, f"run_dir={folder / 'run'}", "cluster.n_devices_per_node=2"]
    done = realrl(*words, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(folder / "run")


def to_the_run(run: Team, signum: int) -> None:
    """As a batch script passes a signal on to the one command that it waits for."""
    run.site.machines[0].signal("realrl run", signum)


def to_everything(run: Team, signum: int) -> None:
    """As SLURM sends it: to every process of the job, on all machines at once."""
    for machine in run.site.machines:
        machine.signal("realrl", signum)


@pytest.mark.parametrize(
    ("signum", "send"),
    [(signal.SIGTERM, to_the_run), (signal.SIGUSR1, to_the_run), (signal.SIGTERM, to_everything)],
)
def test_a_run_that_is_preempted_loses_and_repeats_nothing(
    tmp_path: Path, quiet_weights: dict[str, str], signum: int, send: Callable[[Team, int], None]
) -> None:
    with team(tmp_path, *STEPS) as run:
        run.join()
        run.wait_for("step 5/")
        begin_s = time.monotonic()
        send(run, signum)
        assert run.end() == {"master": 75, "alpha": 75, "beta": 75}, run.all_said()
        took_s = time.monotonic() - begin_s
        print(f"preempted: saved and ended after {took_s:.1f} s")
        assert took_s < GRACE_S
        done = steps_of(run)
        assert done[-1] < N_STEPS
        assert [machine.processes("realrl") for machine in run.site.machines] == [[], []]
    (tmp_path / "master.log").rename(tmp_path / "first.txt")
    with team(tmp_path, *STEPS, "resume=auto") as again:
        again.join()
        assert again.end() == {"master": 0, "alpha": 0, "beta": 0}, again.all_said()
        assert done + steps_of(again) == list(range(1, N_STEPS + 1))
        assert [row["step"] for row in read_metrics(again.run_dir)] == list(range(1, N_STEPS + 1))
        assert weights(again.run_dir) == quiet_weights


def steps_of(run: Team) -> list[int]:
    """Steps that the run told, in their order."""
    return [int(step) for step in re.findall(r"^step (\d+)/", run.said(), re.MULTILINE)]

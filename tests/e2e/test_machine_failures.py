"""Runs over two machines that are hurt: they go on or end in time, leave nothing behind, and have the same weights."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.test_machines import LIMIT_S, PORT, Team, team, weights
from tests.helpers.machines import Machine, can_reset, needs_machines
from tests.helpers.runs import SMALL, realrl

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900), needs_machines]
LEASE_S = 10.0
STEPS = ("steps=12", "save.every_steps=1")


@pytest.fixture(scope="module")
def quiet_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("quiet")
    words = ["run", "ppo", *SMALL, *STEPS, f"run_dir={folder / 'run'}", "cluster.n_devices_per_node=2"]
    done = realrl(*words, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(folder / "run")


@contextmanager
def training(folder: Path, *overrides: str, names: tuple[str, ...] = ("alpha", "beta")) -> Iterator[Team]:
    """A run in its third step or later; machines beyond the second are spares, which joined last."""
    with team(folder, *STEPS, *overrides, names=names) as run:
        run.join(*run.site.machines[:2])
        run.wait_for("workers start on alpha, beta")
        if len(names) > 2:
            run.join(*run.site.machines[2:])
            run.wait_for(f"{names[2]} is a spare")
        run.wait_for("step 3/")
        yield run


def kill(machine: Machine, word: str, signum: int = signal.SIGKILL) -> None:
    [pid] = machine.processes(word)
    machine.run("kill", f"-{signum}", str(pid))


def wait_until(condition: Callable[[], bool], limit_s: float) -> float:
    """Wait for a condition; returns the seconds that it took."""
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < limit_s, f"not within {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - begin_s


def has_trained_since(run: Team, text: str) -> bool:
    """Return True if a run has told a step after a text."""
    return re.search(r"^step \d+/", run.said().partition(text)[2], re.MULTILINE) is not None


def test_a_worker_killed_on_the_other_machine_is_told_and_replaced(
    tmp_path: Path, quiet_weights: dict[str, str]
) -> None:
    with training(tmp_path) as run:
        begin_s = time.monotonic()
        kill(run.site.machines[1], "worker --rank 1")
        told_s = run.wait_for("worker 1 ended (killed by SIGKILL on beta)") - begin_s
        run.wait_for("restart 1 of 2: worker 1 ended")
        wait_until(lambda: has_trained_since(run, "restart 1 of 2"), LIMIT_S)
        again_s = time.monotonic() - begin_s
        print(f"a killed worker: told after {told_s:.1f} s, a step done again after {again_s:.1f} s")
        assert run.end() == {"master": 0, "alpha": 0, "beta": 0}, run.all_said()
        assert told_s < 2.0
        assert again_s < 15.0
        assert "log: " in run.said()
        assert weights(run.run_dir) == quiet_weights


def test_workers_end_with_their_agent_and_a_new_one_goes_on(tmp_path: Path, quiet_weights: dict[str, str]) -> None:
    with training(tmp_path) as run:
        beta = run.site.machines[1]
        kill(beta, "realrl node")
        gone_s = wait_until(lambda: not beta.processes("worker --rank"), 1.0)
        print(f"a killed agent: its workers gone after {gone_s:.2f} s")
        assert run.agents.pop("beta").wait(10) in (-9, 137)
        run.join(beta)
        assert run.end() == {"master": 0, "alpha": 0, "beta": 0}, run.all_said()
        assert weights(run.run_dir) == quiet_weights


def test_everything_ends_when_the_master_and_its_supervisor_are_killed(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        alpha, beta = run.site.machines
        for pid in alpha.processes("realrl run|main master"):
            alpha.run("kill", "-9", str(pid))
        begin_s = time.monotonic()
        wait_until(lambda: not any(machine.processes("worker --rank") for machine in (alpha, beta)), LEASE_S + 2.0)
        workers_s = time.monotonic() - begin_s
        wait_until(lambda: not any(machine.processes("realrl") for machine in (alpha, beta)), LEASE_S + 2.0)
        all_s = time.monotonic() - begin_s
        print(f"a killed master and supervisor: all workers gone after {workers_s:.1f} s, agents after {all_s:.1f} s")
        assert all_s < LEASE_S + 2.0
        assert [run.agents[machine.name].wait(5) for machine in (alpha, beta)] == [75, 75]
        assert "nobody listens there any more" in run.said("beta")


def test_a_killed_master_is_started_again_on_the_same_machines(tmp_path: Path, quiet_weights: dict[str, str]) -> None:
    with training(tmp_path) as run:
        kill(run.site.machines[0], "main master")
        run.wait_for("restart 1 of 2: the master process died")
        assert run.end() == {"master": 0, "alpha": 0, "beta": 0}, run.all_said()
        assert weights(run.run_dir) == quiet_weights


def test_a_machine_that_dies_is_told_and_a_spare_takes_its_place(tmp_path: Path, quiet_weights: dict[str, str]) -> None:
    with training(tmp_path, names=("alpha", "beta", "gamma")) as run:
        begin_s = time.monotonic()
        run.site.machines[1].die()
        run.agents.pop("beta").wait(10)
        told_s = run.wait_for("machine beta gave no sign of life") - begin_s
        print(f"a machine that dies: told after {told_s:.1f} s")
        assert told_s < LEASE_S + 3.0, run.all_said()
        assert run.end() == {"master": 0, "alpha": 0, "gamma": 0}, run.all_said()
        assert "workers start on alpha, gamma" in run.said()
        assert weights(run.run_dir) == quiet_weights


def test_without_a_spare_the_run_ends_to_be_queued_again_and_goes_on_then(
    tmp_path: Path, quiet_weights: dict[str, str]
) -> None:
    with training(tmp_path, "cluster.start_timeout_s=14") as run:
        run.site.machines[1].die()
        run.agents.pop("beta").wait(10)
        assert run.end() == {"master": 75, "alpha": 75}, run.all_said()
        assert "1 of 2 machines joined within 14 s: alpha" in run.said()
    with team(tmp_path, *STEPS, "resume=auto") as again:
        again.join()
        assert again.end() == {"master": 0, "alpha": 0, "beta": 0}, again.all_said()
        assert weights(again.run_dir) == quiet_weights


def test_a_short_cut_changes_nothing(tmp_path: Path, quiet_weights: dict[str, str]) -> None:
    with training(tmp_path) as run:
        run.site.unplug(run.site.machines[1])
        time.sleep(3.0)
        run.site.plug(run.site.machines[1])
        assert run.end() == {"master": 0, "alpha": 0, "beta": 0}, run.all_said()
        assert "restart" not in run.said()
        assert weights(run.run_dir) == quiet_weights


@pytest.mark.skipif(not can_reset(), reason="this system cannot reset connections")
@pytest.mark.parametrize("which", ["of the agent", "of workers", "all"])
def test_connections_that_are_reset_never_hang_a_run(tmp_path: Path, quiet_weights: dict[str, str], which: str) -> None:
    rng = random.Random(which)
    chosen = {"of the agent": f"dport = :{PORT}", "of workers": f"dport != :{PORT}", "all": ""}[which]
    with training(tmp_path, "recover.retries=20") as run:
        alpha, beta = run.site.machines
        for _ in range(4):
            wait_until(lambda: bool(beta.processes("worker --rank")) or run.master.poll() is not None, LIMIT_S)
            time.sleep(rng.uniform(0.1, 2.0))
            if run.master.poll() is None:
                beta.reset(f"dst {alpha.address} {chosen}")
        assert run.end() == {"master": 0, "alpha": 0, "beta": 0}, run.all_said()
        assert which != "of the agent" or "restart" not in run.said()
        assert weights(run.run_dir) == quiet_weights


def test_workers_beyond_a_long_cut_are_gone_before_others_start(tmp_path: Path, quiet_weights: dict[str, str]) -> None:
    with training(tmp_path) as run:
        beta = run.site.machines[1]
        begin_s = time.monotonic()
        run.site.unplug(beta)
        gone_s = wait_until(lambda: not beta.processes("worker --rank"), LEASE_S + 2.0)
        print(f"a long cut: workers beyond it gone after {gone_s:.1f} s")
        assert run.said().count("workers start on") == 1  # and nobody but workers and their master writes checkpoints
        run.wait_for("restart 1 of 2:")
        while time.monotonic() - begin_s < 30.0:
            assert not beta.processes("worker --rank")
            time.sleep(0.5)
        run.site.plug(beta)
        assert run.end() == {"master": 0, "alpha": 0, "beta": 0}, run.all_said()
        assert weights(run.run_dir) == quiet_weights


def test_a_stopped_agent_does_not_keep_its_workers_alive(tmp_path: Path) -> None:
    with training(tmp_path, "steps=100000") as run:  # more than it does within a lease
        beta = run.site.machines[1]
        kill(beta, "realrl node", signal.SIGSTOP)
        wait_until(lambda: not beta.processes("worker --rank"), LEASE_S + 2.0)
        run.wait_for("restart 1 of 2:")
        kill(beta, "realrl node", signal.SIGCONT)
        deadline_s = time.monotonic() + LIMIT_S
        while run.said().count("workers start on") < 2:
            assert time.monotonic() < deadline_s, run.all_said()
            time.sleep(0.1)
        kill(run.site.machines[0], "realrl node", signal.SIGINT)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_machine_that_is_wanted_back_ends_the_run_after_its_step(tmp_path: Path, name: str) -> None:
    with training(tmp_path, "steps=40", "models.*.optimizer.schedule_steps=12") as run:
        kill(run.site.machines[1], "realrl node", getattr(signal, name))
        begin_s = time.monotonic()
        assert run.end() == {"master": 75, "alpha": 75, "beta": 75}, run.all_said()
        assert time.monotonic() - begin_s < 30.0
        assert f"{name} on machine beta: somebody wants it back" in run.said()
        assert (run.run_dir / "checkpoints" / "latest").exists()

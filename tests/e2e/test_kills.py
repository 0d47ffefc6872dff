"""Killed or interrupted at any moment: the rest ends within seconds, the message says who died, nothing is left.

A run that was hurt continues from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from realrl import cli
from tests.helpers.live import LiveRun
from tests.helpers.runs import SMALL, read_metrics

pytestmark = pytest.mark.timeout(300)

QUICK = {("worker 0", "start"), ("master", "saving")}
KILLS = [
    pytest.param(who, moment, marks=[] if (who, moment) in QUICK else [pytest.mark.slow])
    for who in ("cli", "master", "worker 0", "worker 1")
    for moment in ("start", "step", "saving")
]


def assert_continues(run: LiveRun) -> None:
    """The last whole checkpoint is good for one more step."""
    whole = [int(p.name.removeprefix("step_")) for p in run.checkpoints.glob("step_*")]
    overrides = (f"run_dir={run.run_dir}", "resume=auto", "launcher=inline", f"steps={max(whole, default=0) + 1}")
    assert cli.main(["run", "ppo", *SMALL, *overrides]) == 0
    assert not list(run.checkpoints.glob(".step_*"))


@pytest.mark.parametrize(("who", "moment"), KILLS)
def test_killed(start: Callable[..., LiveRun], who: str, moment: str) -> None:
    run = start()
    run.wait_for(moment)
    pid = run.pid(who)
    os.kill(pid, signal.SIGKILL)
    exit_code = run.end()
    if who == "cli":
        assert exit_code == -signal.SIGKILL
    else:
        assert exit_code == 1
        name = f"the master process ({pid})" if who == "master" else who
        assert run.errors.startswith(f"realrl: error: {name} ")
        assert "killed by SIGKILL" in run.errors
        assert "Was the machine out of memory?" in run.errors
        assert "Traceback" not in run.errors
        assert len(run.errors.splitlines()) <= 24
    if moment == "saving":
        assert_continues(run)


@pytest.mark.parametrize(
    ("signum", "moment"),
    [
        (signal.SIGINT, "start"),
        pytest.param(signal.SIGINT, "step", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "saving", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "step", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "saving", marks=pytest.mark.slow),
    ],
)
def test_interrupted(start: Callable[..., LiveRun], signum: signal.Signals, moment: str) -> None:
    run = start()
    run.wait_for(moment)
    os.killpg(run.process.pid, signum)  # as a terminal does: to all but the workers, which have groups of their own
    assert run.end() == 128 + signum
    if moment == "start":
        assert run.errors == f"realrl: interrupted by {signum.name}: everything was stopped\n"
        return
    step = read_metrics(run.run_dir)[-1]["step"]
    assert f"{signum.name}: step {step} is finished and saved, then the run stops" in run.output
    told, then = run.errors.splitlines()
    assert told == f"realrl: interrupted by {signum.name} after step {step} of 100000"
    assert then.startswith(f"realrl: continue after step {step} with: realrl run ppo preset=tiny ")
    assert (run.checkpoints / "latest").resolve().name == f"step_{step}"
    assert_continues(run)


def test_a_master_that_ends_is_not_killed_by_repeated_signals(start: Callable[..., LiveRun]) -> None:
    run = start()
    run.wait_for("start")
    master = run.pid("master")
    os.killpg(run.process.pid, signal.SIGINT)
    with contextlib.suppress(ProcessLookupError):
        while run.process.poll() is None:  # also while the master's interpreter shuts down
            os.kill(master, signal.SIGINT)
            time.sleep(0.001)
    assert run.end() == 128 + signal.SIGINT
    assert run.errors == "realrl: interrupted by SIGINT: everything was stopped\n"


@pytest.mark.slow
def test_a_job_scheduler_signals_every_process(start: Callable[..., LiveRun]) -> None:
    run = start("save.every_steps=0")
    run.wait_for("step")
    for pid in run.processes():
        os.kill(pid, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM
    step = read_metrics(run.run_dir)[-1]["step"]
    assert run.errors.startswith(f"realrl: interrupted by SIGTERM after step {step} of 100000\n")
    assert_continues(run)


@pytest.mark.slow
def test_two_signals_leave_what_was_saved(start: Callable[..., LiveRun]) -> None:
    run = start("save.every_steps=1")
    run.wait_for("saving")
    for _ in range(2):
        os.kill(run.process.pid, signal.SIGINT)
        time.sleep(0.4)  # nobody presses twice within one keypress
    assert run.end() == 130
    if "stopped at once after SIGINT" in run.errors:  # else the step was done within the keypress
        assert "continue after step" in run.errors.splitlines()[-1]
    assert_continues(run)


DYING_CRITIC = """
import dataclasses
import os
import signal

from realrl.algo.policy.critic import PPOCritic
from realrl.experiment.registry import register_interface
from realrl.experiment.discovery import load_experiment
from realrl.graph.mfc import InterfaceRef


@register_interface("dying_critic")
class DyingCritic(PPOCritic):
    def state_dict(self):  # asked for when the parameters have just moved to the other device
        state = super().state_dict()
        if self._norm.std != 1.0:
            os.kill(os.getpid(), signal.SIGKILL)
        return state


def mfcs(config):
    return [
        dataclasses.replace(mfc, interface_impl=InterfaceRef("dying_critic")) if mfc.role == "critic" else mfc
        for mfc in PPO.mfcs(config)
    ]


PPO = load_experiment("ppo")
EXPERIMENT = dataclasses.replace(PPO, name="dying", mfcs=mfcs)
"""


def test_a_death_in_the_middle_of_a_reallocation(start: Callable[..., LiveRun], tmp_path: Path) -> None:
    file = tmp_path / "dying.py"
    file.write_text(DYING_CRITIC)
    overrides = ("allocation.calls.critic_inf=d1@0:0", "algorithm.reward_function=realrl.data.tiny:toy_reward")
    run = start(*overrides, "save.every_steps=0", experiment=str(file))
    assert run.end() == 1
    assert run.errors.startswith(
        "realrl: error: worker 1 ended (killed by SIGKILL) in the hooks before call 'critic_inf' of"
    )
    assert "step 2" in run.errors
    assert "waiting for it: worker 0 (critic_inf)" in run.errors
    assert "Traceback" not in run.errors
    assert len(run.errors.splitlines()) <= 24


@pytest.mark.parametrize(
    ("who", "moment"), [("worker 1", "saving"), pytest.param("master", "step", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_by_itself(start: Callable[..., LiveRun], who: str, moment: str) -> None:
    run = start("recover.retries=1", "steps=8", "save.keep=8")  # so many that one is seen being saved
    run.wait_for(moment)
    os.kill(run.pid(who), signal.SIGKILL)
    assert run.end(n_attempts=2) == 0, run.output + run.errors
    assert "killed by SIGKILL" in run.errors
    assert "restart 1 of 1: " in run.output
    assert "; going on from the " in run.output
    assert [row["step"] for row in read_metrics(run.run_dir)] == list(range(1, 9))
    assert (run.checkpoints / "latest").resolve().name == "step_8"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_would_happen_again_ends_the_run(start: Callable[..., LiveRun], tmp_path: Path) -> None:
    file = tmp_path / "dying.py"
    file.write_text(DYING_CRITIC)
    overrides = ("allocation.calls.critic_inf=d1@0:0", "algorithm.reward_function=realrl.data.tiny:toy_reward")
    run = start(*overrides, "save.every_steps=0", "recover.retries=9", experiment=str(file))
    assert run.end(n_attempts=3) == 1
    assert run.errors.count("warning: worker 1 ended (killed by SIGKILL) in the hooks before call 'critic_inf'") == 3
    assert "It happened at the same place 3 times without a step done in between" in run.errors
    assert "restart 2 of 9: worker 1 ended" in run.output
    assert "restart 3 of 9" not in run.output
    assert "going on from the beginning; step 1 is done again" in run.output


@pytest.mark.slow
def test_a_death_while_others_wait_in_a_collective(start: Callable[..., LiveRun]) -> None:
    run = start("allocation=t2")
    run.wait_for("step")
    os.kill(run.pid("worker 1"), signal.SIGSTOP)
    time.sleep(1.0)  # worker 0 gets as far as it can alone
    os.kill(run.pid("worker 1"), signal.SIGKILL)
    assert run.end() == 1
    assert run.errors.startswith("realrl: error: worker 1 ended (killed by SIGKILL) ")
    assert "Traceback" not in run.errors


@pytest.mark.slow
def test_a_worker_that_hangs_is_reported_with_its_stack(start: Callable[..., LiveRun]) -> None:
    run = start("cluster.worker_timeout_s=4")
    run.wait_for("step")
    os.kill(run.pid("worker 1"), signal.SIGSTOP)
    assert run.end() == 1
    assert run.errors.startswith("realrl: error: worker 1 gave no sign of life for ")
    assert "cluster.worker_timeout_s" in run.errors

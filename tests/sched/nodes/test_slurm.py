"""srun and sbatch: options that agents need, what is read from srun's messages, scripts as a shell runs them."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from realrl.sched.nodes.jobs import Allocation
from realrl.sched.nodes.slurm import Request, Tasks, sbatch_line, script, srun_words

REQUEST = Request("ppo", 2, 4, "cpu")


def test_one_task_on_each_machine_has_all_cores_there_and_ends_no_other() -> None:
    words = srun_words(Allocation("1", ("a", "b", "c"), 8))
    assert words[0] == "srun"
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=8"} < set(words)
    assert {"--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--overlap", "--export=ALL"} < set(words)
    assert not any("cpus" in word for word in srun_words(Allocation("1", ("a",))))


def test_lost_agents_end_the_run_when_too_few_are_left() -> None:
    tasks = Tasks(n_started=4, n_needed=2)
    for line in (
        "srun: error: n[02,04]: tasks 1,3: Killed",
        "1: realrl node: joined",
    ):
        tasks.hear(line)
        assert tasks.loss() is None
    tasks.hear("srun: error: n01: task 0: Exited with exit code 1")
    loss = tasks.loss()
    assert loss is not None
    assert loss.message == (
        "too few agents are left, 1 of 4, and the run needs 2: n[02,04]: Killed; n01: Exited with exit code 1"
    )
    assert (loss.exit_code, loss.is_total) == (75, False)
    assert "resume=auto" in loss.remedy


def test_an_agent_that_was_refused_is_not_worth_another_try() -> None:
    tasks = Tasks(n_started=2, n_needed=2)
    tasks.hear("srun: error: beta: task 1: Exited with exit code 2")
    loss = tasks.loss()
    assert loss is not None
    assert (loss.exit_code, loss.is_total) == (2, False)
    assert "logs/agents.log" in loss.remedy


@pytest.mark.parametrize(
    ("exit_code", "message", "expected"),
    [
        (1, "srun ended with exit code 1: srun: error: Unable to create step for job 7", 1),
        (-9, "srun was killed by signal 9: srun: error: Unable to create step for job 7", 75),
    ],
)
def test_the_end_of_srun_is_the_end_of_all_agents(exit_code: int, message: str, expected: int) -> None:
    tasks = Tasks(n_started=2, n_needed=2)
    tasks.hear("srun: error: Unable to create step for job 7")
    tasks.end(exit_code)
    loss = tasks.loss()
    assert loss is not None
    assert (loss.message, loss.exit_code, loss.is_total) == (message, expected, True)


def test_the_line_for_the_shell_keeps_the_command_whole() -> None:
    command = ["realrl", "run", "ppo", "models.actor.path=/a b", "generation.stop_ids=[2,3]"]
    words = shlex.split(sbatch_line(REQUEST, command))
    assert words[0] == "sbatch"
    assert {"--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--requeue"} < set(words)
    assert shlex.split(words[-1].removeprefix("--wrap=")) == ["exec", *command]
    on_gpus = Request("ppo", 2, 8, "cuda").options()
    assert {"--gpus-per-node=8", "--cpus-per-task=32"} < set(on_gpus)


def ended(code: str, state: str, restarts: str = "0") -> tuple[int, str]:
    """Run a script whose run ends with a code, in a job of this state; returns its exit code and what it asked for."""
    text = script(REQUEST, ["sh", "-c", code], "/")
    tools = f'squeue() {{ echo {state}; }}; scontrol() {{ echo asked: "$@"; }}\n'
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
    done = subprocess.run(["bash", "-c", tools + text], capture_output=True, text=True, timeout=60, env=environment)
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "state", "restarts", "expected"),
    [
        ("exit 75", "RUNNING", "3", (0, "asked: requeue 7")),
        ("exit 75", "COMPLETING", "0", (75, "")),
        ("exit 75", "RUNNING", "100", (75, "")),
        ("exit 0", "RUNNING", "0", (0, "")),
        ("exit 2", "RUNNING", "0", (2, "")),
        (
            "trap 'exit 75' TERM; kill -TERM $PPID; sleep 9 > /dev/null 2>&1 & wait",
            "RUNNING",
            "0",
            (0, "asked: requeue 7"),
        ),
    ],
)
def test_a_script_queues_an_interrupted_run_again_unless_it_was_cancelled(
    code: str, state: str, restarts: str, expected: tuple[int, str]
) -> None:
    assert ended(code, state, restarts) == expected


def test_the_script_asks_for_what_the_run_needs() -> None:
    lines = script(REQUEST, ["realrl"], "/a b").splitlines()
    assert lines[0] == "#!/bin/bash"
    wanted = {"--nodes=2", "--requeue", "--open-mode=append", "--signal=B:TERM@60", "--job-name=ppo"}
    assert wanted < {line.removeprefix("#SBATCH ") for line in lines}
    assert "cd '/a b' || exit 2" in lines

"""`realrl.run`: what it starts, raises and returns, in processes and inside this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import realrl
from realrl.errors import ConfigError, RunError, UsageError
from realrl.experiment.discovery import load_experiment, reference_of
from realrl.experiment.loading import load_object
from tests.helpers.runs import read_metrics

SFT: dict[str, Any] = {"preset": "tiny", "steps": 2, "n_seqs": 4}
GRPO: dict[str, Any] = {**SFT, "generation": {"max_new_tokens": 4, "n_responses": 2}}
INLINE = {"launcher": "inline"}


def half(prompt_ids: list[int], response_ids: list[int]) -> float:
    return 0.5


def cell(name: str = "cell") -> realrl.Experiment:
    """Return an experiment that no file holds, as a notebook's cell makes it."""
    call = realrl.MFCDef(
        "actor_train", "actor", realrl.InterfaceType.TRAIN_STEP, "sft", ("input_ids", "prompt_mask"),
        log_return_value=True,
    )  # fmt: skip
    roles = {"actor": realrl.Role(trainable=True)}
    return realrl.Experiment(name, "a cell", roles, realrl.DatasetKind.PROMPT_ANSWER, lambda config: [call])


@pytest.mark.slow
def test_a_run_in_processes_of_its_own_needs_no_main_thread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**GRPO, "run_dir": tmp_path / "run", "algorithm.reward_function": half}
    results: list[realrl.RunResult] = []
    thread = threading.Thread(target=lambda: results.append(realrl.run("grpo", settings)))
    thread.start()
    thread.join()
    [result] = results
    assert (result.run_dir, result.exit_code, result.state) == (tmp_path / "run", 0, "complete, 2 steps")
    assert [row["reward/mean"] for row in result.metrics] == [0.5, 0.5]
    assert result.config["algorithm"]["reward_function"] == "tests.python.test_run:half"
    assert "step 2/2  reward/mean 0.5" in capsys.readouterr().out


def test_objects_run_inside_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = realrl.run(cell(), {**SFT, **INLINE, "run_dir": tmp_path / "a"})
    assert repr(result).startswith(f"<run of cell in {tmp_path}/a: complete, 2 steps; actor/loss ")
    assert "step 2/2" in capsys.readouterr().out
    settings = {**GRPO, **INLINE, "run_dir": tmp_path / "b", "algorithm": {"reward_function": lambda p, r: 0.25}}
    result = realrl.run("grpo", settings, quiet=True)
    assert [row["reward/mean"] for row in result.metrics] == [0.25, 0.25]
    assert capsys.readouterr() == ("", "")


def test_an_experiment_of_a_file_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference_of(load_experiment("grpo")) == "grpo"
    assert reference_of(cell()) is None
    monkeypatch.setattr(sys.modules[__name__], "EXPERIMENT", cell(), raising=False)
    assert reference_of(sys.modules[__name__].EXPERIMENT) == __file__


def test_a_file_that_was_changed_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from realrl_experiments.sft import EXPERIMENT\n")
    words = ["preset=tiny", "steps=1", "n_seqs=4", "launcher=inline", f"run_dir={tmp_path}/run"]
    assert realrl.run(file, words, quiet=True).state == "complete, 1 step"
    rewards = tmp_path / "rewards.py"
    for n in (1, 2):
        rewards.write_text(f"def score(prompt_ids, response_ids): return {n}.0\n")
        settings = {**GRPO, **INLINE, "steps": 1, "run_dir": tmp_path / f"run{n}"}
        settings["algorithm.reward_function"] = f"{rewards}:score"
        assert realrl.run("grpo", settings, quiet=True).metrics[0]["reward/mean"] == n
    file.write_text("EXPERIMENT = None\n")
    with pytest.raises(ConfigError, match="is of type NoneType"):
        realrl.run(file, words)


@pytest.mark.parametrize(
    ("experiment", "settings", "message"),
    [
        ("ppoo", SFT, "there is no experiment 'ppoo'. Did you mean 'ppo'"),
        ("sft", {**SFT, "stepz": 3}, "stepz=3: unknown key. Did you mean 'steps'"),
        ("sft", {"models": {"actor": {"path": "/no/such"}}}, "actor"),
        ("sft", "steps=5", "overrides are neither a mapping nor a list"),
        ("sft", {"steps": {1}}, "steps cannot be of type set"),
        (3, {}, "a int is no experiment"),
        (cell(), SFT, "experiment 'cell' is an object of this session, which the processes of a run cannot import"),
        (
            "grpo",
            {"algorithm": {"reward_function": lambda p, r: 0}},
            "algorithm.reward_function: function <lambda> is an object of this session",
        ),
    ],
)
def test_what_is_refused(experiment: Any, settings: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        realrl.run(experiment, settings)
    assert message in str(error.value)


@pytest.mark.parametrize("more", [{}, INLINE], ids=["processes", "inline"])
def test_an_error_in_the_users_own_file_names_its_line(more: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import realrl\nrealrl.run('sft', {'preset': 'tiny'})\n")
    with pytest.raises(ConfigError, match=r'called by code that a run imports\n.*if __name__ == "__main__"') as error:
        realrl.run(file, {**SFT, **more})
    assert f"{file}:2" in str(error.value)


@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.slow), INLINE], ids=["processes", "inline"])
def test_a_run_that_fails(more: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from realrl import ModelInterface, register_interface\n"
        "from realrl_experiments.sft import EXPERIMENT as SFT\nfrom dataclasses import replace\n"
        "@register_interface('failing')\nclass Failing(ModelInterface):\n"
        "    def train_step(self, model, batch, ctx):\n        raise ValueError('my own mistake')\n"
        "calls = lambda config: [replace(call, interface_impl='failing') for call in SFT.mfcs(config)]\n"
        "EXPERIMENT = SFT.variant('mine', 'x', mfcs=calls)\n"
    )
    settings = {**SFT, **more, "run_dir": tmp_path / "run"}
    with pytest.raises(RunError, match=r"actor_train .* raised ValueError: my own mistake"):
        realrl.run(file, settings, quiet=True)
    result = realrl.run(file, {**settings, "resume": "auto"}, quiet=True, check=False)
    assert result.exit_code == 1
    assert "my own mistake" in result.state


def test_objects_of_a_session_that_is_over() -> None:
    with pytest.raises(ConfigError, match=r"experiment 'gone' was an object of a Python session that is over"):
        load_experiment("given:gone")
    with pytest.raises(ConfigError, match=r"'realrl.python.given' has no 'gone'"):
        load_object("realrl.python.given:gone")


def test_inline_needs_the_main_thread() -> None:
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            realrl.run("sft", {**SFT, **INLINE})
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert "this thread is not the main one" in str(errors[0])


SCRIPT = """
import sys, realrl
try:
    realrl.run("sft", {"preset": "tiny", "steps": 5000, "n_seqs": 4, "run_dir": sys.argv[1]})
except KeyboardInterrupt as error:
    print("interrupted:", error)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_run_after_its_step(signum: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(run_dir)],
        stdout=subprocess.PIPE, text=True, process_group=0, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert script.stdout is not None
    with script.stdout as output:
        for line in output:
            if line.startswith("step 2/"):
                break
        os.killpg(script.pid, signum) if signum == signal.SIGINT else script.send_signal(signum)
        told = output.read()
    ended = script.wait()
    done = len(read_metrics(run_dir))
    result = realrl.load(run_dir)
    assert list(result.checkpoints) == [done]
    if signum == signal.SIGINT:
        assert ended == 0
        assert f"interrupted: the run in {run_dir} was interrupted: realrl.load({str(run_dir)!r})" in told
    else:
        assert ended == -signal.SIGTERM

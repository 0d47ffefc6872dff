"""Ctrl-C, and checkpoints by the clock: the run is saved, says how to continue, and ends as if nothing had happened."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from realrl import cli
from realrl.config import schema
from realrl.runtime.checkpoints.store import load_manifest
from realrl.runtime.master import master_worker
from tests.e2e.test_resume import assert_same_checkpoint, numbers
from tests.helpers.runs import SMALL, read_metrics

INLINE = (*SMALL, "launcher=inline", "steps=4")
SFT = ("preset=tiny", "n_seqs=8", "launcher=inline", "steps=4")
# An experiment whose critic interrupts its own process, which is everybody's with launcher=inline.
IMPATIENT = """
import dataclasses
import os
import signal
import time

from realrl.algo.policy.critic import PPOCritic
from realrl.experiment.discovery import load_experiment
from realrl.experiment.registry import register_interface
from realrl.graph.mfc import InterfaceRef


@register_interface("impatient_critic")
class ImpatientCritic(PPOCritic):
    def inference(self, model, batch, ctx):
        for name in os.environ.get("IMPATIENT", "").split() if ctx.step == 2 else []:
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(0.4)  # nobody presses twice within one keypress
        return super().inference(model, batch, ctx)


def mfcs(config):
    return [
        dataclasses.replace(mfc, interface_impl=InterfaceRef("impatient_critic")) if mfc.role == "critic" else mfc
        for mfc in PPO.mfcs(config)
    ]


PPO = load_experiment("ppo")
EXPERIMENT = dataclasses.replace(PPO, name="impatient", mfcs=mfcs)
"""


@pytest.fixture
def impatient(tmp_path: Path) -> str:
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    return str(tmp_path / "impatient.py")


def steps_of(run_dir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run_dir)]


def test_the_step_is_finished_and_the_printed_command_continues(
    impatient: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut short"
    assert cli.main(["run", impatient, *INLINE, f"run_dir={whole}"]) == 0
    monkeypatch.setenv("IMPATIENT", "SIGINT")
    capsys.readouterr()
    assert cli.main(["run", impatient, *INLINE, f"run_dir={cut}"]) == 130
    told = capsys.readouterr()
    assert "SIGINT: step 2 is finished and saved, then the run stops; a second signal stops it at once" in told.out
    assert "steps: 2 of 4\n" in told.out
    first, then = told.err.splitlines()
    assert first == "realrl: interrupted by SIGINT after step 2 of 4"
    assert steps_of(cut) == [1, 2]
    assert not load_manifest(cut / "checkpoints/step_2").is_last
    monkeypatch.delenv("IMPATIENT")
    words = shlex.split(then.removeprefix("realrl: continue after step 2 with: "))
    assert words[0] == "realrl"
    assert cli.main(words[1:]) == 0
    assert numbers(cut) == numbers(whole)
    assert_same_checkpoint(cut / "checkpoints/step_4", whole / "checkpoints/step_4")


def test_a_second_signal_does_not_wait(
    impatient: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IMPATIENT", "SIGINT SIGTERM")
    assert cli.main(["run", impatient, *INLINE, f"run_dir={tmp_path / 'run'}"]) == 143
    assert capsys.readouterr().err == "realrl: interrupted by SIGTERM: everything was stopped\n"
    assert steps_of(tmp_path / "run") == [1]


def test_a_run_without_checkpoints_stops_at_once(
    impatient: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IMPATIENT", "SIGINT")
    assert cli.main(["run", impatient, *INLINE, f"run_dir={tmp_path / 'run'}", "save.at_end=false"]) == 130
    assert capsys.readouterr().err == "realrl: interrupted by SIGINT: everything was stopped\n"
    assert steps_of(tmp_path / "run") == [1]


def test_the_clock_saves_in_place_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is made, and yet a checkpoint holds the parameters of its step."""
    copied, clocked = tmp_path / "copied", tmp_path / "clocked"
    keep = ("save.keep=4", "algorithm.reward_function=realrl.data.tiny:toy_reward")
    assert cli.main(["run", "grpo", *INLINE, *keep, "save.every_steps=1", f"run_dir={copied}"]) == 0
    monkeypatch.setattr(schema, "_DEFAULT_INTERVAL_S", 1e-3)
    monkeypatch.setattr(schema, "_LEAST_PAUSES", 0)
    monkeypatch.setattr(master_worker, "_POLL_S", 1e-3)  # a step takes a few times as long
    assert cli.main(["run", "grpo", *INLINE, *keep, f"run_dir={clocked}"]) == 0
    assert numbers(clocked) == numbers(copied)
    saved = sorted(path.name for path in (clocked / "checkpoints").glob("step_*"))
    assert len(saved) > 1
    for name in saved:
        assert_same_checkpoint(clocked / "checkpoints" / name, copied / "checkpoints" / name)


def test_fewer_steps_of_a_longer_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    schedule = ("models.*.optimizer.schedule_steps=4", "models.*.optimizer.warmup_fraction=0.5")
    assert cli.main(["run", "sft", *SFT, schedule[1], f"run_dir={whole}"]) == 0
    assert cli.main(["run", "sft", *SFT, *schedule, "steps=2", f"run_dir={part}"]) == 0
    assert numbers(part) == numbers(whole)[:2]
    shutil.copytree(part, tmp_path / "moved")
    capsys.readouterr()
    assert cli.main(["run", "sft", *SFT, *schedule, f"run_dir={part}", "resume=auto"]) == 0
    assert "schedule" not in capsys.readouterr().out
    assert numbers(part) == numbers(whole)
    assert_same_checkpoint(part / "checkpoints/step_4", whole / "checkpoints/step_4")
    longer = ("run", "sft", *SFT, schedule[1], "steps=6", f"run_dir={tmp_path / 'moved'}", "resume=auto", "--dry-run")
    assert cli.main([*longer]) == 0
    told = "role 'actor' followed a schedule of 4 steps, and goes on as one of 6 has it from step 3 on"
    assert told in capsys.readouterr().out
    assert cli.main([*longer, "models.actor.optimizer.schedule_steps=4"]) == 0
    told = capsys.readouterr().out
    assert "goes on as one of" not in told
    assert "not those of the steps before" not in told
    assert cli.main([*longer, "models.actor.optimizer.schedule_steps=4", "models.actor.optimizer.lr=0.5"]) == 0
    assert (
        "settings are not those of the steps before: models.actor.optimizer.lr=0.5 (it was" in capsys.readouterr().out
    )

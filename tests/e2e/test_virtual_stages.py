"""Runs with virtual pipeline stages: the numbers of those without, also from checkpoints of other layouts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.live import LiveRun
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, run_here, run_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PIPELINE = ("cluster.n_devices_per_node=2", "allocation=pipeline")
VIRTUAL = (*PIPELINE, "calls.actor_train.virtual_stages=2", "calls.critic_train.virtual_stages=2")
INLINE = ("launcher=inline",)


@pytest.mark.parametrize(
    "words",
    [
        ("allocation.calls.critic_inf=d2", "eval.every_steps=2", "eval.n_responses=1"),
        ("models.actor.lora.rank=4", "models.critic.optimizer.zero_stage=1"),
    ],
)
def test_other_settings(words: tuple[str, ...], tmp_path: Path) -> None:
    """One call has its parameters elsewhere, and an evaluation has them at home; adapters; a shared optimizer."""
    plain, virtual = (run_ppo(tmp_path / str(i), *plan, *words) for i, plan in enumerate((PIPELINE, VIRTUAL)))
    assert_same_numbers(plain, virtual, rel=1e-4, floor=1e-6)


def test_checkpoints_are_read_in_other_layouts(start: Callable[..., LiveRun], tmp_path: Path) -> None:
    """A killed run with virtual stages goes on for a step without, for one with them again, and on one worker."""
    steps = ("models.*.optimizer.schedule=constant", "models.*.optimizer.warmup_fraction=0")
    killed = start(*VIRTUAL, *steps)
    killed.wait_for("saving")
    os.kill(killed.pid("worker 1"), signal.SIGKILL)
    assert killed.end() == 1
    saved = max(int(folder.name.removeprefix("step_")) for folder in killed.checkpoints.glob("step_*"))
    for step, layout in enumerate((PIPELINE, VIRTUAL, INLINE), start=saved + 1):
        run_here("run", "ppo", *SMALL, *steps, f"run_dir={killed.run_dir}", *layout, f"steps={step}", "resume=auto")
    once = run_ppo(tmp_path / "once", *INLINE, *steps, f"steps={saved + 3}")
    assert_same_numbers(once, read_metrics(killed.run_dir), rel=1e-4, floor=1e-6)

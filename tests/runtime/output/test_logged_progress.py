"""Progress of a run in its log."""

from __future__ import annotations

import io
import logging

import pytest

from realrl.runtime.output.logged_progress import LoggedProgress
from realrl.runtime.output.progress import PlainProgress


def test_the_log_tells_the_story_of_a_run(caplog: pytest.LogCaptureFixture) -> None:
    out, err = io.StringIO(), io.StringIO()
    progress = LoggedProgress(PlainProgress(out, err))
    with caplog.at_level(logging.INFO):
        progress.phase("starting 2 workers")
        progress.started("ppo", 3, "runs/a", ["1 prompt was dropped"])
        progress.activity(0, "actor_gen")
        progress.step_done(
            1, 0, {"reward/mean": 0.5, "time_s/step": 2.0, "time_s/actor_gen": 1.25, "version/actor": 1.0}
        )
        progress.failed("realrl: error: worker 0 died")
        progress.finished({"steps": "1 of 3"})
        progress.close()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "starting 2 workers"),
        ("INFO", "ppo: 3 steps, run folder runs/a"),
        ("INFO", "note: 1 prompt was dropped"),
        ("INFO", "step 1/3  epoch 0  reward/mean 0.5  2.0 s: actor_gen 1.25 s"),
        ("ERROR", "realrl: error: worker 0 died"),
        ("INFO", "steps: 1 of 3"),
    ]
    assert out.getvalue().splitlines()[0] == "starting 2 workers"
    assert err.getvalue() == "realrl: error: worker 0 died\n"

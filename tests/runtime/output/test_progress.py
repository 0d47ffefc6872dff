from __future__ import annotations

import io
import math
import re

import pytest

from realrl.runtime.output.logged_progress import LoggedProgress
from realrl.runtime.output.progress import LiveProgress, Pace, PlainProgress, Progress, headline_metrics, make_progress

PPO = {
    "actor/pg_loss": -0.01,
    "reward/mean": 0.51234,
    "kl/mean": 0.0123,
    "perf/tokens_per_s": 1234.5,
    "time_s/step": 2.5,
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A terminal that went away."""

    def write(self, text: str) -> int:
        raise OSError("Input/output error")


def run(progress: Progress) -> None:
    progress.started("realrl ppo", 3, "runs/ppo/1", ["3 prompts were dropped [too long]"])
    progress.phase("waiting for 2 workers")
    progress.phase("waiting for 2 workers")
    progress.activity(1, "actor_gen")
    for step in (1, 2):
        progress.step_done(step, 0, {**PPO, "reward/mean": 0.5 * step})
    progress.finished({"reward": "0.1 -> 0.5"})
    progress.close()


def test_plain_text_is_one_line_for_each_thing() -> None:
    out = io.StringIO()
    run(PlainProgress(out, io.StringIO()))
    lines = out.getvalue().splitlines()
    assert lines[:3] == [
        "realrl ppo: 3 steps, run folder runs/ppo/1",
        "realrl: note: 3 prompts were dropped [too long]",
        "waiting for 2 workers",
    ]
    assert lines[3].startswith("step 1/3  reward/mean 0.5  kl/mean 0.0123  tokens/s 1,234  2.5 s  left ")
    assert lines[5] == "reward: 0.1 -> 0.5"
    assert len(lines) == 6
    assert "\x1b" not in out.getvalue()


def test_parts_of_a_reward_stand_behind_it() -> None:
    out = io.StringIO()
    PlainProgress(out, io.StringIO()).step_done(1, 0, {"reward/letters/mean": 1.0, "reward/mean": 2.5, "kl/mean": 0.1})
    assert out.getvalue() == "step 1/0  reward/mean 2.5  reward/letters 1  kl/mean 0.1\n"


def test_a_user_can_ask_for_further_metrics() -> None:
    out, shown = io.StringIO(), ("ref/entropy", "kl/mean", "ref/entropi")
    progress = LoggedProgress(make_progress(out=out, shown=shown), shown)
    for step in (1, 2):
        progress.step_done(step, 0, {"reward/mean": 2.5, "kl/mean": 0.1, "ref/entropy": 1.25, "actor/lr": 0.5})
    lines = [f"step {step}/0  reward/mean 2.5  kl/mean 0.1  ref/entropy 1.25" for step in (1, 2)]
    told = "realrl: note: show: step 1 has no metric 'ref/entropi'. Did you mean 'ref/entropy'?"
    assert out.getvalue().splitlines() == [lines[0], told, lines[1]]
    live, out = Terminal(), io.StringIO()
    progress = make_progress(out=live, shown=shown)
    progress.started("realrl grpo", 2, "runs/1")
    progress.step_done(1, 0, {"reward/mean": 2.5, "ref/entropy": 1.25})
    progress.close()
    assert "ref/entropy" in live.getvalue()


def test_the_live_display_shows_steps_metrics_and_workers() -> None:
    out = Terminal()
    progress = LiveProgress(out, io.StringIO())
    run(progress)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    for part in (
        "realrl ppo",
        "realrl: note: 3 prompts were dropped [too long]",
        "step 2/3",
        "reward/mean",
        "kl/mean",
        "tokens/s",
        "1,234",
        "left 0:00",
        "▁█",
        "0.1 -> 0.5",
    ):
        assert part in text
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")  # the cursor is back


def test_the_live_display_tells_what_is_going_on_before_the_first_step() -> None:
    out = Terminal()
    progress = LiveProgress(out, io.StringIO())
    progress.phase("loading models")
    progress.activity(1, "starting")
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "loading models (0 s)" in text
    assert "worker 1  starting" in text
    assert "step" not in text


@pytest.mark.parametrize("kind", [PlainProgress, LiveProgress])
def test_a_report_goes_to_stderr_unchanged(kind: type[PlainProgress] | type[LiveProgress]) -> None:
    err = io.StringIO()
    progress = kind(Terminal(), err)
    progress.started("realrl ppo", 3, "runs/ppo/1")
    progress.failed("error: worker 0 [rank] died")
    assert err.getvalue() == "error: worker 0 [rank] died\n"


@pytest.mark.parametrize("kind", [PlainProgress, LiveProgress])
def test_a_terminal_that_goes_away_does_not_stop_the_run(kind: type[PlainProgress] | type[LiveProgress]) -> None:
    run(kind(Gone(), Gone()))


def test_the_kind_follows_the_stream() -> None:
    assert isinstance(make_progress(out=io.StringIO()), PlainProgress)
    assert isinstance(make_progress(out=Terminal()), LiveProgress)
    assert isinstance(make_progress(out=Terminal(), live=False), PlainProgress)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (PPO, ["reward/mean", "kl/mean"]),
        ({"time_s/step": 1.0, "actor/lr": 0.1, "actor/loss": 2.0}, ["actor/loss"]),
        (
            {"reward/accuracy": 0.8, "reward/loss": 0.5, "reward/margin": 1.0},
            ["reward/loss", "reward/accuracy", "reward/margin"],
        ),
        ({"reward/accuracy/mean": 0.8, "actor/lr": 0.1}, ["reward/accuracy/mean"]),
        ({"version/reward": 3.0, "time_s/reward": 1.0, "reward/loss": 0.5}, ["reward/loss"]),
        (
            {"reward/failed": 0.25, "reward/rule/failed": 0.0, "reward/mean": 0.5},
            ["reward/mean", "reward/failed"],
        ),
        (
            {"reward/letters/mean": 1.0, "reward/length/mean": 0.5, "reward/mean": 2.5, "kl/mean": 0.1},
            ["reward/mean", "reward/letters/mean", "reward/length/mean", "kl/mean"],
        ),
        ({}, []),
    ],
)
def test_headlines_are_chosen_for_any_algorithm(metrics: dict[str, float], expected: list[str]) -> None:
    assert headline_metrics(metrics) == expected


def test_metrics_that_are_not_numbers_are_shown() -> None:
    out = Terminal()
    progress = LiveProgress(out, io.StringIO())
    progress.started("realrl sft", 2, "runs/sft/1")
    for value in (math.nan, math.inf, 1.0):
        progress.step_done(1, 0, {"actor/loss": value})
    progress.close()
    assert "actor/loss" in out.getvalue()


def test_time_left_leaves_the_slow_first_step_out() -> None:
    pace = Pace(10, now_s=0.0)
    assert pace.left_s() is None
    pace.step_done(1, now_s=20.0)
    assert pace.left_s() == 180.0
    pace.step_done(2, now_s=21.0)
    pace.step_done(3, now_s=22.0)
    assert pace.left_s() == 7.0


def test_time_left_after_a_resume_counts_from_there() -> None:
    pace = Pace(100, now_s=0.0)
    pace.step_done(91, now_s=2.0)
    assert pace.left_s() == 18.0

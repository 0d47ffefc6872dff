"""The quickstart ends within its time on machines of any speed, and is whole on a fast one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quickstart import Pacer, run_lines, step_times
from quickstart_pace import (
    LEAST_PROMPTS,
    PROMPTS_AT_A_TIME,
    REFERENCE,
    RESERVE,
    RUNGS,
    Choice,
    Costs,
    Lengths,
    Stage,
    choose,
    choose_prompts,
    explain,
    explain_late,
    is_late,
    slowness,
    step_seconds,
)

from realrl.config.compose import compose
from realrl.experiment.discovery import config_dir, load_experiment

FULL = Lengths(rw_steps=66, ppo_steps=10)
SHORTEST = Lengths(rw_steps=min(RUNGS.values()), ppo_steps=min(RUNGS), n_prompts=LEAST_PROMPTS)
LIMIT_S = 1200.0
FACTORS = [0.1, 0.3, 0.5, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 5.0]


def seconds(lengths: Lengths, costs: Costs) -> float:
    steps = lengths.rw_steps * costs.rw_step_s + lengths.ppo_steps * costs.ppo_step_s
    return steps + lengths.n_prompts * costs.prompt_s + costs.rw_once_s + costs.ppo_once_s + costs.eval_once_s


def test_the_longest_lengths_are_those_of_the_preset() -> None:
    steps = {
        stage: compose(
            load_experiment(stage), ["preset=quickstart"], config_dir=config_dir(), cache_dir=Path("/c")
        ).steps
        for stage in ("rw", "ppo")
    }
    assert steps == {"rw": RUNGS[max(RUNGS)], "ppo": max(RUNGS)}


@given(factor=st.floats(0.1, 40), limit_s=st.floats(60, 2000), n_done=st.integers(4, 65))
def test_the_end_is_within_the_limit_if_any_lengths_are(factor: float, limit_s: float, n_done: int) -> None:
    costs = REFERENCE.times(factor)
    for stage, done, once in (
        ("rw", n_done, 0.0),
        ("ppo", None, costs.rw_once_s),
        ("ppo", n_done % 10, costs.rw_once_s),
    ):
        choice = choose(stage, FULL, n_done=done, limit_s=limit_s, costs=costs)
        spent = FULL.rw_steps * costs.rw_step_s + once if stage == "ppo" else 0.0
        goes_on = replace(
            SHORTEST, rw_steps=FULL.rw_steps, ppo_steps=FULL.ppo_steps if done and spent else SHORTEST.ppo_steps
        )
        saved = (done or 0) * (costs.ppo_step_s if spent else costs.rw_step_s)
        least_s = (
            min(
                seconds(goes_on, costs) - saved,
                seconds(replace(SHORTEST, rw_steps=(FULL if spent else SHORTEST).rw_steps), costs),
            )
            - spent
        )
        if least_s * (1 + RESERVE) <= limit_s:
            assert choice.fits
        if choice.fits:
            assert choice.left_s <= limit_s
        else:
            assert choice.left_s == pytest.approx(least_s)


@given(slower=st.floats(1.0, 3.0), factor=st.floats(0.1, 40))
def test_a_slower_machine_gets_no_more_steps(slower: float, factor: float) -> None:
    one, other = (
        choose("rw", FULL, n_done=4, limit_s=LIMIT_S, costs=REFERENCE.times(f)).lengths
        for f in (factor, factor * slower)
    )
    assert other.ppo_steps <= one.ppo_steps


@pytest.mark.parametrize(
    ("stage", "times", "expected"),
    [
        ("rw", [9.0, 2.0, 3.0], None),
        ("rw", [9.0, 2.0, 3.0, 4.0], 3.0),
        ("rw", [9.0, 2.0, *[5.0] * 8], 5.0),
        ("ppo", [9.0], None),
        ("ppo", [9.0, 7.0], 7.0),
        ("ppo", [9.0, 2.0, 6.0, 8.0], 7.0),
    ],
)
def test_the_speed_is_that_of_the_last_steps(stage: Stage, times: list[float], expected: float | None) -> None:
    assert step_seconds(stage, times) == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (
            Choice(FULL, False, 400.0, True),
            "length  66 reward-model steps and 10 PPO steps: nothing has to be left out to end within 20 minutes",
        ),
        (
            Choice(replace(FULL, ppo_steps=7), False, 400.0, True),
            "length  66 reward-model steps and 7 PPO steps, instead of 66 and 10, so that it ends within 20 minutes",
        ),
        (
            Choice(SHORTEST, True, 4000.0, False),
            f"length  {SHORTEST.rw_steps} reward-model steps and {SHORTEST.ppo_steps} PPO steps, evaluated on "
            f"{LEAST_PROMPTS} prompts: it may take longer than 20 minutes, but nothing ends sooner",
        ),
    ],
)
def test_what_is_said(choice: Choice, expected: str) -> None:
    step_s = 3 * REFERENCE.ppo_step_s
    assert slowness("ppo", step_s) == 3
    assert explain(choice, FULL, stage="ppo", step_s=step_s, limit_min=20) == [
        f"speed   a PPO step takes {step_s:.1f} s on this machine now",
        expected,
    ]
    assert explain(choice, FULL, stage="rw", step_s=2 * REFERENCE.rw_step_s, limit_min=20)[0] == (
        f"speed   a reward-model step takes {2 * REFERENCE.rw_step_s:.1f} s on this machine now, and a PPO step should "
        f"take about {2 * REFERENCE.ppo_step_s:.0f} s"
    )


@given(
    prompt_s=st.floats(0.001, 100),
    once_s=st.floats(0, 500),
    limit_s=st.floats(-500, 2000),
    n_prompts=st.integers(1, 600),
    share=st.floats(0, 1),
)
def test_an_evaluation_has_the_prompts_that_fit(
    prompt_s: float, once_s: float, limit_s: float, n_prompts: int, share: float
) -> None:
    n_done, lengths = int(share * n_prompts), replace(FULL, n_prompts=n_prompts)
    choice = choose_prompts(lengths, n_done=n_done, once_s=once_s, prompt_s=prompt_s, limit_s=limit_s)
    n = choice.lengths.n_prompts
    floor = min(n_prompts, max(n_done, LEAST_PROMPTS))
    assert choice.lengths == replace(lengths, n_prompts=n)
    assert choice.left_s == once_s + (n - n_done) * prompt_s
    assert floor <= n <= n_prompts
    assert choice.fits or n == floor
    assert n in (floor, n_prompts) or n % PROMPTS_AT_A_TIME == 0
    if n < n_prompts:
        assert once_s + (n + PROMPTS_AT_A_TIME - n_done) * prompt_s > limit_s


@pytest.mark.parametrize(
    ("lengths", "fits", "expected"),
    [
        (FULL, True, "it goes on, as that is within 20 minutes"),
        (FULL, False, "it goes on, as nothing ends sooner"),
        (replace(FULL, n_prompts=384), True, "384 held-out prompts instead of 448, to end within 20 minutes"),
        (
            replace(FULL, ppo_steps=6, n_prompts=320),
            False,
            "6 PPO steps instead of 10 and 320 held-out prompts instead of 448, as nothing ends sooner",
        ),
    ],
)
def test_what_is_said_about_a_late_end(lengths: Lengths, fits: bool, expected: str) -> None:
    assert explain_late(Choice(lengths, False, 100.0, fits), FULL, limit_min=20) == expected


@pytest.mark.parametrize(
    ("end_s", "told_s", "expected"),
    [(1055, 1000, False), (1065, 1000, False), (1105, 1000, True), (255, 200, False), (265, 200, True), (1, 9, False)],
)
def test_an_end_is_late_by_a_tenth_of_the_time(end_s: float, told_s: float, expected: bool) -> None:
    assert is_late(end_s + 1e9, told_s + 1e9, started_s=1e9) == expected


@dataclass
class Machine:
    """A machine whose time passes by running: `factor(now_s)` times as slow as the reference."""

    out: Path
    factor: Callable[[float], float]
    ppo_factor: float = 1.0
    eval_factor: float = 1.0
    now_s: float = 0.0
    n_prompts: int = 0
    commands: list[Sequence[str]] = field(default_factory=list)

    def spend(self, reference_s: float) -> float:
        spent_s = reference_s * self.factor(self.now_s)
        self.now_s += spent_s
        return spent_s

    def run(self, command: Sequence[str], goes_on: Callable[[str], bool]) -> int | None:
        self.commands.append(command)
        stage = command[4]
        steps = next((int(item[6:]) for item in command if item.startswith("steps=")), getattr(FULL, f"{stage}_steps"))
        once_s = getattr(REFERENCE, f"{stage}_once_s")
        step_s = getattr(REFERENCE, f"{stage}_step_s") * (self.ppo_factor if stage == "ppo" else 1)
        folder = self.out / stage
        (folder / "checkpoints/latest/state").mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"steps": steps}))
        rows = ""
        self.spend(once_s / 2)
        for step in range(1, steps + 1):
            rows += json.dumps({"step": step, "time_s/step": self.spend(step_s * (1.5 if step == 1 else 1))}) + "\n"
            (folder / "metrics.jsonl").write_text(rows)
            if not goes_on(f"step {step}/{steps}\n"):
                return None
        self.spend(once_s / 2)
        (folder / "checkpoints/latest/state/manifest.json").write_text(json.dumps({"step": steps}))
        return 0

    def quickstart(self) -> Lengths:
        """Run all of it; returns the lengths."""
        pacer = Pacer(
            self.out, FULL, limit_min=LIMIT_S / 60, started_s=self.now_s, run=self.run, clock=lambda: self.now_s
        )
        assert pacer.train("rw", []) == 0
        assert pacer.train("ppo", ["models.reward.path=x"]) == 0
        self.evaluate(pacer)
        done = [json.loads((self.out / stage / "config.json").read_text())["steps"] for stage in ("rw", "ppo")]
        return Lengths(*done, self.n_prompts)

    def evaluate(self, pacer: Pacer) -> None:
        pacer.prompts(None)
        self.spend(self.eval_factor * REFERENCE.eval_once_s)
        self.n_prompts = 0
        while self.n_prompts < (n_all := pacer.prompts(self.n_prompts)):
            n = min(PROMPTS_AT_A_TIME, n_all - self.n_prompts)
            self.spend(self.eval_factor * n * REFERENCE.prompt_s)
            self.n_prompts += n


@pytest.mark.parametrize("ppo_factor", [0.85, 1.0, 1.2])
@pytest.mark.parametrize("factor", FACTORS)
def test_a_quickstart_ends_in_time(tmp_path: Path, factor: float, ppo_factor: float) -> None:
    machine = Machine(tmp_path, lambda _: factor, ppo_factor, now_s=1e9)
    lengths = machine.quickstart()
    costs = REFERENCE.times(factor)
    real = replace(costs, ppo_step_s=costs.ppo_step_s * ppo_factor)
    measured_s = 5 * real.rw_step_s + real.rw_once_s  # steps that are run twice
    if ppo_factor > 1:
        measured_s += 2.5 * real.ppo_step_s + real.ppo_once_s
    if (seconds(replace(SHORTEST, rw_steps=FULL.rw_steps), real) + measured_s) * (1 + RESERVE) <= LIMIT_S:
        assert machine.now_s - 1e9 <= LIMIT_S
    if (seconds(FULL, real) + measured_s) * (1 + RESERVE) * max(1, 1 / ppo_factor) <= LIMIT_S:
        assert lengths == FULL
    if factor >= 1.5:
        assert (lengths.ppo_steps, lengths.n_prompts) == (SHORTEST.ppo_steps, SHORTEST.n_prompts)


def test_a_fast_machine_runs_the_commands_of_the_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(tmp_path, lambda _: 0.35, now_s=1e9)
    assert machine.quickstart() == FULL
    assert [command[3:] for command in machine.commands] == [
        ["run", "rw", "preset=quickstart", f"run_dir={tmp_path / 'rw'}", "resume=auto"],
        ["run", "ppo", "preset=quickstart", f"run_dir={tmp_path / 'ppo'}", "resume=auto", "models.reward.path=x"],
    ]
    out = capsys.readouterr().out
    assert out.count("nothing has to be left out") == 2  # in the reward model's fourth step, and before PPO
    assert "anew" not in out
    assert "late" not in out


def test_the_fewest_reward_model_steps_are_larger(tmp_path: Path) -> None:
    machine = Machine(tmp_path, lambda _: 1.5, now_s=1e9)
    assert machine.quickstart().rw_steps == SHORTEST.rw_steps
    assert [command[8:] for command in machine.commands if command[4] == "rw"] == [
        [],
        [f"steps={SHORTEST.rw_steps}", "models.reward.optimizer.lr=0.0001"],
    ]
    compose(
        load_experiment("rw"),
        ["preset=quickstart", *machine.commands[1][8:]],
        config_dir=config_dir(),
        cache_dir=Path("/c"),
    )


@pytest.mark.parametrize("slow_from_s", [60.0, 150.0, 250.0, 330.0])
def test_a_machine_that_gets_slower_on_the_way(tmp_path: Path, slow_from_s: float) -> None:
    machine = Machine(tmp_path, lambda now_s: 1.0 if now_s > 1e9 + slow_from_s else 0.35, now_s=1e9)
    lengths = machine.quickstart()
    assert machine.now_s - 1e9 <= LIMIT_S
    assert lengths.rw_steps >= RUNGS[lengths.ppo_steps]


def test_ppo_begins_anew_where_it_would_end_too_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(tmp_path, lambda now_s: 1.4 if now_s > 1e9 + 220 else 0.35, now_s=1e9)
    lengths = machine.quickstart()
    assert lengths.ppo_steps < FULL.ppo_steps
    assert machine.now_s - 1e9 <= LIMIT_S
    assert "this stage is stopped now, and begins anew with its new length" in capsys.readouterr().out
    assert [command[-1] for command in machine.commands[1:]] == ["models.reward.path=x", f"steps={lengths.ppo_steps}"]


def test_load_that_rises_in_ppo_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(tmp_path, lambda now_s: 0.7 if now_s > 1e9 + 350 else 0.35, now_s=1e9)
    assert machine.quickstart() == FULL
    late = [line for line in capsys.readouterr().out.splitlines() if line.startswith("late")]
    assert 1 <= len(late) <= 2  # the first slow step is half of the recent ones
    told_min, what = late[-1].split(", ")[1].split(" minutes in all: ")
    assert what == "it goes on"
    assert float(told_min) == pytest.approx((machine.now_s - 1e9) / 60, rel=0.05)


@pytest.mark.parametrize(("eval_factor", "ends_in_time"), [(1.9, True), (4.0, False), (20.0, False)])
def test_load_that_rises_in_the_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], eval_factor: float, ends_in_time: bool
) -> None:
    machine = Machine(tmp_path, lambda _: 0.8, eval_factor=eval_factor, now_s=1e9)
    lengths = machine.quickstart()
    assert LEAST_PROMPTS <= lengths.n_prompts < FULL.n_prompts
    assert replace(lengths, n_prompts=FULL.n_prompts) == FULL
    assert (machine.now_s - 1e9 <= LIMIT_S) == ends_in_time
    late = [line.partition("minutes in all: ")[2] for line in capsys.readouterr().out.splitlines() if "late  " in line]
    reason = "to end within 20 minutes" if ends_in_time else "as nothing ends sooner"
    assert f"{lengths.n_prompts} held-out prompts instead of 448, {reason}" in late


def test_a_complete_stage_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Machine(tmp_path, lambda _: 1.2, now_s=1e9)
    lengths = slow.quickstart()
    assert lengths.rw_steps < FULL.rw_steps or lengths.ppo_steps < FULL.ppo_steps
    (tmp_path / "ppo/checkpoints/latest/state/manifest.json").unlink()  # interrupted
    fast = Machine(tmp_path, lambda _: 0.35, now_s=1e9)
    capsys.readouterr()
    assert fast.quickstart().rw_steps == lengths.rw_steps
    assert [command[4] for command in fast.commands] == ["ppo"]
    assert capsys.readouterr().out.count("done before") == 1


CHILD = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (print("stopped in order", flush=True), sys.exit(3)))
for step in range(1, 1000):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time_s/step": 0.5}) + "\\n")
    print(f"step {step}/1000", flush=True)
    time.sleep(0.05)
"""


def test_a_stopped_command_ends_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    assert run_lines(command, lambda line: len(step_times(tmp_path)) < 3) is None
    assert capsys.readouterr().out.endswith("stopped in order\n")
    assert step_times(tmp_path)[:3] == [0.5] * 3
    assert run_lines([sys.executable, "-c", "raise SystemExit(7)"], lambda line: True) == 7


def test_an_interrupt_ends_the_command_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(line: str) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_lines([sys.executable, "-c", CHILD, str(tmp_path)], interrupt)
    assert capsys.readouterr().out.endswith("stopped in order\n")

"""A real language model, human ratings, PPO, and what it changed: what `make quickstart` runs.

    fetch      SmolLM2-135M-Instruct and 10,604 movie-review snippets with about 20 human ratings each
    rw         train a reward model on pairs of snippets that people rated clearly apart
    ppo        train SmolLM2 to continue the first words of other snippets towards what people rated positively
    evaluate   held-out pairs and prompts, before and after; judged by VADER, which nothing was trained on

A stage that is complete is not run again, one that was interrupted continues; --fresh starts over. The first steps are
timed, and on a slow machine the stages get shorter, so that all of it ends within --minutes. The later ones are timed
too: where the end moves, it says so, and evaluates fewer prompts if that helps (see quickstart_pace.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from quickstart_pace import (
    LEARNING_RATES,
    REFERENCE,
    RUNGS,
    Choice,
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

N_SAMPLES_SHOWN = 6
LIMIT_MIN = 20.0
_KEYPRESS_S = 0.5  # a second signal within less counts as the same
FULL_STEPS = max(RUNGS)


def main() -> int:
    """Run all stages; returns the exit code of the first that fails."""
    options = _options()
    if options.fresh and options.out.exists():
        aside = options.out.with_name(f"{options.out.name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}")
        options.out.rename(aside)
        print(f"the earlier quickstart is now {aside}")
    started_s = time.time() if options.since is None else options.since
    full = Lengths(RUNGS[FULL_STEPS], FULL_STEPS, options.prompts)
    pacer = Pacer(options.out, full, limit_min=options.minutes, started_s=started_s)
    reward = f"models.reward.path={options.out / 'rw'}/checkpoints/latest/reward"
    stages: list[tuple[str, Callable[[], int]]] = [
        ("1/4  model and human ratings", _fetch),
        ("2/4  reward model from human ratings", lambda: pacer.train("rw", [])),
        ("3/4  PPO", lambda: pacer.train("ppo", [reward])),
    ]
    for title, run in stages:
        print(f"\n{title}", flush=True)
        exit_code = run()
        if exit_code:
            print(f"\nthe quickstart stopped at: {title}", file=sys.stderr)
            return exit_code
    print("\n4/4  evaluation on held-out pairs and prompts", flush=True)
    _evaluate(options.out, pacer.prompts, options.pairs)
    print(f"\ntotal time {(time.time() - started_s) / 60:.1f} min")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="run folder (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=int, default=448, help="held-out prompts to evaluate on (default: %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=400, help="held-out pairs to evaluate on (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="set an earlier quickstart aside and start over")
    parser.add_argument("--minutes", type=float, default=LIMIT_MIN, help="time limit of it all (default: %(default)g)")
    parser.add_argument("--since", type=float, help="time at which it began, in seconds since 1970 (default: now)")
    return parser.parse_args()


def _fetch() -> int:
    return subprocess.run([sys.executable, str(Path(__file__).with_name("fetch_assets.py"))], check=False).returncode


RunLines = Callable[[Sequence[str], Callable[[str], bool]], int | None]


def run_lines(command: Sequence[str], goes_on: Callable[[str], bool]) -> int | None:
    """Run a command and print its lines until `goes_on` says no to one; returns its exit code, or None if stopped."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        is_stopped = False
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                if not is_stopped and not goes_on(line):
                    is_stopped = True
                    process.terminate()
                    time.sleep(_KEYPRESS_S)
                    process.terminate()  # do not wait for the step
        except BaseException:
            process.terminate()
            for line in process.stdout:  # it ends in order
                print(line, end="", flush=True)
            raise
    return None if is_stopped else process.returncode


class Pacer:
    """Runs the training stages, and makes what is left shorter where it would end too late.

    Args:
        out: folder of the quickstart.
        full: lengths where time does not matter.
        limit_min: minutes that the whole quickstart may take.
        started_s: time at which it began, by `clock`.
        run: runs a command, see `run_lines`.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        out: Path,
        full: Lengths,
        *,
        limit_min: float,
        started_s: float,
        run: RunLines = run_lines,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._out, self._full, self._limit_min, self._started_s = out, full, limit_min, started_s
        self._run, self._clock = run, clock
        self._lengths = full
        self._told: tuple[float, Lengths] | None = None  # the end by `clock`, and the lengths
        self._marks: list[tuple[int, float]] = []  # prompts of the evaluation -> when they were done

    def train(self, stage: Stage, overrides: Sequence[str]) -> int:
        """Run a stage to its end, unless that was done before. Returns its exit code."""
        run_dir = self._out / stage
        if _is_complete(run_dir):
            print("done before; --fresh starts over")
            self._note_length(stage)
            return 0
        if stage == "ppo":
            self._choose("ppo", n_done=None)
        while True:
            n_steps = self._n_steps(stage)
            if _saved_step(run_dir) >= n_steps:
                print(f"as many steps as there is time for were done before: {_saved_step(run_dir)}")
                return 0
            shorter = [] if n_steps == self._n_steps(stage, self._full) else [f"steps={n_steps}"]
            if stage == "rw" and n_steps in LEARNING_RATES:
                shorter.append(f"models.reward.optimizer.lr={LEARNING_RATES[n_steps]:g}")
            command = ["run", stage, "preset=quickstart", f"run_dir={run_dir}", "resume=auto", *overrides, *shorter]
            exit_code = self._run([sys.executable, "-m", "realrl", *command], lambda line: self._goes_on(stage, line))
            if exit_code is not None:
                return exit_code
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)  # of a run with other lengths

    def prompts(self, n_done: int | None) -> int:
        """Choose how many prompts the evaluation ends with, and tell it if they are fewer, or the end is late.

        Args:
            n_done: prompts that are evaluated; None before the evaluation begins, 0 when the pairs are done.
        """
        now_s = self._clock()
        (n_marked, marked_s), *_ = [*self._marks[-1:], (0, now_s)]
        self._marks.append((n_done or 0, now_s))
        if n_done is None:
            step_s = step_seconds("ppo", step_times(self._out / "ppo"))
            factor = 1.0 if step_s is None else slowness("ppo", step_s)
        elif n_done == n_marked:
            factor = (now_s - marked_s) / REFERENCE.eval_once_s
        else:
            factor = (now_s - marked_s) / (n_done - n_marked) / REFERENCE.prompt_s
        costs = REFERENCE.times(factor)
        choice = choose_prompts(
            self._lengths if n_done is not None else replace(self._lengths, n_prompts=self._full.n_prompts),
            n_done=n_done or 0,
            once_s=costs.eval_once_s if n_done is None else 0.0,
            prompt_s=costs.prompt_s,
            limit_s=self._limit_s(now_s),
        )
        self._lengths = choice.lengths
        is_news = self._told is not None and self._told[1].n_prompts > choice.lengths.n_prompts
        if choice.left_s > 0:
            self._tell_if_late(choice, is_news=is_news)
        return choice.lengths.n_prompts

    def _limit_s(self, now_s: float) -> float:
        return self._started_s + 60 * self._limit_min - now_s

    def _tell_if_late(self, choice: Choice, *, is_news: bool = False) -> None:
        """Tell an end that is later than the one that was told before, and what is done about it."""
        end_s = self._clock() + choice.left_s
        if self._told is None:
            self._tell_end(choice)
        elif is_news or is_late(end_s, self._told[0], self._started_s):
            told_s, planned = self._told
            now, then = (time.strftime("%H:%M", time.localtime(at_s)) for at_s in (end_s, told_s))
            in_all_min = (end_s - self._started_s) / 60
            what = explain_late(choice, planned, limit_min=self._limit_min)
            print(f"late    about {now} instead of {then}, {in_all_min:.1f} minutes in all: {what}", flush=True)
            self._told = (end_s, choice.lengths)

    def _tell_end(self, choice: Choice) -> None:
        end_s = self._clock() + choice.left_s
        in_all_min = (end_s - self._started_s) / 60
        at = time.strftime("%H:%M", time.localtime(end_s))
        print(f"end     about {at}, {in_all_min:.1f} minutes in all", flush=True)
        self._told = (end_s, choice.lengths)

    def _goes_on(self, stage: Stage, line: str) -> bool:
        """Look at the clock where `line` says that a step is complete; False if the stage must begin anew."""
        if not line.startswith("step "):
            return True
        n_done = len(step_times(self._out / stage))
        choice = self._choose(stage, n_done=n_done) if n_done < self._n_steps(stage) else None
        return choice is None or not choice.begins_anew

    def _choose(self, stage: Stage, n_done: int | None) -> Choice | None:
        """Choose the lengths of what is left, and tell if they are news; None while too little is measured."""
        measured: Stage = "rw" if stage == "rw" or (stage == "ppo" and n_done is None) else "ppo"
        step_s = step_seconds(measured, step_times(self._out / measured))
        if step_s is None:
            return None
        limit_s = self._limit_s(self._clock())
        # What comes after the stage is chosen again when its time comes, so only the stage's own length is kept.
        lengths = replace(self._full, rw_steps=self._lengths.rw_steps)
        lengths = lengths if stage == "rw" else replace(lengths, ppo_steps=self._lengths.ppo_steps)
        costs = REFERENCE.times(slowness(measured, step_s))
        choice = choose(stage, lengths, n_done=n_done, limit_s=limit_s, costs=costs)
        if self._told is None or n_done is None or choice.begins_anew:
            for line in explain(choice, self._full, stage=measured, step_s=step_s, limit_min=self._limit_min):
                print(line)
            self._tell_end(choice)
            if choice.begins_anew:
                print("this stage is stopped now, and begins anew with its new length", flush=True)
        else:
            self._tell_if_late(choice)
        if choice.begins_anew or n_done is None:
            self._lengths = choice.lengths
        return choice

    def _n_steps(self, stage: Stage, lengths: Lengths | None = None) -> int:
        lengths = lengths or self._lengths
        return lengths.rw_steps if stage == "rw" else lengths.ppo_steps

    def _note_length(self, stage: Stage) -> None:
        n_steps = json.loads((self._out / stage / "config.json").read_text())["steps"]
        changed = {"rw_steps": n_steps} if stage == "rw" else {"ppo_steps": n_steps}
        self._lengths = replace(self._lengths, **changed)


def step_times(run_dir: Path) -> list[float]:
    """Seconds of each complete step of a run."""
    path = run_dir / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    return [json.loads(row)["time_s/step"] for row in rows]


def _is_complete(run_dir: Path) -> bool:
    """True if the last step of a training stage is saved."""
    config = run_dir / "config.json"
    return config.exists() and _saved_step(run_dir) == json.loads(config.read_text())["steps"]


def _saved_step(run_dir: Path) -> int:
    """The step of the newest checkpoint of a training stage; 0 if there is none."""
    manifest = run_dir / "checkpoints/latest/state/manifest.json"
    step: int = json.loads(manifest.read_text())["step"] if manifest.exists() else 0
    return step


def _evaluate(out: Path, n_prompts: Callable[[int | None], int], n_pairs: int) -> None:
    import torch
    from quickstart_eval import evaluate, print_report

    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    report = evaluate(out, n_prompts=n_prompts, n_pairs=n_pairs)
    print_report(report, n_shown=N_SAMPLES_SHOWN)
    (out / "report.json").write_text(json.dumps(report.as_dict(), indent=1))
    print(f"report       {out / 'report.json'}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

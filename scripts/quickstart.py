"""A real language model, human ratings, PPO, and what it changed: what `make quickstart` runs.

    fetch      SmolLM2-135M-Instruct and 10,604 movie-review snippets with about 20 human ratings each
    rw         train a reward model on pairs of snippets that people rated clearly apart
    ppo        train SmolLM2 to continue the first words of other snippets towards what people rated positively
    evaluate   held-out pairs and prompts, before and after; judged by VADER, which nothing was trained on

A stage that is complete is not run again, one that was interrupted continues; --fresh starts over. The first steps are
timed, and on a slow machine the stages get shorter, so that all of it ends within --minutes (see quickstart_pace.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from quickstart_pace import REFERENCE, RUNGS, Choice, Lengths, Stage, choose, explain, slowness, step_seconds

N_SAMPLES_SHOWN = 6
LIMIT_MIN = 20.0
FULL_STEPS = max(RUNGS)


def main() -> int:
    """Run all stages; returns the exit code of the first that fails."""
    options = _options()
    if options.fresh and options.out.exists():
        aside = options.out.with_name(f"{options.out.name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}")
        options.out.rename(aside)
        print(f"the earlier quickstart is now {aside}")
    started_s = time.time() if options.since is None else options.since
    pacer = Pacer(options.out, Lengths(RUNGS[FULL_STEPS], FULL_STEPS), limit_min=options.minutes, started_s=started_s)
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
    _evaluate(options.out, options.prompts, options.pairs)
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
        self._has_told = False

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
            shorter = [] if n_steps == self._n_steps(stage, self._full) else [f"steps={n_steps}"]
            command = ["run", stage, "preset=quickstart", f"run_dir={run_dir}", "resume=auto", *overrides, *shorter]
            exit_code = self._run([sys.executable, "-m", "realrl", *command], lambda line: self._goes_on(stage, line))
            if exit_code is not None:
                return exit_code

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
        limit_s = self._started_s + 60 * self._limit_min - self._clock()
        # PPO is chosen again when its time comes, so the reward model's stage keeps its own length only.
        lengths = replace(self._lengths, ppo_steps=self._full.ppo_steps) if stage == "rw" else self._lengths
        costs = REFERENCE.times(slowness(measured, step_s))
        choice = choose(stage, lengths, n_done=n_done, limit_s=limit_s, costs=costs)
        is_news = not self._has_told or n_done is None or choice.begins_anew
        if is_news:
            for line in explain(choice, self._full, stage=measured, step_s=step_s, limit_min=self._limit_min):
                print(line)
            end_s = self._clock() + choice.left_s
            in_all_min = (end_s - self._started_s) / 60
            print(
                f"end     about {time.strftime('%H:%M', time.localtime(end_s))}, {in_all_min:.1f} minutes in all",
                flush=True,
            )
            if choice.begins_anew:
                print("this stage is stopped now, and begins anew with its new length", flush=True)
            self._has_told = True
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
    manifest, config = run_dir / "checkpoints/latest/state/manifest.json", run_dir / "config.json"
    return manifest.exists() and json.loads(manifest.read_text())["step"] == json.loads(config.read_text())["steps"]


def _evaluate(out: Path, n_prompts: int, n_pairs: int) -> None:
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

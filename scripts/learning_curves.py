#!/usr/bin/env python
"""Every online algorithm learns: train a tiny model with each on a verifiable task, and draw all curves in one picture.

Each run is `realrl run NAME preset=tiny`: a random model of half a million parameters, a fixed seed, and a reward that
is a rule (`realrl.data.tiny`). Runs go one after the other; one that is complete in --out is not run again.

    start, end    mean over the responses of the first step, and of the last five
    learned       end - start is at least 0.3 and at least 5 standard errors; and, where the algorithm promises more:
                  safe_rlhf ends at or below its limit on the mean cost, having been above it; both players of
                  self_play learn; distill ends below half of the reverse KL to its teacher that it began with

Exit code 1 when one does not learn. Needs the extra viz.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
STEPS = 40
TAIL = 5  # number of last steps whose mean is the end
MIN_GAIN, MIN_ERRORS = 0.3, 5.0
FALLEN = 0.5
REWARD, OPPONENT, COST, REVERSE_KL = "reward/mean", "opponent_reward/mean", "cost/mean", "distill/reverse_kl"
ALGORITHMS = (
    "ppo", "ppo_ref_ema", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "remax", "reinforce_pp", "self_play", "safe_rlhf",
    "distill",
)  # fmt: skip
TEACHER = "teacher"  # folder of the run that trains distill's teacher


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}" if self.error else f"{self.mean:.3f}"


@dataclass(frozen=True)
class Curve:
    """One number of one run, step by step.

    Attributes:
        values: a mean over the responses of each step.
        errors: its standard errors; empty if the run does not log how much responses differ.
    """

    name: str
    values: list[float]
    errors: list[float]

    @property
    def start(self) -> Estimate:
        return self._over(slice(0, 1))

    @property
    def end(self) -> Estimate:
        return self._over(slice(-TAIL, None))

    def _over(self, steps: slice) -> Estimate:
        values, errors = self.values[steps], self.errors[steps]
        error = math.sqrt(math.fsum(e * e for e in errors)) / len(values) if errors else 0.0
        return Estimate(math.fsum(values) / len(values), error)


@dataclass(frozen=True)
class Result:
    """Outcome of one algorithm.

    Attributes:
        curves: the first one decides if the algorithm learned.
        limit: limit of the mean cost, if any.
        failures: expectations that were not met.
        time_s: time of all steps.
    """

    algorithm: str
    curves: list[Curve]
    limit: float | None
    failures: list[str]
    time_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, judge and draw; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/learning_curves"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        if not train(name, options.out, options.steps):
            return 1
    results = [judge(name, options.out / name) for name in options.only]
    print_results(results)
    (options.out / "results.json").write_text(json.dumps([as_json(r) for r in results], indent=1), encoding="utf-8")
    for suffix in ("svg", "png"):
        draw(results, options.out / f"learning_curves.{suffix}")
    print(f"\nnumbers   {options.out / 'results.json'}\npicture   {options.out / 'learning_curves.svg'} and .png")
    return 1 if any(result.failures for result in results) else 0


# ---------------------------------------------------------------- runs


def train(name: str, out: Path, steps: int) -> bool:
    """Run an algorithm, unless it has run already; False if the run fails."""
    more = []
    if name == "distill":
        teacher = out / TEACHER
        if not _run("sft", teacher, [f"steps={STEPS}"], STEPS):
            return False
        more = [f"models.teacher.path={teacher}/checkpoints/latest/actor"]
    return _run(name, out / name, [f"steps={steps}", "save.at_end=false", *more], steps)


def _run(experiment: str, folder: Path, overrides: Sequence[str], steps: int) -> bool:
    if len(_rows(folder)) >= steps:
        print(f"{folder} is complete", flush=True)
        return True
    command = ["-m", "realrl", "run", experiment, "preset=tiny", f"run_dir={folder}", *overrides]
    print(f"\n$ realrl {' '.join(command[2:])}", flush=True)
    return subprocess.run([sys.executable, *command], check=False, cwd=ROOT).returncode == 0


def _rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# ---------------------------------------------------------------- judgement


def judge(name: str, folder: Path) -> Result:
    """Compare a run's metrics with what the algorithm must reach."""
    rows, config = _rows(folder), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    n_responses = config["n_seqs"] * config["generation"]["n_responses"]
    names = {"distill": [REVERSE_KL], "self_play": [REWARD, OPPONENT], "safe_rlhf": [REWARD, COST]}.get(name, [REWARD])
    curves = [_curve(rows, metric, n_responses) for metric in names]
    limit = config["algorithm"].get("cost_limit")
    failures = [text for curve in curves for text in _failures(curve, limit)]
    return Result(name, curves, limit, failures, math.fsum(row["time_s/step"] for row in rows))


def _curve(rows: Sequence[dict[str, float]], metric: str, n_responses: int) -> Curve:
    spread = metric.replace("/mean", "/std")
    errors = [row[spread] / math.sqrt(n_responses) for row in rows if spread != metric and spread in row]
    return Curve(metric, [row[metric] for row in rows], errors)


def _failures(curve: Curve, limit: float | None) -> list[str]:
    start, end = curve.start, curve.end
    if curve.name == REVERSE_KL:
        return [] if end.mean < FALLEN * start.mean else [f"{curve.name} fell from {start} to {end} only"]
    if curve.name == COST:
        assert limit is not None
        over = [f"{curve.name} ends at {end}, above its limit {limit:g}"] if end.mean > limit else []
        return over or ([] if max(curve.values) > limit else [f"{curve.name} never came near its limit {limit:g}"])
    gain, error = end.mean - start.mean, math.hypot(start.error, end.error)
    return [] if gain >= max(MIN_GAIN, MIN_ERRORS * error) else [f"{curve.name} went from {start} to {end} only"]


def as_json(result: Result) -> dict[str, object]:
    """Convert a result to numbers for a file."""
    ends = [{"start": asdict(curve.start), "end": asdict(curve.end)} for curve in result.curves]
    curves = [{**asdict(curve), **both} for curve, both in zip(result.curves, ends, strict=True)]
    return {**asdict(result), "curves": curves, "learned": not result.failures}


def print_results(results: Sequence[Result]) -> None:
    table = Table(title="\nmean ± standard error over responses; the end is a mean of five steps", title_justify="left")
    for column in ("algorithm", "metric", "start", "end", "training time", "learned"):
        table.add_column(column, justify="right" if column in ("start", "end", "training time") else "left")
    for result in results:
        for i, curve in enumerate(result.curves):
            verdict = "no" if result.failures else "yes"
            limit = f" (limit {result.limit:g})" if curve.name == COST else ""
            first = (result.algorithm, f"{result.time_s:.0f} s", verdict) if i == 0 else ("", "", "")
            table.add_row(first[0], curve.name + limit, str(curve.start), str(curve.end), *first[1:])
    Console(width=None if Console().is_terminal else 118).print(table)
    for result in results:
        for failure in result.failures:
            print(f"{result.algorithm}: {failure}")


# ---------------------------------------------------------------- picture

INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
LABELS = {REWARD: "reward", OPPONENT: "opponent's reward", COST: "cost", REVERSE_KL: "reverse KL"}
COLOURS = {REWARD: BLUE, OPPONENT: ORANGE, COST: ORANGE, REVERSE_KL: GREEN}


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw one panel per algorithm; all but that of the reverse KL have the same axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.edgecolor": GRID, "xtick.color": MUTED,
        "ytick.color": MUTED, "svg.hashsalt": "realrl", "svg.fonttype": "path",
    }  # fmt: skip
    n_columns = min(4, len(results))
    n_rows = math.ceil(len(results) / n_columns)
    with pyplot.rc_context(style):
        width, height = max(6.0, 2.9 * n_columns), 2.25 * n_rows + 1.0
        figure, grid = pyplot.subplots(n_rows, n_columns, figsize=(width, height), squeeze=False)
        for axes, result in zip(grid.flat, results, strict=False):
            _panel(axes, result)
        for axes in list(grid.flat)[len(results) :]:
            axes.set_visible(False)
        for axes in grid[-1]:
            axes.set_xlabel("step", color=MUTED)
        left = {"x": 0.02, "ha": "left"}
        figure.suptitle(
            "Every online algorithm learns", y=1.0 - 0.14 / height, va="top", weight="bold", fontsize=12, **left
        )
        about = "mean reward of a step's responses, tiny model, verifiable reward; bands are two standard errors"
        figure.text(y=1.0 - 0.40 / height, va="top", s=about, color=MUTED, **left)
        figure.tight_layout(rect=(0.005, 0.0, 1.0, 1.0 - 0.50 / height), h_pad=1.4, w_pad=1.2)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=160, metadata=metadata)
        pyplot.close(figure)


def _panel(axes, result: Result) -> None:  # type: ignore[no-untyped-def]
    for i, curve in enumerate(result.curves):
        steps, colour = range(1, len(curve.values) + 1), COLOURS[curve.name]
        axes.plot(steps, curve.values, color=colour, linewidth=1.8, solid_capstyle="round", zorder=3)
        if curve.errors:
            bounds = [[v + sign * 2 * e for v, e in zip(curve.values, curve.errors, strict=True)] for sign in (-1, 1)]
            axes.fill_between(steps, *bounds, color=colour, alpha=0.18, linewidth=0, zorder=2)
        if len(result.curves) > 1:
            axes.text(0.03, 0.92 - 0.11 * i, LABELS[curve.name], color=colour, transform=axes.transAxes, va="center")
    axes.set_title(result.algorithm, loc="left", family="DejaVu Sans Mono", weight="bold", fontsize=10)
    first = result.curves[0]
    axes.set_title(f"{first.start.mean:.2f} → {first.end.mean:.2f}", loc="right", color=MUTED, fontsize=9)
    axes.set_xlim(1, max(2, len(first.values)))
    if first.name == REVERSE_KL:
        axes.set_ylim(0, 1.08 * max(first.values))
        axes.text(
            0.97, 0.92, "nats a token, to the teacher", color=GREEN, transform=axes.transAxes, ha="right", va="center"
        )
    else:
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    if len(result.curves) > 1 and result.curves[1].name == COST and result.limit is not None:
        axes.axhline(result.limit, color=ORANGE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.text(len(first.values) * 0.98, result.limit + 0.02, f"limit {result.limit:g}", color=ORANGE, ha="right")
    axes.grid(axis="y", color=GRID, linewidth=0.8, zorder=0)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())

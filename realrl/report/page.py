"""The page about runs: the figures that its script draws from, in a frame that loads nothing.

The script makes elements of texts only, so that nothing that a run wrote is read as HTML.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from statistics import median
from typing import Any

from realrl.draw.html import filled
from realrl.draw.theme import ROLE_HUES, Theme, both_modes, mix, role_hue, stylesheet
from realrl.planner.page.style import rules, swatches
from realrl.report.curves import LEAST_BUCKETS, MOST_BANDS, Grid, curves_of, grid_of, names_of, rounded, totals_of
from realrl.report.plans import calls_of, picture_of, plan_of, roles_in_order
from realrl.report.run_files import RunFolder
from realrl.report.samples import choose_samples, shown_samples
from realrl.report.settings import differing, flat_settings, group_names, run_names, seed_groups, short_paths, shown
from realrl.report.times import attempts_of, last_steps, read_trace, time_use
from realrl.runtime.output.progress import headline_metrics

MOST_BYTES = 2_000_000
_HEADLINES = (
    "reward/mean", "eval/reward/mean", "eval/pass@1", "game/payoff", "game/win_rate", "distill/reverse_kl",
    "actor/loss", "reward/loss", "actor/accuracy", "reward/accuracy", "eval/loss", "eval/accuracy", "cost/mean",
    "kl/mean", "actor/entropy", "response_length/mean", "truncated/mean", "actor/margin", "actor/grad_norm",
    "critic/explained_variance", "reward/grad_norm", "perf/tokens_per_s", "time_s/step",
)  # fmt: skip
_MOST_HEADLINES = 9
_MOST_TIMES, _MOST_PICTURES = 12, 3
_MOST_CELLS, _MOST_NOTES = 4000, 100  # cells of settings that differ; runs with notes
_MEMORY = "memory_gb/"
_FULLEST = f"{_MEMORY}fullest"
_MOST_MEMORY_CURVES = 8
_LEAST_SAMPLES = 6  # of a run that shows any
_TEXT_CHARS = 300


@dataclass(frozen=True)
class Budget:
    """Room on a page: numbers of curves, bytes of samples, their number, bars of timelines, bytes of traces to read."""

    numbers: int = 110_000
    sample_bytes: int = 700_000
    samples: int = 240
    bars: int = 12_000
    trace_bytes: int = 6_000_000

    def reduced(self) -> Budget:
        """Return half the room; the number of samples stays, and they are cut."""
        return replace(
            self,
            numbers=self.numbers // 2,
            sample_bytes=self.sample_bytes // 2,
            bars=self.bars // 2,
        )


def render_report(runs: Sequence[RunFolder], *, live: bool = False) -> str:
    """Return the page about runs.

    Args:
        live: the page asks the server that it came from for newer figures.
    """
    budget = Budget()
    for _ in range(6):
        page = _render(runs, budget, live=live)
        if len(page.encode(errors="replace")) <= MOST_BYTES:
            break
        budget = budget.reduced()
    return page.encode(errors="replace").decode()


def report_data(runs: Sequence[RunFolder], budget: Budget | None = None) -> dict[str, Any]:
    """Return the figures of the page, as JSON has them."""
    budget = budget or Budget()
    names = [_cut(name) for name in run_names([str(run.path.absolute()) for run in runs])]
    flats = flat_settings([run.settings for run in runs])
    groups = seed_groups(flats)
    rows = [_with_fewer_memory_curves(run.rows, len(runs)) for run in runs]
    rows, few = _with_fewer_metrics(rows, budget)
    grid = grid_of(rows, budget.numbers)
    metrics: dict[str, dict[str, Any]] = {}
    for i, own in enumerate(rows):
        for name, curve in curves_of(own, grid, has_bands=len(runs) <= MOST_BANDS).items():
            metrics.setdefault(_cut(name), {})[str(i)] = curve
    notes = [[name, [_cut(note) for note in run.notes]] for run, name in zip(runs, names, strict=True) if run.notes]
    headlines = _headlines(metrics)
    headline = headlines[0] if headlines else next(iter(metrics), "")
    samples = _samples(runs, budget)
    return {
        "made": int(time.time()),
        "title": _title(runs, names),
        "grid": [grid.first, grid.width, grid.n],
        "groups": [
            {"name": _cut(name), "runs": members}
            for name, members in zip(group_names(flats, groups, names), groups, strict=True)
        ],
        "runs": [_run(run, name, own, grid) for run, name, own in zip(runs, names, rows, strict=True)],
        "metrics": metrics,
        "headlines": _shown_first(headlines, metrics),
        "headline": headline,
        "samples": samples,
        "n_samples": [len(run.samples) for run in runs],
        "times": [_times(run, budget, len(runs)) if i < _MOST_TIMES else None for i, run in enumerate(runs)],
        **_settings(flats),
        "notes": ([["all runs", [few]]] if few else []) + notes[:_MOST_NOTES],
    }


def data_text(data: Mapping[str, Any]) -> str:
    """Return the figures as JSON that can stand inside of a script element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# ---------------------------------------------------------------- parts


def _render(runs: Sequence[RunFolder], budget: Budget, *, live: bool) -> str:
    data = report_data(runs, budget)
    plans, pictures, n_roles = _plans(runs)
    data["plans"], data["live"] = plans, live

    def style(theme: Theme, scope: str) -> str:
        hues = (mix(role_hue(i), "#ffffff", theme.lift) for i in range(len(ROLE_HUES)))
        curves = "\n".join(f"{scope} .c{i}{{--c:{hue}}}".strip() for i, hue in enumerate(hues))
        picture = stylesheet(theme, n_roles, f"{scope} .picture")
        return "\n".join((picture, rules(theme, n_roles, f"{scope} .plot"), swatches(theme, n_roles, scope), curves))

    resources = files("realrl.report")
    parts = {
        "TITLE": escape(data["title"]),
        "STYLE": both_modes(style),
        "PICTURES": "".join(f'<div class="graph" id="graph{i}" hidden>{one}</div>' for i, one in enumerate(pictures)),
        "OWN": resources.joinpath("page.css").read_text(encoding="utf-8"),
        "CURVES": resources.joinpath("page.curves.js").read_text(encoding="utf-8"),
        "TABLES": resources.joinpath("page.tables.js").read_text(encoding="utf-8"),
        "SAMPLES": resources.joinpath("page.samples.js").read_text(encoding="utf-8"),
        "TIMES": resources.joinpath("page.times.js").read_text(encoding="utf-8"),
        "DATA": data_text(data),
    }
    return filled(resources.joinpath("page.html").read_text(encoding="utf-8"), parts, connects=live)


def _title(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    experiments = list(dict.fromkeys(run.experiment or "unknown" for run in runs))
    if len(runs) == 1:
        return _cut(f"{experiments[0]}: {names[0]}")
    return _cut(f"{len(runs)} runs of {', '.join(experiments[:4])}{', ...' if len(experiments) > 4 else ''}")


def _headlines(metrics: Collection[str]) -> list[str]:
    """Return the metrics that most people ask for; those of the console come first where an algorithm lacks these."""
    known = [name for name in _HEADLINES if name in metrics]
    told = headline_metrics(dict.fromkeys(sorted(metrics), 0.0))
    return list(dict.fromkeys((*(told if set(told).isdisjoint(known) else ()), *known)))


def _shown_first(headlines: Sequence[str], metrics: Collection[str]) -> list[str]:
    """Return the metrics above all others: those that most people ask for, and memory."""
    memory = [_FULLEST] if _FULLEST in metrics else []
    return [*(headlines or [name for name in metrics if name != _FULLEST])[: _MOST_HEADLINES - len(memory)], *memory]


def _run(run: RunFolder, name: str, rows: Sequence[Mapping[str, Any]], grid: Grid) -> dict[str, Any]:
    """Return what the table of runs says of a run, and its scales of time and tokens."""
    seconds = [row["time_s/step"] for row in rows if "time_s/step" in row]
    memory = [value for row in rows for key, value in row.items() if key.startswith(_MEMORY)]
    steps = run.settings.get("steps")
    return {
        "name": name,
        "path": _cut(str(run.path)),
        "experiment": _cut(run.experiment),
        "seed": run.settings.get("seed") if isinstance(run.settings.get("seed"), int) else None,
        "state": _cut(run.state),
        "live": run.is_live,
        "done": run.last_step,
        "steps": steps if isinstance(steps, int) else None,
        "seconds": rounded(sum(seconds)),
        "step_s": rounded(median(seconds)) if seconds else None,
        "tokens_per_s": _rate(rows, seconds),
        "memory_gb": rounded(max(memory, default=None)),
        "attempts": attempts_of(run.path),
        "at": {"seconds": totals_of(rows, grid, "time_s/step"), "tokens": totals_of(rows, grid, "n_tokens")},
    }


def _rate(rows: Sequence[Mapping[str, Any]], seconds: Sequence[float]) -> float | None:
    tokens = sum(row["n_tokens"] for row in rows if "n_tokens" in row and "time_s/step" in row)
    return rounded(tokens / sum(seconds)) if tokens and sum(seconds) > 0 else None


def _samples(runs: Sequence[RunFolder], budget: Budget) -> list[list[dict[str, Any]]]:
    with_samples = max(1, sum(bool(run.samples) for run in runs))
    shown = min(with_samples, max(1, budget.samples // _LEAST_SAMPLES))
    n, n_bytes, found = budget.samples // shown, budget.sample_bytes // shown, list[list[dict[str, Any]]]()
    for run in runs:
        is_shown = run.samples and sum(map(bool, found)) < shown
        found.append(shown_samples(choose_samples(run.samples, n), n_bytes, run.samples) if is_shown else [])
    return found


def _times(run: RunFolder, budget: Budget, n_runs: int) -> dict[str, Any]:
    n = min(n_runs, _MOST_TIMES)
    trace = read_trace(run.path, budget.trace_bytes // n)
    seconds = {
        name.removeprefix("time_s/"): rounded(median(values))
        for name in dict.fromkeys(key for row in run.rows for key in row if key.startswith("time_s/"))
        if (values := [row[name] for row in run.rows if name in row])
    }
    return {
        "use": _with_short_texts(time_use(trace)),
        "last": _with_short_texts(last_steps(trace, budget.bars // n)),
        "whole": trace.is_whole,
        "median": seconds,
    }


def _plans(runs: Sequence[RunFolder]) -> tuple[list[dict[str, Any] | None], list[str], int]:
    """Return what is known of each run's plan, the pictures that they refer to, and the number of roles."""
    pictures: list[str] = []
    known: dict[str, dict[str, Any]] = {}
    most_roles = 8
    found: list[dict[str, Any] | None] = []
    for run in runs[:_MOST_TIMES]:
        same = {key: value for key, value in run.settings.items() if key not in ("seed", "run_dir", "resume")}
        key = json.dumps(same, sort_keys=True)
        if key not in known:
            plan = plan_of(run)
            entry: dict[str, Any] = {"reason": _cut(plan.reason), "picture": None, "calls": {}, "roles": []}
            if plan.plan is not None:
                entry["calls"], entry["roles"] = calls_of(plan.plan), roles_in_order(plan.plan)
                most_roles = max(most_roles, len(entry["roles"]))
                names = [f"time_s/{call}" for call in entry["calls"]]
                step_s = {
                    name.removeprefix("time_s/"): median(values)
                    for name in names
                    if (values := [row[name] for row in run.rows if name in row])
                }
                if len(pictures) < _MOST_PICTURES:
                    entry["picture"] = len(pictures)
                    pictures.append(picture_of(plan.plan, step_s))
            known[key] = entry
        found.append(known[key])
    return found, pictures, most_roles


def _settings(flats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that differ, run by run, and all settings of the first run."""
    paths = [path for path in differing(flats) if path != "run_dir"] if len(flats) > 1 else []
    short = short_paths(paths)
    return {
        "differences": [
            [path, short[path], [_cut(shown(flat[path])) if path in flat else "" for flat in flats]]
            for path in paths[: max(4, _MOST_CELLS // len(flats))]
        ],
        "settings": [[_cut(path), _cut(shown(value))] for path, value in (flats[0] if flats else {}).items()],
    }


def _with_fewer_metrics(runs: list[list[dict[str, Any]]], budget: Budget) -> tuple[list[list[dict[str, Any]]], str]:
    """Return rows with the main metrics alone if there are too many curves for a page, and a sentence about it."""
    if sum(len(names_of([rows])) for rows in runs) * LEAST_BUCKETS <= budget.numbers:
        return runs, ""
    found = {name for rows in runs for name in names_of([rows])}
    kept = {"step", "n_tokens", "time_s/step", *_shown_first(_headlines(found), found)}
    fewer = [[{key: value for key, value in row.items() if key in kept} for row in rows] for rows in runs]
    return fewer, "The curves of so many runs would not fit: those of the main metrics are shown."


def _with_fewer_memory_curves(rows: Sequence[Mapping[str, Any]], n_runs: int) -> list[dict[str, Any]]:
    """Return rows with the memory of the fullest worker, beside that of each worker where these are few."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith(_MEMORY))
    keeps = n_runs == 1 and 1 < len(names) <= _MOST_MEMORY_CURVES
    found = []
    for row in rows:
        memory = [row[name] for name in names if name in row]
        kept = {key: value for key, value in row.items() if keeps or key not in names}
        found.append({**kept, **({_FULLEST: max(memory)} if memory else {})})
    return found


def _with_short_texts(value: Any) -> Any:
    """Return JSON whose texts are short."""
    if isinstance(value, dict):
        return {_cut(str(key), 100): _with_short_texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_short_texts(inner) for inner in value]
    return _cut(value, 100) if isinstance(value, str) else value


def _cut(text: str, most_chars: int = _TEXT_CHARS) -> str:
    return text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"

"""A sweep from its command line to its table: checks, runs, what became of each, one report."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.cli import COMMANDS, main
from realrl.cli.console import print_table
from realrl.cli.sweep.jobs import CONSOLE_FILE, Job, JobEnded, Jobs
from realrl.cli.sweep.points import Point, multiply
from realrl.config.secrets import masked_argument
from realrl.errors import Error, UsageError
from realrl.files import read_input, write_output

if TYPE_CHECKING:
    from realrl.config.schema import RunConfig

SWEEP_FILE = "sweep.json"
REPORT_FILE = "report.html"
_METRICS_FILE = "metrics.jsonl"
_ERROR = re.compile(r"^(?:realrl: )?error: (.*)$", re.MULTILINE)
_MAX_REASON_CHARS = 100

Check = Callable[[Sequence[str]], "RunConfig"]


@dataclass
class _Sweep:
    """A sweep's folder and points; what became of each is in its file."""

    folder: Path
    name: str
    points: list[Point]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # point -> words, exit_code, seconds, values

    def folder_of(self, point: Point) -> Path:
        return self.folder / point.name

    def is_done(self, point: Point) -> bool:
        """Return True if a run of an earlier sweep with the same overrides is complete."""
        known = self.results.get(point.name)
        if known is None or known["overrides"] != _masked(point.overrides):
            return False
        if known["exit_code"] is not None:
            return bool(known["exit_code"] == 0)
        from realrl.runtime.checkpoints.store import CHECKPOINTS, load_manifest

        with suppress(Error):  # the sweep was killed before it saw the end
            return load_manifest(self.folder_of(point) / CHECKPOINTS / "latest").is_last
        return False

    def note(self, point: Point, exit_code: int | None = None, seconds: float = 0.0) -> None:
        """Write down a start, or an end."""
        told = {"values": dict(zip(point.values, _values(point))), "overrides": _masked(point.overrides)}
        self.results[point.name] = {**told, "exit_code": exit_code, "seconds": round(seconds, 1)}
        content = json.dumps({"experiment": self.name, "points": self.results}, indent=1).encode()
        temporary = self.folder / f".{SWEEP_FILE}.new"
        write_output(temporary, content + b"\n")
        os.replace(temporary, self.folder / SWEEP_FILE)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sweep to those of ``realrl run``."""
    parser.add_argument("--sweep", action="store_true", help="a run for each combination of values: seed=1,2,3")
    parser.add_argument("--jobs", metavar="N", type=int, help="with --sweep: so many at a time; default: CUDA devices")


def sweep(name: str, overrides: Sequence[str], check: Check, options: argparse.Namespace) -> int:
    """Run every point of a sweep; return 0, 1 if some failed, or 128 and the signal that ended it.

    Args:
        name: the experiment as the user named it.
        check: makes the configuration of one run from its overrides, and raises what would refuse it.
        options: those of ``realrl run``; without --jobs as many runs go on at a time as CUDA devices allow, or one.

    Raises:
        UsageError: the sweep or a point of it is wrong, or its folder holds other results; nothing was started.
    """
    if not options.sweep:
        raise UsageError("--jobs is for sweeps", remedy="Add --sweep.")
    if options.hardware is not None:
        raise UsageError("--hardware: a sweep takes the machine that it is on", remedy="Leave it out.")
    own = [word for word in overrides if word.lstrip("+").partition("=")[0] not in ("run_dir", "resume")]
    points = multiply(own)
    configs = _checked(points, [word for word in overrides if word not in own], check)
    slots = _slots(configs, options.jobs)
    if options.dry_run:
        _print_points(points, [""] * len(points))
        print(f"{len(points)} runs, {len(slots)} at a time. Nothing was started; leave out --dry-run to run this.")
        return 0
    plan = _open(name, points, configs[0])
    waiting = [number for number, point in enumerate(points) if not plan.is_done(point)]
    told = f", {len(points) - len(waiting)} of them done before" if len(waiting) < len(points) else ""
    print(f"sweep of {len(points)} runs{told}, {len(slots)} at a time, in {plan.folder}", flush=True)
    runner = Jobs(slots)
    for event in runner.run([_job(plan, name, number) for number in waiting]):
        _tell(plan, event)
    results = [_result(plan, point) for point in points]
    print()
    _print_points(points, results)
    if "report" in COMMANDS and any((plan.folder_of(point) / _METRICS_FILE).exists() for point in points):
        main(["report", str(plan.folder), "--out", str(plan.folder / REPORT_FILE)])
    n_failed = sum(plan.results.get(point.name, {}).get("exit_code") not in (0, None) for point in points)
    if runner.received is not None:
        words = [masked_argument(word) for word in own]
        again = shlex.join(["realrl", "run", name, *words, _run_dir(plan.folder), "resume=auto", "--sweep"])
        print(f"realrl: interrupted by {signal.Signals(runner.received).name}; continue with: {again}", file=sys.stderr)
        return 128 + runner.received
    return 1 if n_failed else 0


def _checked(points: Sequence[Point], shared: Sequence[str], check: Check) -> list[RunConfig]:
    """Return the configurations of all points, with overrides that concern the whole sweep.

    Raises:
        UsageError: the first that is refused, with its point.
    """
    configs = []
    for point in points:
        try:
            configs.append(check((*point.overrides, *shared)))
        except UsageError as error:
            raise UsageError(f"point {_title(point)}: {error.message}", remedy=error.remedy) from error
    for config, point in zip(configs, points):
        if config.is_on_machines:
            raise UsageError(
                f"point {_title(point)}: launcher={config.launcher}: the runs of a sweep are on this machine",
                remedy="Leave it out, or start a run for each point, with machines of its own.",
            )
    if configs[0].resume not in ("never", "auto"):
        raise UsageError(
            f"resume={configs[0].resume}: a sweep continues its own runs", remedy="Use resume=auto, or leave it out."
        )
    return configs


def _slots(configs: Sequence[RunConfig], jobs: int | None) -> list[dict[str, str]]:
    """Return the environment of each of the runs that go on at a time: CUDA devices, or threads, of their own."""
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least one run goes on at a time", remedy="Give 1 or more.")
    from realrl.runtime.launchers.base import threads_per_worker
    from realrl.runtime.processes.machine import VISIBLE, accelerators, on_machine

    found = accelerators()
    settled = [on_machine(config, found)[0].cluster for config in configs]
    if all(cluster.device == "cuda" for cluster in settled):
        needed = max(cluster.n_needed_per_node for cluster in settled)
        given = [word.strip() for word in os.environ.get(VISIBLE, "").split(",") if word.strip()]
        devices = given[: found.count] or [str(index) for index in range(found.count)]
        n_jobs = jobs or max(1, len(devices) // needed)
        if n_jobs > 1 and n_jobs * needed > len(devices):
            message = f"--jobs {n_jobs}: runs on {needed} CUDA devices each, and there are {len(devices)}"
            raise UsageError(message, remedy=f"The most is --jobs {max(1, len(devices) // needed)}.")
        groups = [devices[place * needed : (place + 1) * needed] for place in range(min(n_jobs, len(configs)))]
        return [{VISIBLE: ",".join(group)} if n_jobs > 1 else {} for group in groups]
    n_jobs = min(jobs or 1, len(configs))
    n_workers = max(cluster.n_nodes * cluster.n_devices_per_node for cluster in settled)
    threads = {"OMP_NUM_THREADS": str(threads_per_worker(n_jobs * n_workers))}
    return [threads if n_jobs > 1 and "OMP_NUM_THREADS" not in os.environ else {}] * n_jobs


def _open(name: str, points: list[Point], config: RunConfig) -> _Sweep:
    """Make the folder of a sweep, or read what became of its points before.

    Raises:
        UsageError: it holds something else, or the user does not want to continue it.
    """
    stem = Path(name).stem
    folder = Path(config.run_dir or f"runs/{stem}/sweep_{datetime.now().strftime('%Y-%m-%d_%H-%M-%S')}").absolute()
    plan = _Sweep(folder, name, points)
    file = folder / SWEEP_FILE
    if file.exists():
        if config.resume != "auto":
            message = f"run_dir={folder} holds the results of an earlier sweep"
            raise UsageError(message, remedy="Continue it with resume=auto, or choose another folder.")
        try:
            plan.results = json.loads(read_input(file))["points"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{file} is not what a sweep wrote: {error}"
            raise UsageError(message, remedy="Remove it; runs that are complete then count as failed.") from error
    elif folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"run_dir={folder} holds something else than a sweep", remedy="Choose another folder.")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        message = f"run_dir={folder} cannot be made: {error.strerror}"
        raise UsageError(message, remedy="Choose another folder with run_dir=PATH.") from error
    return plan


def _job(plan: _Sweep, name: str, number: int) -> Job:
    point = plan.points[number]
    folder = plan.folder_of(point)
    return Job(number, ("run", name, *point.overrides, _run_dir(folder), "resume=auto"), folder)


def _run_dir(folder: Path) -> str:
    """Return the override that names a folder, with quotes where Hydra's grammar wants them."""
    if re.fullmatch(r"[\w/.+-]+", str(folder), re.ASCII):
        return f"run_dir={folder}"
    text = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"run_dir='{text}'"


def _tell(plan: _Sweep, event: Job | JobEnded) -> None:
    """Write a start or an end down, and tell the user."""
    job = event if isinstance(event, Job) else event.job
    point = plan.points[job.number]
    title = f"[{job.number + 1}/{len(plan.points)}] {_title(point)}"
    if isinstance(event, Job):
        plan.note(point)
        print(f"{title}: started, {job.folder / CONSOLE_FILE}", flush=True)
        return
    plan.note(point, event.exit_code, event.seconds)
    print(f"{title}: {_result(plan, point)}", flush=True)


def _result(plan: _Sweep, point: Point) -> str:
    """Return what became of a point, in one line."""
    known = plan.results.get(point.name)
    code = None if known is None else known["exit_code"]
    if known is None or code is None:
        return "not run" if known is None else "not finished"
    if code == 0:
        from realrl.runtime.output.progress import headline_metrics

        metrics = _last_metrics(plan.folder_of(point))
        names = [name for name in metrics if name.startswith("eval/") and name.endswith(("/mean", "accuracy", "loss"))]
        shown = [f"{name} {metrics[name]:.4g}" for name in (*headline_metrics(metrics), *names[:2])]
        return "  ".join([f"done in {known['seconds']:.0f} s", *shown])
    if code < 0 or code > 128:
        return f"interrupted by {signal.Signals(-code if code < 0 else code - 128).name}"
    reason = _ERROR.findall(_console(plan.folder_of(point)))
    return f"failed with exit code {code}: {reason[-1][:_MAX_REASON_CHARS] if reason else 'see ' + CONSOLE_FILE}"


def _last_metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of the last whole line; empty if there is none."""
    try:
        line = read_input(folder / _METRICS_FILE).split(b"\n")[-2]
        return {name: value for name, value in json.loads(line).items() if isinstance(value, int | float)}
    except (OSError, ValueError, IndexError, AttributeError):
        return {}


def _console(folder: Path) -> str:
    try:
        return read_input(folder / CONSOLE_FILE).decode(errors="replace")
    except OSError:
        return ""


def _print_points(points: Sequence[Point], results: Sequence[str]) -> None:
    keys = list(points[0].values)
    rows = [(str(n), *_values(point), result) for n, (point, result) in enumerate(zip(points, results), 1)]
    if any(results):
        print_table(("", *keys, "result"), rows, folding=("result",))
    else:
        print_table(("", *keys), [row[:-1] for row in rows])


def _title(point: Point) -> str:
    return " ".join(f"{key}={value}" for key, value in zip(point.values, _values(point)))


def _values(point: Point) -> list[str]:
    """Return the values of a point without secrets."""
    return [masked_argument(f"{key}={value}").partition("=")[2] for key, value in point.values.items()]


def _masked(overrides: Sequence[str]) -> list[str]:
    return [masked_argument(word) for word in overrides]

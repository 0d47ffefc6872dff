"""Options of ``realrl fuse``, the search, and what is printed and written."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from realrl.cli.console import print_table
from realrl.cli.machines import settled_for
from realrl.errors import UsageError
from realrl.files import read_input, why_no_output, write_output

if TYPE_CHECKING:
    import argparse

    from realrl.config.schema import RunConfig
    from realrl.experiment.declaration import Experiment
    from realrl.experiment.run_plan import RunPlan
    from realrl.fusion.search import Fused, Progress
    from realrl.plan.fusion.instance import Instance
    from realrl.plan.fusion.schedule import FusedSchedule

EXAMPLES = """\
examples:
  realrl fuse configs/fusion/rlhfuse_row_1.yaml          the numbers of a file
  realrl fuse FILE.yaml --seconds 60 --page fused.html   a page with drawings; .svg is the schedule alone
  realrl fuse FILE.yaml --memory-cap 15.6 --out fused.json     the schedule, for other programs
  realrl fuse FILE.yaml --start fused.json --seconds 600       go on from a schedule found before
  realrl fuse FILE.yaml --pareto                         less memory for more time
  realrl fuse ppo preset=tiny cluster.n_devices_per_node=4 allocation=pipeline --hardware two_cores

For an experiment, the calls that train and their times come from its plan and the model of costs; see realrl simulate.
Ctrl-C ends the search with the best schedule so far. The same --seed with the same --rounds finds the same schedule.
"""
_PAGE, _PICTURE = ".html", ".svg"
_MOST_SECONDS = 86400.0
_SERIAL = "serial"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--seconds", metavar="S", type=float, default=10.0, help="time to search; default: 10")
    add("--rounds", metavar="N", type=int, help="rounds of the search, in the place of a time")
    add("--processes", metavar="N", type=int, help="processes that search; default: one a core")
    add("--seed", metavar="N", type=int, default=0, help="of the search; default: 0")
    add("--memory-cap", metavar="X", type=float, help="the most activations that each device may hold")
    add("--enough", metavar="X", help="end once the latency is the bound and no device holds more; or: serial")
    add("--pareto", action="store_true", help="look for schedules with less memory and more time, too")
    add("--start", metavar="FILE", help="a schedule to begin with, of as many micro-batches or fewer")
    add("--calls", metavar="NAME,NAME", help="train calls of the experiment; default: all")
    add("--hardware", metavar="FILE", help="of an experiment: the machine, a name of configs/hardware or a file")
    add("--lengths", metavar="FILE", help="of an experiment: lengths of prompts and responses")
    add("--out", metavar="FILE", help="write the schedule there, as JSON")
    add("--page", metavar="FILE", help="write a page, or with .svg a picture of the schedule")


def fuse_file(options: argparse.Namespace) -> int:
    """Fuse the models of a file.

    Raises:
        UsageError: the file or an option cannot be used.
    """
    from realrl.fusion.instance_file import read_instance

    name, *more = options.arguments
    if more:
        raise UsageError(f"{more[0]}: a file of models has no settings", remedy="Change the file.")
    for option in ("calls", "hardware", "lengths"):
        if getattr(options, option) is not None:
            raise UsageError(f"--{option} has no effect with {name}", remedy="Leave it out.")
    _check(options)
    return _fuse(read_instance(name), options, title=Path(name).stem, notes=(f"times and memory as in {name}",))


def fuse_run(
    experiment: Experiment,
    config: RunConfig,
    options: argparse.Namespace,
    *,
    make_plan: Callable[[Experiment, RunConfig], RunPlan],
) -> int:
    """Fuse the train calls of a run.

    Raises:
        UsageError: they cannot be fused, or an option cannot be used.
    """
    from realrl.doctor.memory import machine_kernels
    from realrl.fusion.from_plan import instance_of, pair_of
    from realrl.planner.modelled import described, draw_of, hardware_for

    _check(options)
    config = settled_for(config, options.hardware)
    plan = make_plan(experiment, config)
    pair = pair_of(plan, [] if options.calls is None else options.calls.split(","))
    machine = hardware_for(plan.config, options.hardware)
    draw, assumed = draw_of(plan, options.lengths)
    instance = instance_of(plan, pair, machine, machine_kernels, draw)
    notes = ("seconds of a minibatch, and bytes", described(plan.config, machine), *assumed)
    title = f"{experiment.name}: {' and '.join(mfc.name for mfc in pair)}"
    return _fuse(instance, options, title=title, notes=notes)


def _check(options: argparse.Namespace) -> None:
    """Refuse options before anything is computed."""
    if not 0 < options.seconds <= _MOST_SECONDS:
        raise UsageError(f"--seconds {options.seconds:g} is no time to search", remedy="Give up to 86400 seconds.")
    for name, least in (("rounds", 0), ("processes", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} {value} is too few", remedy=f"Give {least} or more.")
    if options.memory_cap is not None and not 0 <= options.memory_cap < math.inf:
        raise UsageError(
            f"--memory-cap {options.memory_cap:g} is no size", remedy="Give it in the unit of activations."
        )
    _check_enough(options)
    if options.page is not None and Path(options.page).suffix.lower() not in (_PAGE, _PICTURE):
        raise UsageError(
            f"--page {options.page}: a page is HTML", remedy=f"Give a file that ends in {_PAGE} or {_PICTURE}."
        )
    for option, path in (("--out", options.out), ("--page", options.page)):
        if path is None:
            continue
        reason = why_no_output(Path(path))
        if not reason and not Path(path).absolute().parent.is_dir():
            reason = "its folder does not exist"
        if reason:
            raise UsageError(f"{option} {path} cannot be written: {reason}", remedy="Choose another file.")


def _check_enough(options: argparse.Namespace) -> None:
    if options.enough is None:
        return
    if options.pareto:
        raise UsageError("--enough ends a search that --pareto lets go on", remedy="Leave one of them out.")
    if options.enough == _SERIAL:
        return
    try:
        is_size = 0 <= float(options.enough) < math.inf
    except ValueError:
        is_size = False
    if not is_size:
        raise UsageError(
            f"--enough {options.enough} is no size",
            remedy=f"Give it in the unit of activations, or {_SERIAL}: the peak of 1F1B in series.",
        )


def _start(path: str) -> FusedSchedule:
    """Read the schedule to begin with."""
    from realrl.plan.fusion.schedule_file import read_schedule

    try:
        text = read_input(path).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--start {path} cannot be read: {reason}", remedy="Name a file of --out.") from error
    return read_schedule(text, where=path)


def _enough(instance: Instance, options: argparse.Namespace) -> float | None:
    """Return the peak that is enough; None: the least possible."""
    from realrl.plan.fusion.baselines import serial

    if options.enough is None:
        return None
    return serial(instance).peak if options.enough == _SERIAL else float(options.enough)


def _fuse(instance: Instance, options: argparse.Namespace, *, title: str, notes: Sequence[str]) -> int:
    from realrl.fusion.comparison import COLUMNS, compare
    from realrl.fusion.compiled import kernels
    from realrl.fusion.drawing import schedule_svg
    from realrl.fusion.page import render_page
    from realrl.fusion.search import Limits, ScheduleSearch
    from realrl.plan.fusion.schedule_file import schedule_text

    if options.memory_cap is not None:
        instance = instance.with_caps(options.memory_cap)
    search = ScheduleSearch(instance, seed=options.seed, pareto=options.pareto)
    if options.start is not None:
        search.begin_with(_start(options.start), where=options.start)
    print(f"{title}: {len(instance.pipelines)} pipelines on {instance.n_devices} devices, {instance.n_tasks} tasks")
    for note in notes:
        print(note)
    _, why_not = kernels()
    if why_not:
        print(f"the search is not compiled and slow: {why_not}")
    limits = Limits(
        seconds=options.seconds if options.rounds is None else math.inf,
        n_rounds=options.rounds,
        peak=_enough(instance, options),
        n_processes=options.processes or len(os.sched_getaffinity(0)),
    )
    with _ctrl_c_raises():
        found = search.run(limits, report=_report)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    comparison, schedule = compare(found), found.schedule
    print()
    print_table(COLUMNS, comparison.rows())
    _print_proof(found)
    if options.pareto:
        print()
        rows = [(f"{s.latency:.6g}", f"{s.peak:.6g}", f"{s.bubble_share:.1%}") for s in found.front]
        print_table(("latency", "highest peak", "bubbles"), rows, title="latency against memory")
    if options.out is not None:
        _write("--out", options.out, schedule_text(schedule))
    if options.page is not None:
        is_picture = Path(options.page).suffix.lower() == _PICTURE
        _write(
            "--page",
            options.page,
            schedule_svg(schedule, title) if is_picture else render_page(comparison, title, notes),
        )
    return 0


@contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """Let Ctrl-C raise, for a search that ends with what it has found; before and after, it ends the command."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _print_proof(found: Fused) -> None:
    """Print how good the schedule is, and how the search went."""
    from realrl.plan.fusion.robustness import slow_down

    gap, jitter = found.schedule.latency / found.bound, slow_down(found.schedule)
    of_least = f"at most {gap:.3f} times the least possible" if gap > 1 + 1e-9 else "the least possible"
    print(f"the latency is {of_least}")
    print(f"if tasks take up to 20% less or more, it is {jitter.mean:.3f} times as long, at worst {jitter.worst:.3f}")
    ended = "was stopped" if found.was_stopped else "ended"
    print(f"the search {ended} after {found.n_rounds} rounds and {found.seconds:.1f} s")


def _report(progress: Progress) -> None:
    """Show in a terminal where the search stands."""
    if sys.stderr.isatty():
        figures = f"latency {progress.latency:.6g}, bound {progress.bound:.6g}, peak {progress.peak:.6g}"
        text = f"{progress.seconds:.0f} s: {figures}"
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _write(option: str, path: str, text: str) -> None:
    try:
        write_output(path, text.encode())
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror or error}") from error
    print(f"wrote {path}")

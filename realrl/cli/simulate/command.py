"""``realrl simulate``: a run on a modelled cluster, or with the durations of a recorded one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from realrl.cli.machines import settled_for
from realrl.cli.plan_questions import add_page, check_page, write_page
from realrl.cli.simulate.view import print_comparison, print_figures, print_recovery
from realrl.errors import ConfigError, UsageError, counted
from realrl.files import read_input

if TYPE_CHECKING:
    import argparse

    from realrl.config.schema import RunConfig
    from realrl.experiment.declaration import Experiment
    from realrl.experiment.run_plan import RunPlan
    from realrl.planner.page.render import PageContent
    from realrl.sched.events import RankSpan
    from realrl.sched.master.master_plan import MasterPlan
    from realrl.sim.cluster import SimulatedRun
    from realrl.sim.durations import Durations, SampleSizes

DEFAULT_STEPS = 5
_METRICS, _TRACE, _CONFIG = "metrics.jsonl", "trace.json", "config.json"
_SAME = ("precision", "n_seqs", "n_mbs", "max_tokens_per_mb", "dataset", "models", "generation", "algorithm", "calls",
         "allocation", "cluster")  # fmt: skip
_EVALUATIONS = ("eval.every_steps", "eval.at_start")
_MAY_DIFFER = (
    "allocation.overlap",
    "cluster.worker_timeout_s",
    "cluster.collective_timeout_s",
    "cluster.master_port",
    "cluster.hardware",
    "cluster.device_memory_gb",
)


@dataclass(frozen=True)
class Recording:
    """A run's folder: its settings as JSON and as values, the lines of its metrics by step, its spans."""

    folder: Path
    config: bytes
    settings: Mapping[str, object]
    metrics: Mapping[int, Mapping[str, float]]
    spans: tuple[RankSpan, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--hardware", metavar="FILE", help="the machine: a name of configs/hardware, or a file")
    add("--lengths", metavar="FILE", help="lengths of prompts and responses: a file, or a distribution")
    add("--steps", metavar="N", type=int, help=f"steps to simulate; default: {DEFAULT_STEPS}, or those of --against")
    add("--against", metavar="RUN", help="take durations from a run's folder, unless --hardware is given, and compare")
    add("--slow", metavar="RANK=FACTOR", action="append", default=[], help="a device that takes FACTOR times as long")
    add("--kill", metavar="RANK@SECONDS", action="append", default=[], help="a worker dies; the run recovers from it")
    add("--out", metavar="DIR", help="write metrics.jsonl and trace.json there, as a run would")
    add_page(parser)


def read_recording(folder: str) -> Recording:
    """Read the folder of a run.

    Raises:
        ConfigError: it lacks a file of a run, or one cannot be understood.
    """
    from realrl.config.serialize import with_paths_of
    from realrl.sim.replay import read_trace

    path = Path(folder)
    contents = {}
    for name in (_CONFIG, _METRICS, _TRACE):
        try:
            contents[name] = read_input(path / name)
        except OSError as err:
            raise ConfigError(
                f"--against {folder}: {name} cannot be read: {err.strerror}", remedy="Give the run_dir of a run."
            ) from err
    try:
        rows = [json.loads(line) for line in contents[_METRICS].decode().splitlines()]
        metrics = {int(row["step"]): row for row in rows if "time_s/step" in row}
        spans = read_trace(contents[_TRACE].decode())
        config = with_paths_of(contents[_CONFIG])
        settings = dict(json.loads(config))
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(f"--against {folder}: {_CONFIG}, {_METRICS} or {_TRACE} is damaged: {err}") from err
    if not metrics:
        raise ConfigError(f"--against {folder}: no step of it was completed", remedy="Give the folder of a longer run.")
    return Recording(path, config, settings, metrics, spans)


def refuse_other_run(recording: Recording, config: RunConfig, master_plan: MasterPlan) -> None:
    """Refuse a recording whose settings, calls or devices differ from this run's, as far as durations depend on them.

    Raises:
        ConfigError: names the first difference.
    """
    from realrl.config.serialize import flattened, recorded_config, with_paths_of
    from realrl.sim.replay import check_recording

    here, there = json.loads(with_paths_of(recorded_config(config, os.getcwd()))), recording.settings
    source = f"--against {recording.folder}"
    if here["experiment"] != there.get("experiment"):
        its = there.get("experiment")
        raise ConfigError(
            f"{source} is a run of '{its}', not of '{here['experiment']}'",
            remedy=f"Simulate that one: 'realrl simulate {its} {source}'.",
        )

    def refuse(keys: Iterable[str], sections: Sequence[str]) -> None:
        ours, theirs = (flattened({key: values.get(key) for key in sections}) for values in (here, there))
        for key in keys or sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key) and key not in _MAY_DIFFER:
                raise ConfigError(
                    f"{source} was run with {key}={theirs.get(key)}, and this is {key}={ours.get(key)}",
                    remedy=f"Give the settings of the run, or none: 'realrl simulate {here['experiment']} {source}'.",
                )

    refuse(_EVALUATIONS, ("eval",))  # which are calls of their own: first, since the graphs differ, too
    check_recording(master_plan, recording.spans, source)
    refuse((), _SAME)


def parse_slow(texts: Sequence[str], n_ranks: int) -> dict[int, float]:
    """Return rank -> factor.

    Raises:
        UsageError: a text has another form, or names no rank of the run.
    """
    return _parse_pairs("--slow", texts, "=", n_ranks, "1=1.5: device 1 takes 1.5 times as long")


def parse_kill(texts: Sequence[str], n_ranks: int) -> dict[int, float]:
    """Return rank -> seconds after the start.

    Raises:
        UsageError: a text has another form, or names no rank of the run.
    """
    return _parse_pairs("--kill", texts, "@", n_ranks, "1@30: worker 1 dies 30 s after the start")


def _parse_pairs(option: str, texts: Sequence[str], separator: str, n_ranks: int, example: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for text in texts:
        first, _, second = text.partition(separator)
        try:
            rank, value = int(first), float(second)
        except ValueError:
            rank, value = -1, math.nan
        if not 0 < value < math.inf or rank < 0:
            raise UsageError(f"{option} {text} is not understood", remedy=f"Write {option} {example}.")
        if rank >= n_ranks:
            raise UsageError(f"{option} {text}: the run has the ranks 0 to {n_ranks - 1}")
        found[rank] = value
    return found


def write_run(folder: str, attempts: Sequence[SimulatedRun]) -> None:
    """Write the files of a run; a step that was done twice is there once.

    Raises:
        ConfigError: something is there already.
    """
    from realrl.runtime.output.metrics import JsonlSink
    from realrl.runtime.output.trace import TraceWriter

    path = Path(folder)
    for name in (_METRICS, _TRACE):
        if (path / name).exists():
            raise ConfigError(f"--out {folder} holds {name} already", remedy="Choose another folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        sink, trace = JsonlSink(path / _METRICS), TraceWriter(path / _TRACE, start_s=0.0)
    except OSError as err:
        raise ConfigError(f"--out {folder} cannot be written: {err.strerror}", remedy="Choose another folder.") from err
    for attempt in attempts:
        if attempt.steps:
            sink.begin_after(attempt.steps[0].report.step - 1)
        for step in attempt.steps:
            sink.write(step.report.step, step.report.epoch, step.report.metrics)
            for item in step.report.spans:
                trace.spans(item.rank, [item.span])
        for item in attempt.spans:
            trace.spans(item.rank, [item.span])
    sink.close()
    trace.close()


def _durations_of(
    plan: RunPlan, recording: Recording | None, options: argparse.Namespace
) -> tuple[Durations, Callable[[str], SampleSizes], tuple[str, ...]]:
    """Return durations, lengths of samples, and assumptions: a machine's if one is named, else those of the recording.

    Raises:
        UsageError: an option cannot be used.
    """
    from realrl.doctor.memory import machine_kernels
    from realrl.planner.modelled import costs_of, described, draw_of, hardware_for
    from realrl.sim.replay import Recorded

    recorded = None if recording is None else Recorded(recording.spans)
    if recorded is not None and options.hardware is None:
        if options.lengths is not None:
            raise UsageError(
                "--lengths has no effect with --against alone, which takes the durations of a run",
                remedy="Name a machine with --hardware.",
            )
        return recorded, recorded.draw, ()
    machine = hardware_for(plan.config, options.hardware)
    draw, assumed = draw_of(plan, options.lengths)
    durations, named = costs_of(plan, machine, machine_kernels), described(plan.config, machine)
    if recorded is not None and options.lengths is None:
        return durations, recorded.draw, (named, "prompts and responses as long as the run's mean")
    return durations, draw, (named, *assumed)


def _page_of(plan: RunPlan, run: SimulatedRun, options: argparse.Namespace, notes: Sequence[str]) -> PageContent:
    """Return what a page tells of a run; a replay has no machine that is described, and so no memory."""
    from realrl.doctor.memory import machine_kernels
    from realrl.planner.modelled import hardware_for
    from realrl.planner.page.content import memory_of
    from realrl.planner.page.render import PageContent

    if options.against is not None and options.hardware is None:
        return PageContent(plan, run, (f"with the durations of {options.against}", *notes))
    memory = memory_of(plan, hardware_for(plan.config, options.hardware), machine_kernels)
    return PageContent(plan, run, notes, memory)


def simulate_run(
    experiment: Experiment,
    config: RunConfig,
    options: argparse.Namespace,
    *,
    make_plan: Callable[[Experiment, RunConfig], tuple[RunPlan, MasterPlan]],
) -> int:
    """Simulate, print what was found, and write it where that is wanted.

    Args:
        make_plan: plans of a run, checked as for a real one.

    Raises:
        UsageError: an option cannot be used.
    """
    from realrl.sim.cluster import simulate
    from realrl.sim.contention import simulate_sharing
    from realrl.sim.costs.calls import CostModel
    from realrl.sim.durations import slowed
    from realrl.sim.replay import dropped_shares
    from realrl.sim.report import compare, figures_of

    if options.steps is not None and options.steps < 1:
        raise UsageError(f"--steps {options.steps}: at least one step is needed")
    check_page(options.page)
    recording = None if options.against is None else read_recording(options.against)
    steps = options.steps or (DEFAULT_STEPS if recording is None else max(recording.metrics))
    config = settled_for(config.model_copy(update={"steps": steps}), options.hardware)
    plan, master_plan = make_plan(experiment, config)
    slow, kill = parse_slow(options.slow, plan.n_workers), parse_kill(options.kill, plan.n_workers)
    if recording is not None:
        refuse_other_run(recording, config, master_plan)
    durations, draw, notes = _durations_of(plan, recording, options)
    dropped = {} if recording is None else dropped_shares(recording.metrics.values())
    device = durations.hardware.device if isinstance(durations, CostModel) else None
    attempts = simulate_sharing(
        lambda some: simulate(master_plan, some, draw, dropped_share=dropped, lost=kill),
        slowed(durations, slow) if slow else durations,
        alone=device.alone if device else 1.0,
        scatter=device.scatter if device and not kill else 0.0,
        node_of=plan.cluster.node_of,
    )
    if options.out is not None:
        write_run(options.out, attempts)
    last = attempts[-1]
    work = f"{counted(steps, 'step')} of {counted(plan.samples_per_step, 'sample')}"
    print(f"{plan.experiment.name}: {work}, {counted(plan.n_workers, 'worker')}")
    for note in notes:
        print(note)
    print()
    print_recovery(attempts)
    if not last.steps:
        print("no step was completed")
        return 1
    print_figures(figures_of(last), last)
    if options.page is not None:
        write_page(options.page, _page_of(plan, last, options, notes))
    if recording is not None and not slow and not kill:
        print_comparison(compare(last, recording.metrics, recording.spans, str(recording.folder)))
    return 0

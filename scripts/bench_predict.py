"""Errors of predicted steps against recorded runs: python scripts/bench_predict.py RUN... --hardware FILE...

A replay takes the durations of the recording, a prediction those of a hardware file, and both the recording's mean
lengths. Of several files a run gets the one whose profile has as many workers. Runs that differ in nothing but cluster
and allocation do the same work; each two of them whose recorded periods differ by more than 20% are a pair to order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import cast

from realrl.cli.console import print_table
from realrl.cli.simulate import Recording, read_recording
from realrl.doctor.memory import decide_overlap, machine_kernels
from realrl.errors import UsageError
from realrl.experiment.discovery import load_run
from realrl.experiment.planning import plan_run
from realrl.plan.hooks import NO_OVERLAP
from realrl.planner.modelled import costs_of
from realrl.profiler.hardware_files import named_hardware
from realrl.runtime.checkpoints.resume import make_master_plan
from realrl.runtime.checkpoints.store import checkpoint_store
from realrl.runtime.processes.machine import accelerators, on_machine
from realrl.sim.cluster import SimulatedRun, simulate
from realrl.sim.contention import simulate_sharing
from realrl.sim.durations import Durations
from realrl.sim.replay import Recorded, check_recording, dropped_shares
from realrl.sim.report import Comparison, compare

REPLAY, MEDIAN, WORST, DIFFERENT, ORDERED = 0.05, 0.15, 0.25, 1.2, 0.9
_NOT_WORK = ("cluster", "allocation", "steps", "run_dir", "launcher", "resume")


@dataclass(frozen=True)
class Result:
    """One run: its name, the settings that its work depends on, and both comparisons."""

    name: str
    work: str
    replay: Comparison
    prediction: Comparison

    @property
    def recorded_s(self) -> float:
        """Median seconds of a recorded step."""
        return self.prediction.period.recorded_s

    @property
    def worst_call(self) -> str:
        """The call that adds the most to the error of the period."""
        calls = self.prediction.calls
        return max(calls, key=lambda name: abs(calls[name].simulated_s - calls[name].recorded_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--hardware", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--calls", action="store_true", help="show every call")
    options = parser.parse_args()
    try:
        results = [examine(folder, options.hardware) for folder in options.runs]
    except UsageError as error:
        raise SystemExit(f"error: {error}") from error
    show_runs(results)
    if options.calls:
        show_calls(results)
    show_summary(results)


def examine(folder: str, files: Sequence[str]) -> Result:
    """Simulate a recorded run with its own durations and with those of a machine."""
    recording = read_recording(folder)
    experiment, config = load_run(recording.config)
    config = config.model_copy(update={"steps": max(recording.metrics)})
    plan = plan_run(on_machine(config, accelerators())[0], experiment)
    overlap = decide_overlap(plan) if plan.may_overlap else NO_OVERLAP
    store = checkpoint_store(plan, Path(config.run_dir) / "checkpoints")
    master_plan = make_master_plan(plan, store, None, overlap=overlap)
    check_recording(master_plan, recording.spans, folder)
    recorded = Recorded(recording.spans)
    machine = named_hardware(file_for(plan.n_workers, files))
    dropped = dropped_shares(recording.metrics.values())

    def run(durations: Durations) -> Sequence[SimulatedRun]:
        return simulate(master_plan, durations, recorded.draw, dropped_share=dropped)

    modelled = cast(Durations, costs_of(plan, machine, machine_kernels))
    predicted = simulate_sharing(run, modelled, alone=machine.device.alone, node_of=plan.cluster.node_of)
    replay, prediction = (
        compare(attempts[-1], recording.metrics, recording.spans, folder) for attempts in (run(recorded), predicted)
    )
    return Result(Path(folder).name, _work(recording), replay, prediction)


def file_for(n_workers: int, files: Sequence[str]) -> str:
    """Return the first file whose profile has as many workers; the first of all if none has."""
    fitting = [file for file in files if (p := named_hardware(file).profile) is not None and p.n_workers == n_workers]
    return (fitting or list(files))[0]


def _work(recording: Recording) -> str:
    """Return the settings of a run but for those of its plan."""
    return json.dumps({k: v for k, v in recording.settings.items() if k not in _NOT_WORK}, sort_keys=True)


def pairs(results: Sequence[Result], *, same_work: bool) -> list[tuple[Result, Result, bool]]:
    """Return the runs whose periods differ, the faster one first, and True if the prediction names it."""
    found = []
    for two in combinations(results, 2):
        fast, slow = sorted(two, key=lambda result: result.recorded_s)
        if slow.recorded_s > DIFFERENT * fast.recorded_s and (not same_work or fast.work == slow.work):
            right = fast.prediction.period.simulated_s < slow.prediction.period.simulated_s
            found.append((fast, slow, right))
    return found


# ---------------------------------------------------------------- output


def show_runs(results: Sequence[Result]) -> None:
    rows = []
    for result in results:
        worst = result.worst_call
        call = result.prediction.calls[worst]
        rows.append(
            (
                result.name,
                f"{result.recorded_s:.3f}",
                f"{result.replay.period.error:+.1%}",
                f"{result.prediction.period.simulated_s:.3f}",
                f"{result.prediction.period.error:+.1%}",
                f"{worst} {call.recorded_s:.3f} -> {call.simulated_s:.3f} ({call.error:+.0%})",
            )
        )
    print_table(("run", "period, s", "replay", "predicted, s", "error", "call that adds the most"), rows)


def show_calls(results: Sequence[Result]) -> None:
    rows = [
        (result.name, name, f"{pair.recorded_s:.4f}", f"{pair.simulated_s:.4f}", f"{pair.error:+.0%}")
        for result in results
        for name, pair in result.prediction.calls.items()
    ]
    print_table(("run", "call", "recorded, s", "predicted, s", "error"), rows)


def show_summary(results: Sequence[Result]) -> None:
    replays = [abs(result.replay.period.error) for result in results]
    errors = [abs(result.prediction.period.error) for result in results]
    calls = [abs(pair.error) for result in results for pair in result.prediction.calls.values()]
    rows = [
        ("replay, worst", f"{max(replays):.1%}", f"{REPLAY:.0%}"),
        ("prediction, median", f"{median(errors):.1%}", f"{MEDIAN:.0%}"),
        ("prediction, worst", f"{max(errors):.1%}", f"{WORST:.0%}"),
        ("prediction of a call, median", f"{median(calls):.1%}", ""),
    ]
    for what, same in (("pairs of the same work", True), ("all pairs", False)):
        found = pairs(results, same_work=same)
        right = sum(is_right for _, _, is_right in found)
        rows.append((f"{what}, ordered rightly", f"{right} of {len(found)}", f"{ORDERED:.0%}"))
    print_table((f"{len(results)} runs", "", "limit"), rows)
    for fast, slow, is_right in pairs(results, same_work=True):
        if not is_right:
            print(
                f"ordered wrongly: {fast.name} ({fast.recorded_s:.3f} s) before {slow.name} ({slow.recorded_s:.3f} s)"
            )


if __name__ == "__main__":
    main()

"""Errors of predicted steps against recorded runs: python scripts/bench_predict.py RUN... --hardware FILE...

A replay takes the durations of the recording, a prediction those of a hardware file, and both the recording's mean
lengths. Of several files a run gets the one whose profile has as many workers. Runs that differ in nothing but cluster
and allocation do the same work; each two of them whose recorded periods differ by more than 20% are a pair to order.

    python scripts/bench_predict.py --run DIR --reward REWARD_MODEL

makes profiles and runs first: for each model and number of workers half a profile, runs that it has not seen, and the
other half. All of it is done in rounds of about 20 minutes on two cores, as a machine shared with others is not the
same machine a minute later; a run's figures are means over its rounds. The table at the end says by how much the same
run differs from round to round, which no prediction can know. DIR keeps everything:
`bench_predict.py DIR/1/tiny_2_* --hardware DIR/1/tiny_2.yaml` compares again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
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
from realrl.sim.report import Pair, compare

REPLAY, MEDIAN, WORST, DIFFERENT, ORDERED = 0.05, 0.15, 0.25, 1.2, 0.9
_NOT_WORK = ("cluster", "allocation", "steps", "run_dir", "launcher", "resume")


@dataclass(frozen=True)
class Kind:
    """A model on a number of workers.

    Attributes:
        settings: those of its profile and of all its runs.
        seconds: of both halves of its profile.
        steps: of a run.
    """

    settings: tuple[str, ...]
    seconds: float
    steps: int


_TWO, _ONE = "cluster.n_devices_per_node=2", "cluster.n_devices_per_node=1"
_SMALL = ("preset=quickstart", "n_seqs=16", "~allocation.calls.actor_gen")
KINDS = {
    "tiny_2": Kind(("preset=tiny", _TWO), 60.0, 12),
    "tiny_1": Kind(("preset=tiny", _ONE), 50.0, 12),
    "smol_1": Kind((*_SMALL, _ONE), 90.0, 3),
    "smol_2": Kind((*_SMALL, _TWO), 100.0, 3),
}


def _calls(**places: str) -> tuple[str, ...]:
    return tuple(f"allocation.calls.{call}={place}" for call, place in places.items())


_ALL, _LONG = "d2@0:0-1", ("n_seqs=128", "generation.max_new_tokens=32")
KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "tiny_2": {
        "data": ("ppo", "allocation=data"),
        "split": ("ppo", "allocation=split"),
        "tensor": ("ppo", "allocation=tensor"),
        "pipeline": ("ppo", "allocation=pipeline"),
        "gen_t2": ("ppo", "allocation=data", *_calls(actor_gen="t2")),
        "one": ("ppo", "allocation=d1@0:0"),
        "big": ("ppo", "allocation=split", "n_seqs=256"),
        "grpo": ("grpo", "allocation=data"),
        "rloo": ("rloo", "allocation=data"),
    },
    "tiny_1": {
        "data": ("ppo",),
        "many": ("ppo", *_LONG),
        "offload": ("ppo", "allocation.offload_frozen=true"),
        "grpo": ("grpo",),
        "rloo": ("rloo",),
    },
    "smol_1": {
        "data": ("ppo", "allocation=data"),
        "long": ("ppo", "allocation=data", "n_seqs=8", "generation.max_new_tokens=60"),
    },
    "smol_2": {
        "data": ("ppo", "allocation=data"),
        "split": ("ppo", "allocation=split"),
        "preset": ("ppo", "allocation=split", *_calls(actor_gen=_ALL)),
        "pipeline": ("ppo", "allocation=pipeline", *_calls(actor_gen="p2")),
    },
}
"""Kind -> name -> experiment and settings of plans that were looked at when the forms of the costs were chosen."""

UNSEEN: dict[str, dict[str, tuple[str, ...]]] = {
    "tiny_2": {
        "gen_all": ("ppo", "allocation=split", *_calls(actor_gen=_ALL)),
        "critic_p2": ("ppo", "allocation=data", *_calls(critic_inf="p2", critic_train="p2")),
        "remax": ("remax", "allocation=split"),
        "grpo_split": ("grpo", "allocation=split", "n_seqs=16"),
    },
    "tiny_1": {"dr_grpo": ("dr_grpo", "n_seqs=4"), "few": ("ppo", "n_seqs=32", "algorithm.n_minibatches=2")},
    "smol_1": {"few": ("ppo", "allocation=data", "n_seqs=8")},
    "smol_2": {
        "critic_all": ("ppo", "allocation=split", *_calls(actor_gen=_ALL, critic_inf=_ALL, critic_train=_ALL)),
        "ref_apart": ("ppo", "allocation=split", *_calls(actor_gen=_ALL, ref_inf="d1@0:1")),
    },
}
"""The same for plans that nobody has looked at: their errors are those to expect elsewhere."""


@dataclass(frozen=True)
class Result:
    """A run against its replay and its prediction, or the means of several rounds of it.

    Attributes:
        name: that of its folder.
        work: the settings that its work depends on.
        replay: median seconds of a step; of several rounds those with the largest error.
        period: the same of the prediction.
        calls: call -> its median seconds in the prediction.
        change: the longest recorded period of the rounds over the shortest, less one.
    """

    name: str
    work: str
    replay: Pair
    period: Pair
    calls: Mapping[str, Pair]
    change: float = 0.0

    @property
    def worst_call(self) -> str:
        """The call that adds the most to the error of the period."""
        return max(self.calls, key=lambda name: abs(self.calls[name].simulated_s - self.calls[name].recorded_s))


def merged(rounds: Sequence[Result]) -> Result:
    """Return the means of a run's rounds."""
    recorded = [one.period.recorded_s for one in rounds]
    return replace(
        rounds[0],
        replay=max((one.replay for one in rounds), key=lambda pair: abs(pair.error)),
        period=_mean([one.period for one in rounds]),
        calls={name: _mean([one.calls[name] for one in rounds]) for name in rounds[0].calls},
        change=max(recorded) / min(recorded) - 1.0,
    )


def _mean(pairs: Sequence[Pair]) -> Pair:
    return Pair(fmean(pair.recorded_s for pair in pairs), fmean(pair.simulated_s for pair in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of a run")
    parser.add_argument("--hardware", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--calls", action="store_true", help="show every call")
    parser.add_argument("--run", type=Path, metavar="DIR", help="make profiles and runs, in a new folder")
    parser.add_argument("--reward", metavar="PATH", help="with --run: a reward model of the quickstart")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="with --run: only these")
    parser.add_argument("--rounds", type=int, default=2, help="with --run: how often; default: 2")
    parser.add_argument("--share", type=float, default=1.0, help="with --run: share of the time and the steps")
    options = parser.parse_args()
    if (options.run is None) == (not options.runs) or bool(options.runs) != bool(options.hardware):
        parser.error("give runs and --hardware, or --run")
    if options.rounds < 1:
        parser.error("--rounds: give at least 1")
    try:
        if options.run is None:
            results = [examine(folder, options.hardware) for folder in options.runs]
            show(results, with_calls=options.calls)
        else:
            campaign(options)
    except UsageError as error:
        raise SystemExit(f"error: {error}") from error


# ---------------------------------------------------------------- profiles and runs


def campaign(options: argparse.Namespace) -> None:
    """Make profiles and runs, and compare them."""
    folder: Path = options.run
    folder.mkdir(parents=True)
    begin_s = time.monotonic()
    for i in range(1, options.rounds + 1):
        (folder / str(i)).mkdir()
        for name in options.kinds:
            for done in record(KINDS[name], name, folder / str(i), options):
                print(f"{(time.monotonic() - begin_s) / 60:5.1f} min, round {i}: {done}", file=sys.stderr, flush=True)
    everything = []
    for plans, title in (
        (KNOWN, "Plans that the costs were made with:"),
        (UNSEEN, "Plans that nothing was made with:"),
    ):
        results = [_examined(options, name, plan) for name in options.kinds for plan in plans[name]]
        print(title)
        show(results, with_calls=options.calls)
        everything += results
    print("All of them:")
    show_summary(everything)


def _examined(options: argparse.Namespace, name: str, plan: str) -> Result:
    """Compare all rounds of a run, of a kind and a plan by their names."""
    rounds = [options.run / str(i) for i in range(1, options.rounds + 1)]
    return merged([examine(str(folder / f"{name}_{plan}"), [str(folder / f"{name}.yaml")]) for folder in rounds])


def record(kind: Kind, name: str, folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Make the profile and the runs of a kind; yield what has been done."""
    settings = (*kind.settings, *_reward_of(kind, options.reward))
    halves = [folder / f"{when}_{name}.json" for when in ("before", "after")]
    seconds = str(max(1.0, kind.seconds * options.share / len(halves)))
    n_steps = max(3, round(kind.steps * options.share))

    def profile(half: Path) -> None:
        files = ("--out", str(half.with_suffix(".yaml")), "--measurements", str(half))
        call_realrl("profile", "ppo", *settings, "allocation=data", *files, "--seconds", seconds)

    profile(halves[0])
    yield f"half a profile of {name}"
    for plan, (experiment, *own) in (KNOWN[name] | UNSEEN[name]).items():
        place = folder / f"{name}_{plan}"
        once = (f"steps={n_steps}", "save.at_end=false", f"run_dir={place}")
        call_realrl("run", experiment, *settings, *own, *once)
        yield f"{place.name}: {step_seconds(place):.4f} s a step"
    profile(halves[1])
    both = [word for half in halves for word in ("--from", str(half))]
    call_realrl("profile", "ppo", *settings, *both, "--out", f"{folder}/{name}.yaml")
    yield f"profile of {name}"


def _reward_of(kind: Kind, path: str | None) -> tuple[str, ...]:
    return (f"models.reward.path={path}",) if path and "preset=quickstart" in kind.settings else ()


def call_realrl(*arguments: str) -> str:
    """Call realrl's command line in a process of its own; return what it printed.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "realrl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def step_seconds(folder: Path, *, n_first: int = 1) -> float:
    """Return the median seconds of a step of a run, without its first ones."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return median(row["time_s/step"] for row in rows[n_first:])


# ---------------------------------------------------------------- comparison


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
    device = machine.device
    predicted = simulate_sharing(
        run, modelled, alone=device.alone, scatter=device.scatter, node_of=plan.cluster.node_of
    )
    replay, prediction = (
        compare(attempts[-1], recording.metrics, recording.spans, folder) for attempts in (run(recorded), predicted)
    )
    return Result(Path(folder).name, _work(recording), replay.period, prediction.period, prediction.calls)


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
        fast, slow = sorted(two, key=lambda result: result.period.recorded_s)
        if slow.period.recorded_s > DIFFERENT * fast.period.recorded_s and (not same_work or fast.work == slow.work):
            right = fast.period.simulated_s < slow.period.simulated_s
            found.append((fast, slow, right))
    return found


# ---------------------------------------------------------------- output


def show(results: Sequence[Result], *, with_calls: bool) -> None:
    show_runs(results)
    if with_calls:
        show_calls(results)
    show_summary(results)


def show_runs(results: Sequence[Result]) -> None:
    rows = []
    for result in results:
        worst = result.worst_call
        call = result.calls[worst]
        rows.append(
            (
                result.name,
                f"{result.period.recorded_s:.3f}",
                f"{result.replay.error:+.1%}",
                f"{result.period.simulated_s:.3f}",
                f"{result.period.error:+.1%}",
                f"{worst} {call.recorded_s:.3f} -> {call.simulated_s:.3f} ({call.error:+.0%})",
            )
        )
    print_table(("run", "period, s", "replay", "predicted, s", "error", "call that adds the most"), rows)


def show_calls(results: Sequence[Result]) -> None:
    rows = [
        (result.name, name, f"{pair.recorded_s:.4f}", f"{pair.simulated_s:.4f}", f"{pair.error:+.0%}")
        for result in results
        for name, pair in result.calls.items()
    ]
    print_table(("run", "call", "recorded, s", "predicted, s", "error"), rows)


def show_summary(results: Sequence[Result]) -> None:
    replays = [abs(result.replay.error) for result in results]
    errors = [abs(result.period.error) for result in results]
    calls = [abs(pair.error) for result in results for pair in result.calls.values()]
    rows = [
        ("replay, worst", f"{max(replays):.1%}", f"{REPLAY:.0%}"),
        ("prediction, median", f"{median(errors):.1%}", f"{MEDIAN:.0%}"),
        ("prediction, worst", f"{max(errors):.1%}", f"{WORST:.0%}"),
        ("prediction of a call, median", f"{median(calls):.1%}", ""),
    ]
    changes = [result.change for result in results]
    if any(changes):
        rows += [
            (f"same run, other round, {what}", f"{of(changes):.1%}", "")
            for what, of in (("median", median), ("worst", max))
        ]
    for what, same in (("pairs of the same work", True), ("all pairs", False)):
        found = pairs(results, same_work=same)
        right = sum(is_right for _, _, is_right in found)
        rows.append((f"{what}, ordered rightly", f"{right} of {len(found)}", f"{ORDERED:.0%}"))
    print_table((f"{len(results)} runs", "", "limit"), rows)
    for fast, slow, is_right in pairs(results, same_work=True):
        if not is_right:
            names = [f"{one.name} ({one.period.recorded_s:.3f} s)" for one in (fast, slow)]
            print("ordered wrongly:", " before ".join(names))


if __name__ == "__main__":
    main()

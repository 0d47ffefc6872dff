"""A searched plan for two workers on this machine against data, split and heuristic: python scripts/bench_plan.py

    --model tiny          PPO on the model of preset=tiny
    --model quickstart    PPO on SmolLM2-135M, with the reward model of --reward

Profiles the machine, unless --hardware names it, searches a plan with the lengths of a first run, unless --lengths has
them, and runs all plans. They take turns: a round runs all of them, each round in another order, and a ratio is the
median over rounds of the ratios within a round. What was predicted, was predicted before the rounds, from the same
machine and lengths. The exit code is 1 if the searched plan is slower than the best of the others by more than 3%.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from bench_predict import call_realrl, step_seconds

from realrl.cli.console import print_table
from realrl.experiment.discovery import load_run
from realrl.experiment.planning import plan_run
from realrl.plan.samples.partition import default_n_mbs
from realrl.runtime.processes.machine import accelerators, on_machine

SEARCHED, OTHERS = "searched", ("data", "split", "heuristic")
LIMIT = 0.03
_TWO = "cluster.n_devices_per_node=2"
MODELS = {"tiny": ("preset=tiny", _TWO), "quickstart": ("preset=quickstart", _TWO, "n_seqs=16")}
_UNPINNED = "~allocation.calls.actor_gen"  # the quickstart has a pin
_WARM_UP, _SIMULATED = 2, 6  # steps
Rounds = Sequence[Mapping[str, float]]
"""Of each round: plan -> median seconds of a step."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=22, help=f"of a run; the first {_WARM_UP} do not count")
    parser.add_argument("--hardware", metavar="FILE", help="the machine; without it, a profile")
    parser.add_argument("--seconds", type=float, default=90.0, help="of the profile")
    parser.add_argument("--lengths", metavar="TEXT", help="as for realrl plan; without it, those of a run")
    parser.add_argument("--reward", metavar="PATH", help="a reward model of the quickstart")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep everything there; a new folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of all runs")
    options = parser.parse_intermixed_args()
    if options.rounds < 1 or options.steps <= _WARM_UP:
        parser.error(f"it takes a round, and more than {_WARM_UP} steps")
    if options.out is not None:
        options.out.mkdir(parents=True)
        return compare(options, options.out)
    with tempfile.TemporaryDirectory(prefix="realrl-plan-") as folder:
        return compare(options, Path(folder))


def compare(options: argparse.Namespace, folder: Path) -> int:
    """Search, predict, run, and say which plan is the fastest; returns the exit code."""
    settings = [*MODELS[options.model], *([f"models.reward.path={options.reward}"] if options.reward else ())]
    settings += options.overrides
    places = {name: [_UNPINNED, f"allocation={name}"] for name in OTHERS}
    hardware = options.hardware
    if hardware is None:
        hardware = f"{folder}/hardware.yaml"
        _call("profile", settings, *places["data"], "--out", hardware, "--seconds", str(options.seconds))
    lengths = options.lengths
    if lengths is None:
        lengths = str(_run(settings, places["split"], folder / "lengths", steps=2) / "generations.jsonl")
    machine = ("--hardware", hardware, "--lengths", lengths)
    print(_call("plan", settings, _UNPINNED, *machine, "--out", f"{folder}/plan.yaml"))
    places = {SEARCHED: [f"plan={folder}/plan.yaml"], **places}
    predicted = {}
    for name, own in places.items():
        told = _call("simulate", settings, *own, *machine, "--steps", str(_SIMULATED))
        predicted[name] = float(told.partition("period ")[2].split()[0])
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        names = list(places)
        rounds.append({})
        for name in names[number % len(names) :] + names[: number % len(names)]:
            place = _run(settings, places[name], folder / "runs" / f"{name}_{number}", steps=options.steps)
            rounds[-1][name] = step_seconds(place, n_first=_WARM_UP)
            print(f"round {number + 1}: {name}: {rounds[-1][name]:.4f} s a step", file=sys.stderr, flush=True)
    plans = {name: settings_of(folder / "runs" / f"{name}_0") for name in places}
    show(rounds, predicted, plans)
    return 0 if lead(rounds)[1] <= 1.0 + LIMIT else 1


def _call(command: str, settings: Sequence[str], *arguments: str) -> str:
    print(f"realrl {command} ppo {' '.join((*settings, *arguments))}", file=sys.stderr, flush=True)
    return call_realrl(command, "ppo", *settings, *arguments)


def _run(settings: Sequence[str], own: Sequence[str], folder: Path, *, steps: int) -> Path:
    call_realrl("run", "ppo", *settings, *own, f"steps={steps}", "save.at_end=false", f"run_dir={folder}")
    return folder


def settings_of(folder: Path) -> dict[str, object]:
    """Return what the plan of a run decides, so that equal plans give equal values."""
    experiment, config = load_run((folder / "config.json").read_bytes())
    plan = plan_run(on_machine(config, accelerators())[0], experiment)
    found: dict[str, object] = {
        "offload": sorted(config.allocation.offload),
        "frozen": config.allocation.offload_frozen,
    }
    for mfc in plan.mfcs:
        place = plan.allocations[mfc.name]
        n_mbs = mfc.n_mbs or default_n_mbs(place.strategy.pp, is_train=mfc.is_train)
        found[mfc.name] = str(place), mfc.max_tokens_per_mb or n_mbs
    for role, model in config.models.items():
        if plan.roles[role].trainable:
            optimizer = model.optimizer
            found[role] = model.activation_checkpointing, optimizer.zero_stage or 0, optimizer.offload
    return found


def lead(rounds: Rounds) -> tuple[str, float]:
    """Return the best plan but the searched one, and how many times as long as that the searched one takes."""
    best = min(OTHERS, key=lambda name: median(times[name] for times in rounds))
    return best, median(times[SEARCHED] / times[best] for times in rounds)


def show(rounds: Rounds, predicted: Mapping[str, float], plans: Mapping[str, Mapping[str, object]]) -> None:
    """Print seconds of every plan, measured and predicted, and how the searched one compares."""
    rows = []
    for name in (SEARCHED, *OTHERS):
        times = [one[name] for one in rounds]
        ratio = median(one[name] / one[SEARCHED] for one in rounds)
        measured = median(times)
        spread, error = f"{min(times):.4f} to {max(times):.4f}", f"{predicted[name] / measured - 1:+.1%}"
        ahead = f"{predicted[name] / predicted[SEARCHED]:.3f}"
        rows.append((name, f"{measured:.4f}", spread, f"{ratio:.3f}", f"{predicted[name]:.4f}", error, ahead))
    columns = ("plan", "step, s", "rounds", "to the searched", "predicted, s", "error", "predicted ratio")
    print_table(columns, rows, title=f"Medians of {len(rounds)} rounds")
    best, ratio = lead(rounds)
    expected = min(OTHERS, key=lambda name: predicted[name])
    if ratio <= 1.0:
        verdict = f"the searched plan is {1 / ratio - 1:.1%} faster than {best}"
    else:
        verdict = f"the searched plan is {ratio - 1:.1%} slower than {best}"
    gain = predicted[expected] / predicted[SEARCHED] - 1
    print(
        f"{verdict}, the best of the others; predicted: {gain:.1%} faster than {expected}. Limit: {LIMIT:.0%} slower."
    )
    for name in OTHERS:
        if plans[name] == plans[SEARCHED]:
            print(f"The searched plan is that of {name}: their times differ by chance.")


if __name__ == "__main__":
    sys.exit(main())

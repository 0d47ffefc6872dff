"""Plans of the search against those of every method, on random cases: python scripts/bench_methods.py [--cases 200] ...

A case is an algorithm, a size of its models, a cluster, samples and a machine, all drawn by its seed. Periods are those
of the fast model. The search runs by itself, for as many seconds of the processor as the slowest method took, and at
least `--seconds`; then from the plans of all methods. A method that is better than the search by itself is marked:
`--first SEED --cases 1` makes its case again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from bench_search import MODELS, problem_of

from realrl.errors import AllocationError
from realrl.search.branch import search
from realrl.search.methods import METHODS
from realrl.search.methods.layout import Plan
from realrl.search.problem import Problem

EXPERIMENTS = ("ppo", "ppo", "grpo", "remax", "safe_rlhf", "self_play")
MACHINES = ("a100_80gb", "h100", "h200", "l40s")


@dataclass
class Outcome:
    """Periods of one case.

    Attributes:
        methods: of those that have a plan.
        alone, together: of the search by itself, and from the plans of methods; inf where it finds none.
    """

    text: str
    methods: dict[str, float] = field(default_factory=dict)
    alone: float = float("inf")
    together: float = float("inf")
    bound: float = 0.0


def drawn(seed: int) -> argparse.Namespace:
    """Return the options of a random case, as `bench_search` has them."""
    rng = random.Random(seed)
    return argparse.Namespace(
        experiment=rng.choice(EXPERIMENTS),
        model=rng.choice(list(MODELS)),
        devices=rng.choice([1, 2, 4, 8, 16, 24, 32, 48]),
        n_seqs=rng.choice([64, 128, 256, 512]),
        batch=rng.choice([32, 64, 256]),
        hardware=rng.choice(MACHINES),
    )


def searched(problem: Problem, seconds: float, starts: Sequence[Plan] = ()) -> tuple[float, float]:
    """Return period and bound of a search that has so many seconds of the processor."""
    begin, period, bound = time.process_time(), float("inf"), 0.0
    try:
        for found in search(problem, seed=1, starts=starts):
            period, bound = found.period, found.bound
            if time.process_time() - begin > seconds:
                break
    except AllocationError:
        return period, bound
    return period, bound


def run(seed: int, *, seconds: float) -> Outcome:
    options = drawn(seed)
    size = f"{options.experiment} {options.model}, {options.devices} devices ({options.hardware})"
    found = Outcome(f"{seed:4} {size}, {options.n_seqs} samples, batches of {options.batch}")
    try:
        problem = problem_of(options)
    except AllocationError:
        return found
    plans, slowest = {}, 0.0
    for name, method in METHODS.items():
        begin = time.process_time()
        try:
            plans[name] = method.place(problem, 1)
            found.methods[name] = problem.model.period(plans[name])
        except AllocationError:
            continue
        finally:
            slowest = max(slowest, time.process_time() - begin)
    found.alone, found.bound = searched(problem, max(seconds, slowest))
    found.together, bound = searched(problem, max(seconds, slowest), tuple(plans.values()))
    found.bound = max(found.bound, bound)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    seeds, cases = range(options.first, options.first + options.cases), list[Outcome]()
    with ProcessPoolExecutor(options.processes) as pool:
        for case in pool.map(partial(run, seconds=options.seconds), seeds):
            best = min(case.methods, key=lambda name: case.methods[name], default=None)
            if best is None and case.alone == float("inf"):
                print(f"{case.text}: nothing fits", flush=True)
                continue
            cases.append(case)
            than = "" if best is None else f", {best} {case.methods[best]:.3f} s"
            mark = "  BETTER THAN THE SEARCH" if best and case.methods[best] < case.alone * (1 - 1e-9) else ""
            print(f"{case.text}: search {case.alone:.3f} s, then {case.together:.3f} s{than}{mark}", flush=True)
    print(f"\n{len(cases)} cases with a plan\n")
    print("| method | has a plan | best method | better than the search | behind the search |")
    print("|---|---|---|---|---|")
    for name in METHODS:
        own = [case for case in cases if name in case.methods]
        best = sum(case.methods[name] <= min(case.methods.values()) * (1 + 1e-9) for case in own)
        better = sum(case.methods[name] < case.alone * (1 - 1e-9) for case in own)
        behind = statistics.median(case.methods[name] / case.together - 1 for case in own) if own else float("nan")
        print(f"| `{name}` | {len(own)} | {best} | {better} | {behind:.1%} |")
    gained = sum(case.together < case.alone * (1 - 1e-9) for case in cases)
    print(f"\nWith plans of methods to start from, the search is better in {gained} cases.")
    gaps = [case.together / case.bound - 1 for case in cases if case.bound and case.together < float("inf")]
    print(f"Median gap to the proven bound: {statistics.median(gaps):.1%}")


if __name__ == "__main__":
    main()

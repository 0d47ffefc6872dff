"""Plans of random runs, through the checks of `realrl doctor --hardware` and `realrl run --dry-run --hardware`.

    python scripts/plan_campaign.py [--cases 500] [--seed 1] [--jobs 2] [--only N ...] [--out FILE.jsonl] [--keep DIR]

A case is a command line (`drawn_runs.py`): an algorithm, one that comes with realrl or a graph that is drawn; models by
their config.json; 1 to 128 devices; a machine, as it is or with every value changed; settings, pins, lengths. Its best
plan, the runners-up and the plan of one method are written to files, which both commands have to take. Every tenth case
is planned twice, and every 25th, on at most 16 devices, by real commands too, which have to make the same file. A run
of which no plan fits is tried with many plain plans: none of them may fit.

With `--out`, cases that the file has are not run again; its lines have their command lines. The exit code is 1 if a
plan was refused, two plans of one seed differed, a refusal was not true, or something else failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from drawn_runs import Case, draw_case

from realrl import cli
from realrl.cli.plan import plan_file_text, request_of, search_for
from realrl.config.compose import compose
from realrl.errors import UsageError
from realrl.experiment.discovery import config_dir, load_experiment, stable_reference
from realrl.planner.planner import SEARCH, Effort

AGAIN, COMMANDS, FEW_DEVICES = 10, 25, 16
TOP, N_EXPANDED = 3, 200
_LIMIT_S = 600  # of the processor, for a case
_NO_CLOCK = 1e6  # seconds of a search: what a busy machine ends may differ
_SAVING = {  # settings that take less memory, and words that mean that the user has decided about them
    "models.*.activation_checkpointing=true": ("activation_checkpointing",),
    "models.*.optimizer.zero_stage=1": ("zero_stage",),
    "models.*.optimizer.offload=true": ("optimizer.offload", "backend=megatron"),
    "allocation.offload_frozen=true": ("allocation.offload",),
    "n_mbs=64": ("n_mbs", "max_tokens_per_mb"),
}


class Failure(Exception):
    """A case that shows a mistake; says what makes it again."""


def plans_of(case: Case, effort: Effort) -> dict[str, str]:
    """Return the plans of a case by their names, as the content of their files; the best one first.

    Raises:
        UsageError: the run is refused, or nothing fits.
    """
    name, *overrides = case.words
    experiment = load_experiment(name)
    config = compose(experiment, overrides, reference=stable_reference(name), config_dir=config_dir())
    request = request_of(experiment, config, case.hardware, case.lengths, overrides)
    planned = search_for(request, effort=effort, seed=case.seed)
    texts = {planned.best.name: plan_file_text(planned, seed=case.seed)}
    for one in planned.candidates[1:]:
        texts[one.name] = plan_file_text(replace(planned, candidates=(one,)), seed=case.seed)
    return texts


def checked(texts: dict[str, str], case: Case) -> dict[str, str]:
    """Return the plans that are given to the commands: the best one, those of the search, and one other."""
    others = [name for name in [*texts][1:] if not name.startswith(SEARCH)]
    chosen = random.Random(case.seed).sample(others, min(1, len(others)))
    return {
        name: text for i, (name, text) in enumerate(texts.items()) if not i or name.startswith(SEARCH) or name in chosen
    }


def told(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a command in this process; return its exit code, and all that it says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(arguments)
    return code, said.getvalue()


def commands_of(case: Case, file: Path) -> Iterator[list[str]]:
    """Yield the commands that have to take a plan."""
    words = [*case.words, f"plan={file}", "--hardware", case.hardware]
    yield ["doctor", *words, "--no-models"]
    yield ["run", *words, "--dry-run"]


def check(case: Case, texts: dict[str, str], folder: Path) -> int:
    """Give plans to both commands; return the number of them.

    Raises:
        Failure: a plan is refused.
    """
    wanted = checked(texts, case)
    for number, (name, text) in enumerate(wanted.items()):
        file = folder / f"plan_{number}.yaml"
        file.write_text(text)
        for command in commands_of(case, file):
            code, said = told(command)
            if code:
                raise Failure(f"{command[0]} refuses the plan '{name}' with exit code {code}:\n{said[-4000:]}\n{text}")
    return len(wanted)


def check_commands(case: Case, texts: dict[str, str], folder: Path) -> None:
    """Plan and check by real commands.

    Raises:
        Failure: one ends with another exit code than 0, or the plan is another one.
    """
    file = folder / "by_command.yaml"
    planning = ["plan", *case.words, *case.options, "--seed", str(case.seed), "--top", str(TOP), "--out", str(file)]
    planning += ["--seconds", str(_NO_CLOCK)]
    for command in (planning, *commands_of(case, file)):
        found = subprocess.run(
            [sys.executable, "-m", "realrl", *command], capture_output=True, text=True, cwd=folder, check=False
        )
        if found.returncode:
            raise Failure(f"realrl {shlex.join(command)}\nends with {found.returncode}:\n{found.stderr[-4000:]}")
    if file.read_text() != next(iter(texts.values())):
        raise Failure(
            f"realrl {shlex.join(planning)}\nmakes another plan:\n{file.read_text()}\n{next(iter(texts.values()))}"
        )


def plain_plan_that_fits(case: Case, folder: Path) -> str:
    """Return the overrides of a plan by a rule in which every device has room; "" if none has."""
    given = " ".join(case.words)
    n_nodes, size = (int(word.partition("=")[2]) for word in case.words[1:3])
    savings = [word for word, decided in _SAVING.items() if not any(text in given for text in decided)]
    modes = [
        "data",
        "tensor",
        "pipeline",
        "heuristic",
        f"t{size}p{n_nodes}",
        f"d{n_nodes}t{size}",
        f"d{size}p{n_nodes}",
    ]
    report = folder / "report.json"
    for mode in modes:
        words = [*case.words, f"allocation={mode}", *savings]
        report.unlink(missing_ok=True)
        told(["doctor", *words, "--hardware", case.hardware, "--no-models", "--json", str(report)])
        found = json.loads(report.read_text()) if report.exists() else {"checks": []}
        status = {one["check"]: one["status"] for one in found["checks"]}
        if status.get("memory") == "ok" and "problem" not in status.values():
            return " ".join(words[len(case.words) :])
    return ""


def run_case(seed: int, keep: str | None, number: int) -> dict[str, Any]:
    """Run one case; returns the line of the file of results."""
    signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, _LIMIT_S)
    begin = time.process_time()
    line: dict[str, Any] = {"seed": seed, "case": number}
    with contextlib.ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="realrl-plans-")))
        else:
            folder = Path(keep).absolute() / f"{seed}_{number}"
            folder.mkdir(parents=True, exist_ok=True)
        try:
            is_command = number % COMMANDS == 0
            case = draw_case(seed, number, folder, most_devices=FEW_DEVICES if is_command else 128)
            line["command"] = shlex.join(["realrl", "plan", *case.words, *case.options, "--seed", str(case.seed)])
            line["experiment"] = "drawn" if "/" in case.words[0] else case.words[0]
            line["devices"] = [int(word.partition("=")[2]) for word in case.words[1:3]]
            line |= _outcome(case, folder, is_command=is_command)
        except Failure as failure:
            line |= {"outcome": "failed", "reason": str(failure)}
        except BaseException as error:  # whatever it is, the other cases go on
            if isinstance(error, KeyboardInterrupt):
                raise
            line |= {"outcome": "failed", "reason": "".join(traceback.format_exception(error))[-6000:]}
    signal.setitimer(signal.ITIMER_PROF, 0)
    return line | {"seconds": round(time.process_time() - begin, 2)}


def _outcome(case: Case, folder: Path, *, is_command: bool) -> dict[str, Any]:
    effort = Effort(None if is_command else N_EXPANDED, TOP, _NO_CLOCK)
    try:
        texts = plans_of(case, effort)
    except UsageError as error:
        is_shortage = "no plan" in str(error) or "fits no mesh" in str(error)
        if is_shortage and (words := plain_plan_that_fits(case, folder)):
            raise Failure(f"the run is refused, and fits with {words}: {error}") from error
        return {"outcome": "refused", "reason": str(error)}
    if case.number % AGAIN == AGAIN // 2 and plans_of(case, effort) != texts:
        raise Failure("two plans of one seed differ")
    n_plans = check(case, texts, folder)
    if is_command:
        check_commands(case, texts, folder)
    return {"outcome": "planned", "plans": n_plans, "best": next(iter(texts))}


def _out_of_time(number: int, frame: object) -> None:
    raise TimeoutError(f"more than {_LIMIT_S} s")


# ---------------------------------------------------------------- many cases


def known_lines(path: Path | None, seed: int) -> list[dict[str, Any]]:
    """Return the lines of a file of results that are of a seed."""
    if path is None or not path.exists():
        return []
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["seed"] == seed]


def run_cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the cases that are not known; print a line for each, and write it."""
    lines = known_lines(options.out, options.seed)
    known = {line["case"] for line in lines}
    numbers = [number for number in options.only or range(options.cases) if number not in known or options.only]
    work = partial(run_case, options.seed, options.keep)
    out = options.out.open("a") if options.out else None
    for n_done, line in enumerate(_results(work, numbers, options.jobs), 1):
        lines.append(line)
        reason = line.get("reason", f"{line.get('plans')} plans, {line.get('best')}").splitlines()[0]
        print(
            f"{n_done}/{len(numbers)}  case {line['case']}  {line['outcome']}  {line['seconds']} s  {reason}",
            flush=True,
        )
        if line["outcome"] == "failed":
            print(f"    {line.get('command')}\n{line['reason']}", flush=True)
        if out is not None:
            print(json.dumps(line), file=out, flush=True)
    if out is not None:
        out.close()
    return lines


def _results(work: partial[dict[str, Any]], numbers: Sequence[int], jobs: int) -> Iterator[dict[str, Any]]:
    if jobs == 1:
        yield from map(work, numbers)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(work, number) for number in numbers]):
            yield future.result()


def print_tables(lines: Sequence[dict[str, Any]]) -> None:
    """Print outcomes by algorithm and by size of the cluster, and the reasons of refusals."""
    outcomes = ("planned", "refused", "failed")
    for what, key in (("algorithm", lambda line: line.get("experiment", "-")), ("devices", _size_of)):
        print(f"\n| {what} | cases | {' | '.join(outcomes)} | plans checked |")
        print("|---|---|---|---|---|---|")
        names = sorted({key(line) for line in lines}, key=lambda name: (len(name) if what == "devices" else 0, name))
        for name in [*names, "all"]:
            own = [line for line in lines if name in (key(line), "all")]
            counts = Counter(line["outcome"] for line in own)
            numbers = [len(own), *(counts[outcome] for outcome in outcomes), sum(line.get("plans", 0) for line in own)]
            print(f"| {name} | {' | '.join(map(str, numbers))} |")
    refused = Counter(" ".join(line["reason"].split()[:6]) for line in lines if line["outcome"] == "refused")
    print("\nrefused because:" if refused else "\nno case was refused")
    for reason, n in refused.most_common():
        print(f"{n:5}  {reason} ...")
    print(f"\n{sum(line['seconds'] for line in lines) / 60:.1f} minutes of the processor")


def _size_of(line: dict[str, Any]) -> str:
    n_nodes, size = line.get("devices", (0, 0))
    return str(n_nodes * size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of single cases")
    parser.add_argument("--out", type=Path, help="file of results, one JSON line for each case")
    parser.add_argument("--keep", metavar="DIR", help="keep the files of cases there")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = run_cases(options)
    print_tables(lines)
    return 1 if any(line["outcome"] == "failed" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())

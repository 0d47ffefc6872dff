"""``realrl check``: whether an algorithm's numbers depend on how it is run, and why."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from realrl.cli.arguments import load, make_parser, parse
from realrl.cli.launch import checked, plan_of, refuse_unnamed
from realrl.errors import UsageError, did_you_mean
from realrl.files import write_output

if TYPE_CHECKING:
    from realrl.checker.check import Outcome, Report
    from realrl.checker.diagnose import Finding

CHECK_EXAMPLES = """\
examples:
  realrl check ./my_algorithm.py preset=tiny             an algorithm of your own
  realrl check grpo preset=tiny algorithm.reward_function=my_rewards.py:score
  realrl check ./my_algorithm.py preset=tiny --without tensor-2 --without pipeline-2
  realrl check ./my_algorithm.py preset=tiny --json report.json

Runs two short steps on the CPU: on one worker, in micro-batches, with samples in other orders, stopped and resumed, on
two workers in three ways. All must give the same numbers.

exit codes: 0 all numbers agree, 1 some do not or the algorithm does not run, 2 wrong input and nothing was started
"""
_USUAL_S = 3.0  # of a run with preset=tiny where nothing else runs
_WIDTH = 16  # of the names of variants


def check(arguments: Sequence[str]) -> int:
    """``realrl check``: compare runs that must agree."""
    parser = make_parser("check", "Run an algorithm in ways that must not change its numbers.", CHECK_EXAMPLES)
    parser.add_argument("--json", metavar="FILE", help="write the report there, too")
    parser.add_argument("--without", metavar="NAME", action="append", default=[], help="leave a run out")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs, and say where they are")
    options = parse(parser, arguments)
    if options.help:
        parser.print_help()
        return 0
    from realrl.checker.variants import N_STEPS, VARIANTS

    names = [variant.name for variant in VARIANTS[1:]]
    for name in options.without:
        if name not in names:
            meant = did_you_mean(name, names)
            raise UsageError(f"--without {name}: there is no such run.{meant}", remedy=f"Runs: {', '.join(names)}.")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: the runs are short, and some share the cores
    experiment, config = load(parser, options)
    plan_of(experiment, config, options.arguments[1:])
    refuse_unnamed(experiment, config, options.arguments[1:])
    from realrl.checker.check import BaselineFailedError, check_algorithm
    from realrl.checker.runs import Runs
    from realrl.config.overrides import parse_overrides

    named = frozenset(edit.path for edit in parse_overrides(options.arguments[1:])[0])
    n_runs = len(VARIANTS) - len(set(options.without))
    usual_s = f"about {math.ceil(n_runs * _USUAL_S / 10) * 10} s with preset=tiny where nothing else runs"
    print(f"{n_runs} runs of {N_STEPS} steps each, one after the other; all together take {usual_s}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="realrl-check-"))
    try:
        runs = Runs(experiment, config, named, folder, check=partial(checked, holds_lock=True))
        report = check_algorithm(runs, without=options.without, tell=partial(_tell, n_runs))
    except BaselineFailedError as error:
        print(error.output.rstrip())
        print(f"\n{error.message}")
        return 1
    finally:
        if options.keep:
            print(f"runs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print_report(report)
    if options.json is not None:
        _write(report, options.json)
    return 1 if report.findings else 0


def _tell(n_runs: int, outcome: Outcome) -> None:
    variant = outcome.variant
    print(f"{variant.name:{_WIDTH}} {variant.what:52} {outcome.verdict}", flush=True)
    if variant.name == "baseline" and n_runs > 1:
        print(
            f"{'':{_WIDTH}} in {outcome.seconds:.0f} s, so about {(n_runs - 1) * outcome.seconds:.0f} s for the others"
        )


def print_report(report: Report) -> None:
    """Print the findings, or what agreed."""
    print()
    if not report.findings:
        compared = [one.comparison for one in report.outcomes if one.comparison is not None]
        print(
            f"{report.experiment}: the numbers of two steps agree in {len(compared) + 1} runs. Compared in each: "
            f"{max((one.n_values for one in compared), default=0):,} numbers of {len(report.calls)} calls' outputs, "
            f"{max((one.n_tensors for one in compared), default=0)} gradients and weights, "
            f"{max((one.n_metrics for one in compared), default=0)} metrics. "
            f"Largest deviation: {max(compared, key=lambda one: one.largest).within if compared else 'none'}."
        )
        return
    for number, (finding, place) in enumerate(zip(report.findings, report.places, strict=True), start=1):
        print(f"{number}. {title(finding)}")
        if place:
            print(f"   at {place}")
        for variant, one in finding.by_variant.items():
            sample = f" of sample {one.sample}" if one.sample else ""
            share = f"; {one.n_differing} of {one.n_compared} differ" if one.n_compared > 1 else ""
            print(f"   {variant}: step {one.step}, {one.kind.name.lower()} '{one.name}'{sample}: "
                  f"{one.ours:.6g} in the baseline, {one.theirs:.6g} here{share}")  # fmt: skip
        for line in finding.evidence:
            print("   " + line.replace("\n", "\n   "))
        print(f"   {finding.cause.remedy}\n")
    n = len(report.findings)
    print(f"{report.experiment}: {n} {'reason' if n == 1 else 'reasons'} why its numbers depend on how it is run")


def title(finding: Finding) -> str:
    """Return the sentence that begins a finding."""
    who = f"call '{finding.call}'" if finding.call else "the algorithm"
    what = f" ({', '.join(finding.names[:4])}{', ...' if len(finding.names) > 4 else ''})" if finding.names else ""
    return f"{finding.cause.name}: {who}{what} {finding.cause.says}"


def _write(report: Report, path: str) -> None:
    """Write the report as JSON.

    Raises:
        UsageError: the file cannot be written.
    """
    from realrl.checker.as_json import as_json

    try:
        write_output(path, as_json(report))
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written: {error.strerror or error}") from error
    print(f"wrote {path}")

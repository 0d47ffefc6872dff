"""Numbers of many short runs, recorded and compared to the last digit: for a change that must not change any.

    python scripts/compare_numbers.py record before --python ../before/.venv/bin/python      of another checkout
    python scripts/compare_numbers.py record after                                           of this one
    python scripts/compare_numbers.py compare before after

The runs: each registered experiment with ``preset=tiny``, a few of them with options that add calls, the plans of
scripts/plan_table.py, and the first steps of the quickstart's reward model. A folder of recordings has a folder for
each run, with its ``metrics.jsonl`` and the responses in ``generations.jsonl``. What is recorded already is not run
again. Each run happens in an empty folder, so that the realrl that is installed for the interpreter is the one that
runs.

``compare`` takes all metrics but times, rates and memory: of those, only the names, and B, the later one, may have more
of them. Its responses may have more fields, and numbers of fewer digits. What depends on which of several
workers is faster, in two of the plans, is left out or compared but for rounding; the table says so. Both commands exit
with 1 where something failed or differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
STEPS = 3
LIMIT_S = 1200.0  # time limit of a run
END_LIMIT_S = 60.0  # time limit of a run's end after the request to stop
MEASURED = ("time_s/", "perf/", "memory_gb/")
ANY = ("",)
FILES = METRICS, RESPONSES = "metrics.jsonl", "generations.jsonl"
# Two recordings of one commit differ here: the rows that a worker still lacks depend on the call that came first.
BYTES_VARY = ("plan-eight", "plan-eight-all")
# And here: the samples that a call takes together depend on the workers that have generated theirs.
ROUNDING_VARIES = ("plan-eight-all",)
RELATIVE, FLOOR = 1e-5, 1e-6  # differences that rounding may leave
RUN_DIR = "run"  # in the folder in which a run happens
_POLL_S = 0.2
_WIDTH = 160  # least width of the table

TINY = ("preset=tiny", f"steps={STEPS}", "save.at_end=false")
SMALL = ("n_seqs=4", "generation.max_new_tokens=6")
SPLIT = ("cluster.n_devices_per_node=2", "allocation=split")
EVALUATION = ("eval.every_steps=2", "eval.at_start=true", "eval.n_seqs=11")
REWARD = {"score.py": "def score(prompt_ids, response_ids):\n    return len(set(response_ids)) / len(response_ids)\n"}
SAMPLER = {
    "respond.py": """\
def respond(model, prompts, ctx):
    eos_id = model.tokenizer.eos_token_id
    return model.engine.generate(prompts, ctx.generation, seed=ctx.seed, step=ctx.step, eos_id=eos_id)
"""
}
ROWS = {"rows.jsonl": "".join(json.dumps({"prompt": f"P{i}:", "answer": "abc"}) + "\n" for i in range(16))}


@dataclass(frozen=True)
class Case:
    """A run to record.

    Attributes:
        arguments: arguments of ``realrl run``.
        files: name -> text of files in the folder of the run.
        stop_after: number of steps in its metrics after which it is stopped; None lets it end by itself.
    """

    name: str
    arguments: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    stop_after: int | None = None


MORE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("sft", "rw", "dpo"), EVALUATION),
    **dict.fromkeys(("ppo", "grpo"), (*EVALUATION, "eval.n_responses=2", "eval.temperature=1")),
    "gen": ("n_seqs=8", "generation.n_responses=2", "algorithm.reward_function=score.py:score"),
}
VARIANTS = (
    Case(
        "ppo-adapters",
        ("ppo", *TINY, *SMALL, "models.actor.lora.rank=4", "models.critic.lora.rank=2", "algorithm.n_minibatches=2"),
    ),
    Case("ppo-reward-model", ("ppo", *TINY, *SMALL, "algorithm.reward_function=null", *SPLIT)),
    Case(
        "ppo-backends",
        (
            *("ppo", *TINY, *SMALL, "models.actor.backend=megatron"),
            *("models.critic.backend=deepspeed", "models.critic.optimizer.zero_stage=2"),
        ),
    ),
    Case(
        "grpo-pieces",
        (
            *("grpo", *TINY, *SMALL, "algorithm.advantage={grpo: 0.7, rloo: 0.3}", "algorithm.policy_loss=cispo"),
            *("algorithm.clip_ratio_high=1.0", "algorithm.kl_loss_coef=0", "algorithm.entropy_coef=0.01"),
            *("generation.n_responses=3", "algorithm.sampler=respond:respond", "algorithm.filter=equal_rewards"),
        ),
        SAMPLER,
    ),
    Case("grpo-recompute", ("grpo", *TINY, *SMALL, "algorithm.importance_cap=2.0", "generation.n_responses=2")),
    Case(
        "grpo-ahead",
        ("grpo", *TINY, *SMALL, "generation.n_responses=2", "max_staleness=1", "min_n_seqs=2", *SPLIT),
    ),
    Case(
        "distill-likeliest",
        ("distill", *TINY, *SMALL, "algorithm.policy_loss=teacher_kl", "algorithm.teacher_top_k=8"),
    ),
    Case("safe_rlhf-answers", ("safe_rlhf", *TINY, *SMALL, "dataset.path=rows.jsonl", "algorithm.ptx_coef=1.0"), ROWS),
)
# The number of steps stays as it is, because the learning rate depends on it.
QUICKSTART = Case("quickstart-rw", ("rw", "preset=quickstart", "save.at_end=false"), stop_after=STEPS)


def cases_of(experiments: Iterable[str], plans: Mapping[str, Sequence[str]], size: Sequence[str]) -> list[Case]:
    """Make all cases: of `experiments`, their variants, of `plans` with the overrides `size`, and the quickstart's."""
    plan = ("ppo", "preset=tiny", *size, f"steps={STEPS}")
    return [
        *(Case(name, (name, *TINY, *MORE_OPTIONS.get(name, ())), REWARD) for name in experiments),
        *VARIANTS,
        Case("plan-single", (*plan, "launcher=inline")),
        *(Case(f"plan-{name}", (*plan, *overrides)) for name, overrides in plans.items()),
        QUICKSTART,
    ]


def select(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases whose names match any of `patterns`.

    Raises:
        ValueError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            raise ValueError(f"no run is called '{pattern}'; choose from {', '.join(case.name for case in cases)}")
    return [case for case in cases if any(fnmatchcase(case.name, pattern) for pattern in patterns)]


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two recordings of a run.

    Attributes:
        n_steps: number of steps that both have.
        n_metrics: number of metrics whose values were compared.
        difference: description of the first difference; empty if all is equal.
    """

    n_steps: int = 0
    n_metrics: int = 0
    difference: str = ""


def compare_rows(
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
    *,
    left_out: tuple[str, ...] = MEASURED,
    additions: tuple[str, ...] = MEASURED,
    is_rounded: bool = False,
) -> Comparison:
    """Compare step by step: the names of all metrics, and the values of those that begin with none of `left_out`.

    Args:
        additions: beginnings of the names that `theirs` may have alone.
        is_rounded: True allows differences that rounding may leave.
    """
    compared: set[str] = set()
    n_steps = min(len(ours), len(theirs))
    for a, b in zip(ours, theirs, strict=False):
        for name in {**a, **b}:
            place = f"{name}, step {a['step']}"
            if name not in a and name.startswith(additions):
                continue
            if name not in a or name not in b:
                return Comparison(n_steps, len(compared), f"{place}: only in {'A' if name in a else 'B'}")
            if name.startswith(left_out):
                continue
            compared.add(name)
            x, y = json.dumps(a[name]), json.dumps(b[name])
            if x != y and not (is_rounded and _are_close(a[name], b[name])):
                return Comparison(n_steps, len(compared), f"{place}: {x} / {y}")
    difference = "" if len(ours) == len(theirs) else f"number of lines: {len(ours)} / {len(theirs)}"
    return Comparison(n_steps, len(compared), difference)


def _are_close(a: Any, b: Any) -> bool:
    if not all(isinstance(x, int | float) for x in (a, b)):
        return False
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=FLOOR)


def compare_runs(ours: Path, theirs: Path) -> Comparison:
    """Compare the files of two recordings of a run; both folders have the run's name."""
    left_out = (*MEASURED, "bytes/data") if ours.name in BYTES_VARY else MEASURED
    rules: dict[str, dict[str, Any]] = {
        METRICS: {"left_out": left_out, "is_rounded": ours.name in ROUNDING_VARIES},
        RESPONSES: {"additions": ANY, "is_rounded": True},
    }
    result = Comparison()
    for file in FILES:
        there = [(folder / file).exists() for folder in (ours, theirs)]
        if not any(there):
            continue
        if not all(there):
            return Comparison(result.n_steps, result.n_metrics, f"{file}: only in {'A' if there[0] else 'B'}")
        found = compare_rows(_read(ours / file), _read(theirs / file), **rules[file])
        if file == METRICS:
            result = found
        elif found.difference:
            result = Comparison(result.n_steps, result.n_metrics, f"{file}: {found.difference}")
        if result.difference:
            break
    return result


def compare(ours: Path, theirs: Path) -> int:
    """Print a table of all runs in either folder; returns 1 if anything differs or is missing."""
    recorded = [_recorded(folder) for folder in (ours, theirs)]
    table = Table(title=f"A = {ours}, B = {theirs}")
    table.add_column("run", no_wrap=True)
    for column in ("steps", "metrics"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("first difference (A / B)", overflow="fold")
    n_different = 0
    names = sorted(recorded[0] | recorded[1])
    for name in names:
        if not all(name in there for there in recorded):
            result = Comparison(difference=f"only in {'A' if name in recorded[0] else 'B'}")
        else:
            result = compare_runs(ours / name, theirs / name)
        n_different += bool(result.difference)
        table.add_row(name, str(result.n_steps), str(result.n_metrics), result.difference or _equal(name))
    console = Console()
    Console(width=max(console.width, _WIDTH), markup=False, highlight=False).print(table)
    print(f"{len(names) - n_different} runs are equal, {n_different} are not")
    return 1 if n_different or not names else 0


def _equal(name: str) -> str:
    rounding = " but for rounding" if name in ROUNDING_VARIES else ""
    return f"equal{rounding}{', without bytes/data' if name in BYTES_VARY else ''}"


def record(cases: Sequence[Case], python: Path, out: Path, *, n_jobs: int) -> int:
    """Record the runs that `out` lacks; returns 1 if any run failed."""
    missing = [case for case in cases if case.name not in _recorded(out)]
    print(f"{len(cases) - len(missing)} of {len(cases)} runs are recorded already", flush=True)
    if QUICKSTART in missing:
        subprocess.run([sys.executable, ROOT / "scripts" / "fetch_assets.py"], check=True)
    failed = []
    pool = ThreadPoolExecutor(n_jobs)
    try:
        running = {pool.submit(record_case, case, python, out): case.name for case in missing}
        for n_done, future in enumerate(as_completed(running), 1):
            name, place = running[future], f"{n_done}/{len(missing)}"
            try:
                print(f"{place} {name}: {future.result():.0f} s", flush=True)
            except RuntimeError as error:
                print(f"{place} {name} failed:\n{error}", flush=True)
                failed.append(name)
    finally:
        pool.shutdown(cancel_futures=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def record_case(case: Case, python: Path, out: Path) -> float:
    """Run one case and keep its files in `out`; returns the seconds that it took.

    Raises:
        RuntimeError: the run failed; the message is its output.
    """
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name, content in case.files.items():
            (folder / name).write_text(content, encoding="utf-8")
        _run(case, python, folder)
        partial = out / f".{case.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in FILES:
            if (folder / RUN_DIR / file).exists():
                lines = _read(folder / RUN_DIR / file)
                kept = lines if case.stop_after is None else [row for row in lines if row["step"] <= case.stop_after]
                (partial / file).write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        partial.rename(out / case.name)
    return time.monotonic() - start_s


def _run(case: Case, python: Path, folder: Path) -> None:
    command = [str(python), "-m", "realrl", "run", *case.arguments, f"run_dir={RUN_DIR}"]
    metrics, output = folder / RUN_DIR / FILES[0], folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=_environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        why = _wait(process, metrics, case.stop_after)
    text = output.read_text(encoding="utf-8", errors="replace")
    if why or not metrics.exists():
        raise RuntimeError(f"{' '.join(command)}\n{text}{why or 'it wrote no metrics'}")


def _wait(process: subprocess.Popen[bytes], metrics: Path, stop_after: int | None) -> str:
    """Wait for the end, or stop the run after `stop_after` steps; returns the problem, or an empty text."""
    limit_s = time.monotonic() + LIMIT_S
    try:
        while process.poll() is None:
            if stop_after is not None and metrics.exists() and len(_read(metrics)) >= stop_after:
                return ""
            if time.monotonic() > limit_s:
                return f"it took more than {LIMIT_S:.0f} s"
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return f"exit code {process.returncode}" if process.returncode else ""


def _environment() -> dict[str, str]:
    """The variables of a run: one thread, and the interpreter's own realrl."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def _ask(python: Path, *arguments: str) -> str:
    """Output of the interpreter, started away from any checkout."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, *arguments], cwd=folder, env=_environment(), capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise SystemExit(f"{python} {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _recorded(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob(f"*/{FILES[0]}") if not path.parent.name.startswith(".")}


def _read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; a line that is not complete is skipped."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run what is not recorded yet")
    recording.add_argument("out", type=Path, metavar="OUT_DIR")
    recording.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter (default: this one)")
    recording.add_argument("--only", nargs="+", metavar="NAME", default=["*"], help="some runs; may hold wildcards")
    recording.add_argument("--list", action="store_true", help="print the runs and stop")
    recording.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    comparing = commands.add_parser("compare", help="compare two folders of recordings")
    comparing.add_argument("ours", type=Path, metavar="A")
    comparing.add_argument("theirs", type=Path, metavar="B")
    options = parser.parse_args(arguments)
    if options.command == "compare":
        for folder in (options.ours, options.theirs):
            if not _recorded(folder):
                parser.error(f"{folder} holds no recordings")
        return compare(options.ours, options.theirs)

    from plan_table import PLANS, SIZE

    python = options.python.absolute()  # not resolved: a virtual environment is found by the place of its link
    experiments = [line.split()[0] for line in _ask(python, "-m", "realrl", "list").splitlines()[1:] if line.strip()]
    try:
        cases = select(cases_of(experiments, PLANS, SIZE), options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for case in cases:
            print(f"{case.name:20} {' '.join(case.arguments)}")
        return 0
    print(f"realrl of {_ask(python, '-c', 'import realrl; print(realrl.__file__)').strip()}")
    options.out.mkdir(parents=True, exist_ok=True)
    return record(cases, python, options.out, n_jobs=options.jobs)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""Output of ``realrl doctor``: memory of every device, lengths of the data, findings, alternatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from realrl.cli.console import print_table
from realrl.cli.plan_view import print_overlap
from realrl.errors import UsageError
from realrl.files import write_output
from realrl.sched.story import ranks_text

if TYPE_CHECKING:
    from realrl.doctor.report import Report
    from realrl.experiment.run_plan import RunPlan
    from realrl.plan.memory.load import Load
    from realrl.plan.memory.plan import Usage

_Value = TypeVar("_Value")
_BAR = 40
_MOST_ALTERNATIVES = 6


def print_report(report: Report, plan: RunPlan) -> None:
    """Print all tables, then the verdict."""
    if report.memory is not None:
        _print_roles(report, plan)
        _print_calls(report, plan)
        _print_devices(report)
        print_overlap(report.overlap)
    for histogram in report.histograms:
        most = max(n for _, _, n in histogram.bins)
        rows = [(_range(low, high), str(n), "#" * round(_BAR * n / most)) for low, high, n in histogram.bins]
        print_table((histogram.what, "texts", ""), rows, title="Dataset")
    rows = [(finding.check, finding.status.value, finding.message) for finding in report.findings]
    print_table(("check", "result", "found"), rows, title="Checks", folding=("found",))
    _print_alternatives(report)
    _print_verdict(report)


def write_report(report: Report, plan: RunPlan, path: str, *, machines: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write everything as JSON.

    Raises:
        UsageError: the file cannot be written.
    """
    import json

    try:
        write_output(path, json.dumps({**_as_json(report, plan), "machines": machines}, indent=1).encode() + b"\n")
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written: {error.strerror}") from error


# ---------------------------------------------------------------- memory


def _print_roles(report: Report, plan: RunPlan) -> None:
    assert report.memory is not None
    rows = []
    for name, by_rank in report.memory.roles.items():
        state = report.roles[name]
        for ranks, usage in _grouped(by_rank):
            training = state.backend if state.is_trained else "frozen"
            sizes = map(_bytes, (usage.parameters, usage.gradients, usage.optimizer, usage.host))
            rows.append((name, f"{state.home.strategy} on {ranks}", training, *sizes))
    columns = ("role", "devices", "training", "parameters", "gradients", "optimizer", "in host memory")
    print_table(columns, rows, title="Memory of each role, per device")
    runtime = {rank: usage.runtime for by_rank in report.memory.calls.values() for rank, usage in by_rank.items()}
    for ranks, n_bytes in _grouped(runtime):
        if n_bytes:
            print(f"CUDA's context and NCCL's connections take {_bytes(n_bytes)} on {ranks}")


def _print_calls(report: Report, plan: RunPlan) -> None:
    assert report.memory is not None
    rows = []
    for call, by_rank in report.memory.calls.items():
        for ranks, usage in _grouped(by_rank):
            rows.append((call, ranks, _work(report.memory.loads[call]), *_parts(usage)))
    columns = ("call", "devices", "at most", *_PARTS, "in all")
    print_table(columns, rows, title="Memory of each device in the fullest moment of a call", folding=("at most",))


def _print_devices(report: Report) -> None:
    assert report.memory is not None
    peaks = {rank: report.memory.peak(rank) for rank in report.memory.ranks}
    rows = []
    for ranks, (call, usage) in _grouped(peaks):
        rows.append((ranks, call, _bytes(usage.total), _share(usage.total, report.capacity_bytes)))
    print_table(("devices", "fullest in", "needs", "of its memory"), rows, title="Peak of each device")


def _share(number: int, whole: int) -> str:
    if not whole:
        return "unknown"
    return f"{'<1%' if number < whole / 100 else f'{number / whole:.0%}'} of {_bytes(whole)}"


_PARTS = ("parameters", "gradients", "optimizer", "copies", "KV cache", "activations", "rows", "CUDA, NCCL")


def _bytes(number: int) -> str:
    from realrl.plan.memory.plan import show_bytes

    return show_bytes(number)


def _parts(usage: Usage) -> tuple[str, ...]:
    numbers = (
        usage.parameters,
        usage.gradients,
        usage.optimizer,
        usage.copies,
        usage.cache,
        usage.activations,
        usage.rows,
        usage.runtime,
    )
    return (*map(_bytes, numbers), _bytes(usage.total))


def _work(load: Load) -> str:
    """Return the load of one data-parallel rank in words."""
    if load.n_runs:
        rows = f"{load.n_runs} x {load.n_rows}" if load.n_runs > 1 else str(load.n_rows)
        return f"{rows} rows of {load.longest_row} tokens"
    if not load.n_tokens:
        return f"{load.n_seqs} samples" if load.n_seqs else ""
    pieces = f"{load.n_mbs} x {load.n_tokens}" if load.n_mbs > 1 else str(load.n_tokens)
    return f"{pieces} tokens of {load.n_seqs} samples"


def _grouped(by_rank: Mapping[int, _Value]) -> list[tuple[str, _Value]]:
    """Return ranks with equal values together."""
    found: dict[_Value, list[int]] = {}
    for rank, value in sorted(by_rank.items(), key=itemgetter(0)):
        found.setdefault(value, []).append(rank)
    return [(ranks_text(ranks), value) for value, ranks in found.items()]


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


# ---------------------------------------------------------------- findings


def _print_alternatives(report: Report) -> None:
    if report.alternatives:
        rows = []
        for one in report.alternatives[:_MOST_ALTERNATIVES]:
            rows.append((" ".join(one.overrides), _bytes(one.peak_bytes), "yes" if one.fits else "no"))
        print_table(("with", "the fullest device needs", "fits"), rows, title="What would need less", folding=("with",))


def _print_verdict(report: Report) -> None:
    for finding in report.findings:
        if finding.remedy:
            print(f"{finding.status.value}: {finding.check}: {finding.remedy}")
    counts = Counter(finding.status.value for finding in report.findings if finding.status.value != "ok")
    if not counts:
        print("Everything is as it should be.")
    else:
        print(", ".join(f"{n} {_plural(status, n)}" for status, n in counts.items()) + ".")


def _plural(status: str, n: int) -> str:
    return status if n == 1 or status == "not checked" else f"{status}s"


def _as_json(report: Report, plan: RunPlan) -> dict[str, Any]:
    from dataclasses import asdict

    def by_rank(usages: Mapping[int, Usage]) -> dict[str, dict[str, int]]:
        return {str(rank): {"total": usage.total, **asdict(usage)} for rank, usage in usages.items()}

    memory: dict[str, Any] | None = None
    if report.memory is not None:
        peaks = {rank: report.memory.peak(rank) for rank in report.memory.ranks}
        memory = {
            "capacity_bytes": report.capacity_bytes,
            "roles": {name: by_rank(usages) for name, usages in report.memory.roles.items()},
            "calls": {
                name: {"load": asdict(report.memory.loads[name]), "devices": by_rank(usages)}
                for name, usages in report.memory.calls.items()
            },
            "peaks": {str(rank): {"call": call, "total": usage.total} for rank, (call, usage) in peaks.items()},
            "alternatives": [asdict(one) for one in report.alternatives],
            "overlap": report.overlap.notes,
        }
    return {
        "experiment": plan.experiment.name,
        "ok": not report.has_problem,
        "checks": [
            {"check": finding.check, **asdict(finding), "status": finding.status.value} for finding in report.findings
        ],
        "memory": memory,
        "dataset": [asdict(histogram) for histogram in report.histograms],
    }

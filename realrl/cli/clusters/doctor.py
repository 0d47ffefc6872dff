"""``realrl doctor --nodes``: what the machines of a run have, and which of them reach each other."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.cli.console import print_table
from realrl.errors import MachinesError, UsageError

if TYPE_CHECKING:
    from realrl.doctor.findings import Finding
    from realrl.experiment.run_plan import RunPlan
    from realrl.sched.nodes.inspection import MachineReport

_INTERRUPTED = 130
_N_LAST_WORDS = 3
_MOST_COLUMNS = 12  # of the table of connections


@dataclass(frozen=True)
class Inspected:
    """Outcome of the questions to all machines.

    Attributes:
        device_bytes: memory of the smallest device; None if it is not known.
    """

    reports: tuple[MachineReport, ...]
    findings: tuple[Finding, ...]
    device_bytes: int | None

    def as_json(self) -> list[dict[str, Any]]:
        """Return what each machine told, for a file."""
        import msgspec

        return [
            {
                "machine": one.name,
                "address": one.greeting.address,
                "facts": msgspec.to_builtins(one.greeting.facts),
                "free_bytes": dict(one.examined.free_bytes) if one.examined is not None else {},
                "clock_offset_s": one.offset_s,
                "clock_error_s": one.offset_error_s if math.isfinite(one.offset_error_s) else None,
                "connects_s": dict(one.seconds),
                "cannot_connect": dict(one.problems),
            }
            for one in self.reports
        ]


def ask_machines(plan: RunPlan) -> Inspected:
    """Let the machines of a run join, and ask them; their agents end then.

    Raises:
        UsageError: the run has no machines that join, or there is no port where they could.
        MachinesError: agents that were started have ended.
    """
    from realrl.doctor.findings import Status
    from realrl.doctor.nodes_checks import device_bytes, machine_findings
    from realrl.runtime.launchers.nodes import dismiss
    from realrl.runtime.nodes.inspect import inspect_machines
    from realrl.runtime.nodes.key import take_key
    from realrl.runtime.nodes.prepare import open_nodes
    from realrl.runtime.nodes.started import AGENTS_LOG
    from realrl.runtime.output.logs import tail

    config, cluster = plan.config, plan.config.cluster
    if not config.is_on_machines:
        raise UsageError(
            f"--nodes asks the machines that join a run, and with launcher={config.launcher} none do",
            remedy="Add launcher=external cluster.n_nodes=N, or leave --nodes out.",
        )
    run_dir = Path(config.run_dir or f"runs/{plan.experiment.name}").absolute()
    folder = next(parent for parent in (run_dir, *run_dir.parents) if parent.is_dir())
    with (
        tempfile.TemporaryDirectory(prefix="realrl-doctor-") as logs,
        open_nodes(plan, run_dir, take_key(), Path(logs)) as opened,
    ):
        nodes, agents = opened.start, opened.agents
        try:
            expected, reports = inspect_machines(
                nodes,
                folder,
                lambda text: print(text, flush=True),
                lambda: agents is not None and agents.loss() is not None,
            )
        except KeyboardInterrupt:
            dismiss(nodes, _INTERRUPTED)
            raise
        if agents is not None and (loss := agents.loss()) is not None:
            last_words = tail(Path(logs) / AGENTS_LOG, _N_LAST_WORDS)
            raise MachinesError(loss.message, remedy="; ".join(last_words) or loss.remedy)
        findings = machine_findings(reports, expected, device=cluster.device, waited_s=cluster.start_timeout_s)
        has_problem = any(finding.status is Status.PROBLEM for finding in findings)
        dismiss(nodes, UsageError.exit_code if has_problem else 0)
    return Inspected(reports, findings, device_bytes(reports, cluster.n_devices_per_node, cluster.device))


def print_machines(reports: Sequence[MachineReport]) -> None:
    """Print what the machines told, and who reaches whom."""
    if not reports:
        return
    rows = [_row(report) for report in reports]
    columns = ("machine", "address", "devices", "cores", "memory", "CPU", "python, torch, realrl", "run folder", "free")
    print_table((*columns, "/dev/shm", "clock"), rows, title="Machines", folding=("CPU", "devices"))
    names = list(dict.fromkeys(name for one in reports for name in (*one.seconds, *one.problems)))
    if 1 < len(names) <= _MOST_COLUMNS:
        rows = [(one.name, *(_connection(one, name) for name in names)) for one in reports if one.examined is not None]
        print_table(("from, to", *names), rows, title="Time to connect")


def _row(report: MachineReport) -> tuple[str, ...]:
    from realrl.doctor.nodes_checks import free_bytes, show_seconds
    from realrl.plan.memory.plan import show_bytes

    facts = report.greeting.facts
    devices = f"{facts.n_accelerators} x {facts.accelerator}" if facts.n_accelerators else "none"
    if facts.accelerator_bytes:
        devices += f", {show_bytes(facts.accelerator_bytes)}"
    words = facts.cpu.split()
    name = " ".join(words[:-1] or words)  # the last word is a digest
    cpu = f"{name} ({' '.join(facts.cpu_features)})" if facts.cpu_features else name
    versions = ", ".join(facts.versions.get(name, "none") for name in ("python", "torch", "realrl"))
    shared = "no answer"
    if report.examined is not None:
        shared = "shared" if report.examined.nonce and not report.examined.problem else "not shared"
    free = [free_bytes(report, is_shared_memory=is_memory) for is_memory in (False, True)]
    clock = "not known"
    if math.isfinite(report.offset_error_s):
        sign = "-" if report.offset_s > 0 else "+"  # of this machine against the master's
        clock = f"{sign}{show_seconds(abs(report.offset_s))} ± {show_seconds(report.offset_error_s)}"
    sizes = [show_bytes(n) if n is not None else "not known" for n in (facts.memory_bytes or None, *free)]
    return (
        report.name,
        report.greeting.address,
        devices,
        str(facts.n_cores),
        sizes[0],
        cpu,
        versions,
        shared,
        sizes[1],
        sizes[2],
        clock,
    )


def _connection(report: MachineReport, name: str) -> str:
    return f"{report.seconds[name] * 1000:.1f} ms" if name in report.seconds else "none"

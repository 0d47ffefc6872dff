"""Findings about the machines of a run, from what each of them told: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from realrl.doctor.findings import Finding, Status
from realrl.plan.memory.plan import show_bytes
from realrl.runtime.nodes.survey import SHARED_MEMORY
from realrl.sched.nodes.differences import Expected, difference_found, difference_of
from realrl.sched.nodes.inspection import MachineReport

CHECK = "machines"
_MUCH_OFF_S = 1.0
_LITTLE_SHARED_MEMORY = 1 << 28  # NCCL takes some MB of it for each pair of devices
_MOST_PAIRS = 10


def machine_findings(
    reports: Sequence[MachineReport], expected: Expected, *, device: str, waited_s: float
) -> tuple[Finding, ...]:
    """Return all findings, each with the check's name.

    Args:
        device: "cpu" or "cuda", for which the run is planned.
        waited_s: time in which machines could join.
    """
    found = [
        *_joined(reports, expected, waited_s),
        *_differences(reports, expected),
        *_connections(reports),
        *_clocks(reports),
        *_devices(reports, device),
    ]
    return tuple(Finding(one.status, one.message, one.remedy, CHECK) for one in found)


def device_bytes(reports: Sequence[MachineReport], n_each: int, device: str) -> int | None:
    """Return the memory of the smallest device, or None. On the CPU workers of a machine share its memory."""
    facts = [report.greeting.facts for report in reports]
    sizes = [one.accelerator_bytes if device == "cuda" else one.memory_bytes // n_each for one in facts]
    return min(sizes) if sizes and all(sizes) else None


def _joined(reports: Sequence[MachineReport], expected: Expected, waited_s: float) -> Iterator[Finding]:
    answered = [report.name for report in reports if report.examined is not None]
    names = ", ".join(answered) or "none"
    if len(answered) < expected.n_machines:
        message = f"{len(answered)} of {expected.n_machines} machines joined within {waited_s:g} s: {names}"
        remedy = "Start `realrl node` on the others, or raise cluster.start_timeout_s."
        yield Finding(Status.PROBLEM, message, remedy)
    else:
        yield Finding(Status.OK, f"{len(answered)} joined: {names}")


def _differences(reports: Sequence[MachineReport], expected: Expected) -> Iterator[Finding]:
    for report in reports:
        difference = difference_of(report.greeting, expected)
        if difference is None and report.examined is not None:
            difference = difference_found(report.examined, expected)
        if difference is not None:
            yield Finding(Status.PROBLEM, f"machine {report.name} {difference.message}", difference.remedy)
    kinds: dict[str, list[str]] = {}
    for report in reports:
        kinds.setdefault(report.greeting.facts.cpu, []).append(report.name)
    if len(kinds) > 1:
        groups = " and ".join(", ".join(names) for names in kinds.values())
        message = f"the CPUs of {groups} are of different kinds: numbers may differ by rounding from run to run"
        yield Finding(Status.WARNING, message, "Use machines of one kind where numbers must repeat bit for bit.")


def _connections(reports: Sequence[MachineReport]) -> Iterator[Finding]:
    broken = [(one.name, name, why) for one in reports for name, why in one.problems.items()]
    for name, other, why in broken[:_MOST_PAIRS]:
        message = f"{name} cannot connect to a free port of {other}: {why}"
        remedy = "Workers do so: a firewall between the machines must let connections to all ports above 1023 pass."
        yield Finding(Status.PROBLEM, message, remedy)
    if len(broken) > _MOST_PAIRS:
        yield Finding(Status.PROBLEM, f"{len(broken) - _MOST_PAIRS} more pairs of machines cannot connect")
    times = [seconds for one in reports for seconds in one.seconds.values()]
    if times and not broken:
        message = f"all {len(times)} pairs connect; the slowest in {max(times) * 1000:.1f} ms"
        yield Finding(Status.OK, message)


def _clocks(reports: Sequence[MachineReport]) -> Iterator[Finding]:
    known = [one for one in reports if math.isfinite(one.offset_error_s)]
    for one in known:
        if abs(one.offset_s) > _MUCH_OFF_S:
            way = "behind" if one.offset_s > 0 else "ahead"
            message = (
                f"the clock of {one.name} is {abs(one.offset_s):.1f} s {way}: times in its logs and of its files are"
            )
            yield Finding(Status.WARNING, f"{message} off as well, those of the trace are not", "Let NTP set it.")
    if known:
        off_s = max(abs(one.offset_s) + one.offset_error_s for one in known)
        yield Finding(Status.OK, f"no clock is off by more than {show_seconds(off_s)}")


def _devices(reports: Sequence[MachineReport], device: str) -> Iterator[Finding]:
    with_gpus = [one for one in reports if one.greeting.facts.n_accelerators]
    if device == "cpu" and reports and len(with_gpus) == len(reports):
        message = "all machines have CUDA devices, and the run is planned for CPUs, as this machine has none"
        yield Finding(Status.WARNING, message, "Say cluster.device=cuda.")
    for one in reports if device == "cuda" else ():
        free = free_bytes(one, is_shared_memory=True)
        if free is not None and free < _LITTLE_SHARED_MEMORY:
            message = (
                f"{show_bytes(free)} free in {SHARED_MEMORY} of {one.name}, by which NCCL connects devices of a machine"
            )
            yield Finding(Status.WARNING, message, "Give the container more (--shm-size), or remove old files there.")


def show_seconds(seconds: float) -> str:
    """Return a short time in words."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"


def free_bytes(report: MachineReport, *, is_shared_memory: bool) -> int | None:
    """Return the free space of a machine: in shared memory, or in the run's folder; None if it is not known."""
    if report.examined is None:
        return None
    for folder, free in report.examined.free_bytes.items():
        if (folder == SHARED_MEMORY) == is_shared_memory:
            return free
    return None

"""`realrl doctor`: the memory that a run needs, and its problems, before anything starts.

plan ──► checks, in order ──► findings
     └─► memory of every device, call by call ──► does it fit? ──► alternatives
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from realrl.doctor.data_checks import Histogram, histograms, row_lengths
from realrl.doctor.findings import Check, Finding, Status, run_checks
from realrl.doctor.logprob_checks import check_kernels, check_logprobs
from realrl.doctor.machine_checks import check_load
from realrl.doctor.memory import (
    Alternative,
    Fullest,
    alternatives,
    decide_overlap,
    device_capacity,
    fullest,
    memory_plan,
)
from realrl.doctor.preflight import CHECKS
from realrl.doctor.run_under_check import RunUnderCheck
from realrl.experiment.states import MARGIN, longest_rows, role_states
from realrl.plan.hooks import NO_OVERLAP, Overlap
from realrl.plan.memory.plan import MemoryPlan, RoleState, show_bytes

_CHECKS = (
    *CHECKS,
    Check("load", check_load),
    Check("kernels", check_kernels),
    Check("log-probabilities", check_logprobs, ("devices", "weights", "vocabularies", "lengths", "stop tokens")),
)
"""Those of a run's start, and three that stop no run."""


@dataclass(frozen=True)
class Report:
    """Result of `examine`.

    Attributes:
        findings: findings of all checks, in order.
        memory: memory of every device; None where the models cannot be read.
        roles: role -> its state in the memory plan.
        capacity_bytes: memory of each device; 0 where it is not known.
        alternatives: settings that need less, if the run does not fit comfortably; the best first.
        histograms: lengths of the dataset's texts.
        overlap: parameters that come early, or stay, as far as the memory of a device is known.
    """

    findings: tuple[Finding, ...]
    memory: MemoryPlan | None
    roles: dict[str, RoleState]
    capacity_bytes: int
    alternatives: tuple[Alternative, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    overlap: Overlap = NO_OVERLAP

    @property
    def has_problem(self) -> bool:
        """True if the run would be refused, or fail."""
        return any(finding.status is Status.PROBLEM for finding in self.findings)


def examine(run: RunUnderCheck) -> Report:
    """Run all checks and plan the memory; problems become findings, not exceptions."""
    findings = list(run_checks(_CHECKS, run, run.left_out))
    broken = {finding.check for finding in findings if finding.status in (Status.PROBLEM, Status.SKIPPED)}
    reads_answers = getattr(run.config.algorithm, "ptx_coef", 0) > 0
    if "dataset" in broken:
        rows = longest_rows(run.config, run.kind)
    else:
        rows = row_lengths(run.dataset, run.reading_tokenizer if reads_answers else None)
    memory, capacity, better = None, run.device_memory_bytes or 0, tuple[Alternative, ...]()
    overlap = NO_OVERLAP
    if "models" not in broken and run.models:
        device = run.planned_device
        memory = memory_plan(run.plan, run.models, rows, device=device)
        most = fullest(memory, device)
        # the capacity of an absent device without --device-memory is unknown; its needs are printed all the same
        told = run.device_memory_bytes or run.machine_memory_bytes
        is_known = told or "devices" not in broken
        capacity = device_capacity(run.config, device, told) if is_known else 0
        if capacity and run.plan.may_overlap:
            overlap = decide_overlap(run.plan, capacity=capacity)
        if capacity and most.needs > MARGIN * capacity and run.recompose is not None:
            better = tuple(
                alternatives(
                    run.plan,
                    rows,
                    needs=most.needs,
                    capacity=capacity,
                    recompose=run.recompose,
                    device=device,
                )
            )
        findings.append(
            replace(
                _verdict(
                    most,
                    capacity,
                    better,
                    is_given=run.device_memory_bytes is not None,
                    host="" if device.type != "cpu" else "this machine" if told is None else "the smallest machine",
                ),
                check="memory",
            )
        )
    return Report(
        findings=tuple(findings),
        memory=memory,
        roles=role_states(run.plan, run.models) if memory is not None else {},
        capacity_bytes=capacity,
        alternatives=better,
        histograms=tuple(histograms(run.dataset)) if "dataset" not in broken else (),
        overlap=overlap,
    )


def _verdict(most: Fullest, capacity: int, better: tuple[Alternative, ...], *, is_given: bool, host: str) -> Finding:
    """Return the finding about the memory of the fullest device.

    The worst case need not come: what has no room is a problem only where the user asks for a device of that size.
    """
    message = f"device {most.rank} needs {show_bytes(most.needs)} in {most.call}"
    if not capacity:
        return Finding(Status.SKIPPED, f"{message}; how much it has is not known", "Give --device-memory GB.")
    message += f", of {show_bytes(capacity)}"
    message += f", an equal share of the memory of {host}" if host and not is_given else ""
    if most.needs <= MARGIN * capacity:
        return Finding(Status.OK, message)
    remedy = "No single setting is enough: it takes more devices, larger ones, or a smaller model."
    if better and better[0].fits:
        remedy = f"For example {' '.join(better[0].overrides)}: {show_bytes(better[0].peak_bytes)}."
    if most.needs <= capacity:
        return Finding(Status.WARNING, f"{message}; allocators and kernels need some of the rest", remedy)
    if is_given:
        return Finding(Status.PROBLEM, message, remedy)
    return Finding(Status.WARNING, f"{message}: the run starts, and fails if its longest samples meet", remedy)

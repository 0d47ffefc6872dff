"""One check from start to end: the baseline, every variant that the models allow, and what they show."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from realrl.algo.policy.actor import PolicyActor
from realrl.checker.causes import FAILS
from realrl.checker.compare import Comparison, compare
from realrl.checker.diagnose import Diagnosis, Finding
from realrl.checker.failures import failure_of
from realrl.checker.places import Places
from realrl.checker.recording import Recording
from realrl.checker.runs import Done, Runs
from realrl.checker.variants import BASELINE, N_STEPS, VARIANTS, Variant
from realrl.config.policy_options import PolicyOptions
from realrl.errors import RunError, UsageError, counted
from realrl.experiment.pieces import chosen_pieces
from realrl.experiment.registry import find_interface
from realrl.graph.build import topological_calls
from realrl.graph.mfc import MFCDef


@dataclass(frozen=True)
class Outcome:
    """Outcome of a variant.

    Attributes:
        comparison: None for the baseline, and for runs that were left out or failed.
        left_out: why it did not run; empty if it did.
        failure: the error that ended it.
        seconds: time of the run.
    """

    variant: Variant
    comparison: Comparison | None = None
    left_out: str = ""
    failure: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """One phrase."""
        if self.left_out:
            return f"left out: {self.left_out}"
        if self.failure:
            return "failed"
        if self.comparison is None:
            return "done"
        n = len(self.comparison.differences)
        return counted(n, "difference") if n else f"the same, within {self.comparison.within}"


@dataclass(frozen=True)
class Report:
    """All of a check.

    Attributes:
        calls: calls, in the order of the graph.
        places: finding -> ``file:line`` of what is concerned; empty where it is realrl's own.
    """

    experiment: str
    calls: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    findings: tuple[Finding, ...]
    places: tuple[str, ...] = ()


class BaselineFailedError(RunError):
    """The baseline did not run; `output` is what it printed."""

    def __init__(self, output: str, exit_code: int) -> None:
        super().__init__("the algorithm does not run on one worker, so there is nothing to compare")
        self.output = output
        self.run_exit_code = exit_code


def check_algorithm(runs: Runs, *, without: Collection[str] = (), tell: Callable[[Outcome], None]) -> Report:
    """Run the baseline and its variants, and compare them.

    Args:
        without: names of variants to leave out.
        tell: hears the verdict on each run when it is there.

    Raises:
        BaselineFailedError: the algorithm does not run at all.
        UsageError: the baseline was refused.
    """
    mfcs = topological_calls(runs.plan.graph)
    base, outcome = _run(runs, BASELINE)
    assert base is not None
    if base.exit_code:
        raise BaselineFailedError(base.output, base.exit_code)
    tell(outcome)
    outcomes, others, failed = [outcome], dict[str, tuple[Recording, Comparison]](), dict[str, Done]()
    for variant in VARIANTS[1:]:
        reason = "--without" if variant.name in without else runs.reason_against(variant)
        if reason:
            outcomes.append(Outcome(variant, left_out=reason))
        else:
            done, outcome = _run(runs, variant, base.recording, mfcs=mfcs)
            if done is not None and outcome.comparison is None:
                failed[variant.name] = done
            elif done is not None and outcome.comparison is not None:
                others[variant.name] = (done.recording, outcome.comparison)
            outcomes.append(outcome)
        tell(outcomes[-1])
    findings = Diagnosis(base.recording, others, mfcs).findings()
    findings = [_with_pieces(one, runs) for one in findings]
    findings += [_failed(name, done) for name, done in failed.items()]
    places = Places(base.recording, {mfc.name: mfc for mfc in mfcs}, runs.plan.config.algorithm)
    return Report(
        runs.plan.experiment.name,
        tuple(mfc.name for mfc in mfcs),
        tuple(outcomes),
        tuple(findings),
        tuple(places.of(finding) for finding in findings),
    )


def _run(
    runs: Runs, variant: Variant, base: Recording | None = None, mfcs: Sequence[MFCDef] = ()
) -> tuple[Done | None, Outcome]:
    start_s = time.monotonic()
    try:
        done = runs.run(variant)
    except UsageError as error:
        if base is None:
            raise
        return None, Outcome(variant, left_out=error.message)
    seconds = time.monotonic() - start_s
    if done.exit_code:
        return done, Outcome(variant, failure=failure_of(done.output), seconds=seconds)
    comparison = None
    if base is not None:
        comparison = compare(base, done.recording, mfcs, n_steps=N_STEPS, whole=variant.keeps_layout)
    return done, Outcome(variant, comparison, seconds=seconds)


def _failed(variant: str, done: Done) -> Finding:
    return Finding(FAILS, "", 0, (), {}, (f"{variant}: {failure_of(done.output)}",))


def _with_pieces(finding: Finding, runs: Runs) -> Finding:
    """Add the pieces that the options chose, where a policy's train_step is concerned, which runs them."""
    options = runs.plan.config.algorithm
    mfc = next((mfc for mfc in runs.plan.mfcs if mfc.name == finding.call), None)
    if mfc is None or not mfc.is_train or not isinstance(options, PolicyOptions):
        return finding
    interface = find_interface(mfc.interface.name)
    if not (isinstance(interface, type) and issubclass(interface, PolicyActor)):
        return finding
    kinds = ("advantage",) if finding.names == ("advantage",) else ("advantage", "policy_loss")
    chosen = ", ".join(f"algorithm.{one.kind}={one.name}" for one in chosen_pieces(options) if one.kind in kinds)
    return replace(finding, evidence=(*finding.evidence, f"it runs {chosen}"))

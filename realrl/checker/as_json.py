"""The report of a check as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from realrl.checker.check import Outcome, Report
from realrl.checker.compare import Difference
from realrl.checker.diagnose import Finding


def as_json(report: Report) -> bytes:
    """Return the report; a difference that has no size, as one of tokens, has null as `relative`."""
    values = {
        "experiment": report.experiment,
        "is_invariant": not report.findings,
        "findings": [_finding(one, place) for one, place in zip(report.findings, report.places, strict=True)],
        "runs": [_outcome(one) for one in report.outcomes],
    }
    return json.dumps(values, indent=1).encode() + b"\n"


def _finding(finding: Finding, place: str) -> dict[str, object]:
    return {
        "cause": finding.cause.name,
        "says": finding.cause.says,
        "remedy": finding.cause.remedy,
        "call": finding.call,
        "step": finding.step,
        "names": list(finding.names),
        "place": place,
        "evidence": list(finding.evidence),
        "differences": {variant: _difference(one) for variant, one in finding.by_variant.items()},
    }


def _outcome(outcome: Outcome) -> dict[str, object]:
    found: dict[str, object] = {
        "name": outcome.variant.name,
        "what": outcome.variant.what,
        "verdict": outcome.verdict,
        "seconds": round(outcome.seconds, 2),
    }
    comparison = outcome.comparison
    if comparison is not None:
        found |= {
            "n_values": comparison.n_values,
            "n_tensors": comparison.n_tensors,
            "n_metrics": comparison.n_metrics,
            "largest_within": comparison.largest,
            "differences": [_difference(one) for one in comparison.differences],
        }
    return found | ({"failure": outcome.failure} if outcome.failure else {})


def _difference(one: Difference) -> dict[str, object]:
    values = {**asdict(one), "kind": one.kind.name.lower()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

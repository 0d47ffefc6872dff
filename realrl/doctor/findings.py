"""Findings of checks, and the order in which checks run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from realrl.errors import Error, UsageError
from realrl.experiment.loading import failed_in


class Status(Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # the run starts, and may not behave as intended
    PROBLEM = "problem"  # the run would be refused, or would fail
    SKIPPED = "not checked"


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        message: the result, with its numbers.
        remedy: advice to the user; "" where there is nothing to do.
        check: name of the check, which `run_checks` fills in.
    """

    status: Status
    message: str
    remedy: str = ""
    check: str = ""


@dataclass(frozen=True)
class Check:
    """A named check.

    Attributes:
        run: returns the findings about its subject; an `Error` that it raises is a problem.
        needs: names of checks that must find no problem before this one runs.
        reads: True if it reads models, rows or rewards.
    """

    name: str
    run: Callable[[Any], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    reads: bool = False


def run_checks(
    checks: Sequence[Check], subject: object, left_out: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """Yield the findings of all checks, in order; a check that needs one with a problem is not run.

    Args:
        left_out: names of checks that are not run -> the reason.
    """
    broken, reasons = set[str](), dict(left_out or {})
    for check in checks:
        missing = [name for name in check.needs if name in reasons]
        if check.name in reasons or missing:
            reason = reasons.setdefault(check.name, f"needs what was left out: {', '.join(missing)}")
            yield Finding(Status.SKIPPED, reason, check=check.name)
            continue
        missing = [name for name in check.needs if name in broken]
        if missing:
            broken.add(check.name)
            yield Finding(Status.SKIPPED, f"needs what has a problem: {', '.join(missing)}", check=check.name)
            continue
        try:
            found = list(check.run(subject))
        except Error as error:
            found = [Finding(Status.PROBLEM, error.message, error.remedy or "")]
        except Exception as error:  # noqa: BLE001 - a file that breaks one check must not hide the others
            own = failed_in(error)
            message = f"this check failed with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            remedy = "Look at the files that it reads; if nothing is wrong with them, report it as a bug in realrl."
            found = [
                Finding(
                    Status.PROBLEM,
                    " ".join(own.message.split())[:300] if own else message,
                    own.remedy or "" if own else remedy,
                )
            ]
        if any(finding.status is Status.PROBLEM for finding in found):
            broken.add(check.name)
        yield from (replace(finding, check=check.name) for finding in found)


def refuse(findings: Iterable[Finding]) -> None:
    """Raise an error if there is a problem among the findings.

    Raises:
        UsageError: lists all problems, each with its remedy.
    """
    problems = list({one.message: one for one in findings if one.status is Status.PROBLEM}.values())
    if len(problems) == 1:
        raise UsageError(problems[0].message, remedy=problems[0].remedy or None)
    if problems:
        lines = [
            line for one in problems for line in (f"{one.check}: {one.message}", f"  {one.remedy}" * bool(one.remedy))
        ]
        listed = "\n".join(f"  {line}" for line in lines if line)
        raise UsageError(f"{len(problems)} things stand in the way of this run:\n{listed}")

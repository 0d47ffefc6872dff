"""What a check found, and in which order checks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from realrl.errors import Error

Subject = TypeVar("Subject")


class Status(Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # the run starts, and may not do what is meant
    PROBLEM = "problem"  # the run would be refused, or would fail
    SKIPPED = "not checked"


@dataclass(frozen=True)
class Finding:
    """One thing that a check has to say.

    Attributes:
        check: name of the check.
        status: how bad it is.
        message: what was found, with its numbers.
        remedy: what the user can do; "" where there is nothing to do.
    """

    check: str
    status: Status
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A named check.

    Attributes:
        run: returns what it found; an `Error` that it raises is a problem.
        needs: checks without a problem in which this one has a meaning.
    """

    name: str
    run: Callable[[Subject], Sequence[Finding]]
    needs: tuple[str, ...] = ()


def run_checks(checks: Sequence[Check[Subject]], subject: Subject) -> Iterator[Finding]:
    """The findings of all checks, in order; a check that needs one with a problem is not run."""
    broken: set[str] = set()
    for check in checks:
        missing = [name for name in check.needs if name in broken]
        if missing:
            broken.add(check.name)
            yield Finding(check.name, Status.SKIPPED, f"needs what has a problem: {', '.join(missing)}")
            continue
        try:
            found = check.run(subject)
        except Error as error:
            found = [Finding(check.name, Status.PROBLEM, error.message, error.remedy or "")]
        except Exception as error:  # noqa: BLE001 - what a file does to one check must not hide the others
            message = f"this check failed with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            remedy = "Look at the files that it reads; if nothing is wrong with them, report it as a bug in realrl."
            found = [Finding(check.name, Status.PROBLEM, message, remedy)]
        if any(finding.status is Status.PROBLEM for finding in found):
            broken.add(check.name)
        yield from found

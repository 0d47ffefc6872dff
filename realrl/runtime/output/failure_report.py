"""The failure report, on one screen.

It names the failure, the workers that wait for it, the end of the traceback or of the dead worker's log, and a remedy.
"""

from __future__ import annotations

import signal
import textwrap
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from realrl.errors import Error, UsageError
from realrl.runtime.output.logs import tail
from realrl.runtime.transport.base import describe_ids
from realrl.sched import events
from realrl.sched.master.diagnosis import SILENCE_REMEDY, death_remedy

MAX_LINES = 24
_MAX_WIDTH = 120
_MAX_MESSAGE_LINES = 6
_MAX_FOOT_LINES = 8
_MOST_OF_LAST = 4  # lines of the last one of a traceback
_KINDS_OF_GONE_WORKERS = (
    events.FailureKind.WORKER_LOST,
    events.FailureKind.WORKER_EXITED,
    events.FailureKind.WORKER_SILENT,
)


@dataclass(frozen=True)
class FailureReport:
    """Cause of a run's failure.

    Attributes:
        headline: one sentence with the process, the failure, the call and the step.
        message: text of the exception, or "".
        sample_ids: the samples concerned, where known.
        waiting: global rank -> its activity, for ranks that wait.
        traceback: the worker's traceback, or "".
        log: log file with more.
        quotes_log: True shows the last lines of `log`, from byte `log_begin` on, where this process began to write.
        remedy: advice for the user, or "".
        exit_code: exit code of the run.
        again: what happens next by itself, where it is known that the run goes on; the report is a warning then.
    """

    headline: str
    message: str = ""
    sample_ids: Sequence[str] = ()
    waiting: Mapping[int, str] | None = None
    traceback: str = ""
    log: Path | None = None
    quotes_log: bool = False
    remedy: str = ""
    exit_code: int = 1
    log_begin: int = 0
    again: str = ""

    def __str__(self) -> str:
        return render(self)


def signal_name(exit_code: int) -> str:
    """Text for an exit code: "killed by SIGKILL", "exited with code 3"."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def master_died(
    pid: int, exit_code: int, *, silent_s: float = 0.0, log: Path | None = None, log_begin: int = 0, again: str = ""
) -> FailureReport:
    """Report of a master process that ended without a report of its own; for `silent_s` see `AttemptEnded`."""
    silence = f"gave no sign of life for {silent_s:.0f} s and was killed"
    what = silence if silent_s else f"died: {signal_name(exit_code)}"
    resume = "" if again else " Continue from the last checkpoint with resume=auto."
    return FailureReport(
        headline=f"the master process ({pid}) {what}; its workers were stopped",
        log=log,
        quotes_log=True,
        remedy=f"{SILENCE_REMEDY if silent_s else death_remedy(exit_code)}{resume}",
        log_begin=log_begin,
        again=again,
    )


def from_failure(
    failure: events.Failure, *, log: Path | None = None, log_begin: int = 0, again: str = ""
) -> FailureReport:
    """Report of the first cause, as the master's state machine found it."""
    usage = failure.exit_code == UsageError.exit_code
    calls = " and ".join(failure.waiting_calls)
    return FailureReport(
        headline=failure.message,
        sample_ids=failure.sample_ids,
        waiting=dict.fromkeys(failure.waiting_ranks, calls),
        traceback="" if usage else failure.traceback,
        log=None if usage else log,
        quotes_log=failure.kind in _KINDS_OF_GONE_WORKERS,
        remedy=failure.remedy,
        exit_code=failure.exit_code,
        log_begin=log_begin,
        again=again,
    )


def from_error(error: Error, *, log: Path | None = None) -> FailureReport:
    """Report of a deliberate error raised in this process: one sentence and a remedy, no traceback."""
    where = _where(error.call, error.step)
    return FailureReport(
        headline=f"{error.message}{where}",
        log=log if error.exit_code == 1 else None,
        remedy=error.remedy or "",
        exit_code=error.exit_code,
    )


def from_bug(error: BaseException, *, log: Path | None = None) -> FailureReport:
    """Report of an exception that realrl did not expect."""
    return FailureReport(
        headline=f"realrl itself failed: {type(error).__name__}",
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        log=log,
        remedy="This is a bug in realrl; please report it with this text and the log.",
    )


def render(failure: FailureReport, *, max_lines: int = MAX_LINES) -> str:
    """The report as plain text of at most `max_lines` lines; the traceback or log is cut from above to fit."""
    has_body = bool(failure.traceback) or failure.quotes_log
    head = _wrapped(
        f"realrl: {'warning' if failure.again else 'error'}: {failure.headline}".splitlines(),
        _MAX_MESSAGE_LINES if has_body else max_lines - _MAX_FOOT_LINES,
    )
    head += _wrapped([f"  {line}" for line in failure.message.splitlines()], _MAX_MESSAGE_LINES)
    unnamed = [sample_id for sample_id in failure.sample_ids if repr(sample_id) not in failure.headline]
    if unnamed:
        head.append(f"  samples: {describe_ids(unnamed, 6)}")
    foot = _waiting_lines(failure.waiting or {})
    if failure.log is not None:
        foot.append(f"  log: {failure.log}")
    foot += _wrapped([f"  remedy: {line}" for line in failure.remedy.splitlines()], _MAX_MESSAGE_LINES)
    foot += [f"  {failure.again}"] * bool(failure.again)
    body = _body(failure, max_lines - len(head) - len(foot))
    return "\n".join((*head, *body, *foot))


def _body(failure: FailureReport, room: int) -> list[str]:
    """End of the traceback, or else of the log, with a title; empty if fewer than 3 lines are left.

    The last line, which tells what was raised, is folded; the others are cut.
    """
    if room < 3:
        return []
    if failure.traceback:
        lines = [line.rstrip() for line in failure.traceback.splitlines() if line.strip(" ^~")]
        title = "traceback"
    else:
        lines, title = (
            tail(failure.log, room, begin=failure.log_begin) if failure.quotes_log else [],
            "last lines of its log",
        )
    if not lines:
        return []
    last = _wrapped([f"    {lines.pop()}"], min(_MOST_OF_LAST, room - 1))
    n_before = room - 1 - len(last)
    shown = lines[-n_before:] if n_before else []
    hidden = len(lines) - len(shown)
    more = f" (its last {len(shown) + 1} of {len(lines) + 1} lines)" if failure.traceback and hidden else ""
    return [f"  {title}{more}:", *(_clip(f"    {line}") for line in shown), *last]


def _waiting_lines(waiting: Mapping[int, str]) -> list[str]:
    """One line per activity of waiting workers: "waiting for it: workers 1, 2 (actor_train)"."""
    ranks_by_activity: dict[str, list[int]] = {}
    for rank, activity in sorted(waiting.items()):
        ranks_by_activity.setdefault(activity, []).append(rank)
    lines = []
    for activity, ranks in list(ranks_by_activity.items())[:4]:
        noun = "worker" if len(ranks) == 1 else "workers"
        lines.append(
            f"  waiting for it: {noun} {describe_ids([str(r) for r in ranks], 8)}" + f" ({activity})" * bool(activity)
        )
    return lines


def _where(call: str | None, step: int | None) -> str:
    at_step = f" at step {step}" if step is not None else ""
    return f" in call '{call}'{at_step}" if call is not None else at_step


def _wrapped(lines: Iterable[str], max_lines: int) -> list[str]:
    """Fold long lines instead of cutting them, because their ends name samples and remedies."""
    folded: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        folded += textwrap.wrap(line, _MAX_WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return folded[:max_lines]


def _clip(line: str) -> str:
    return line if len(line) <= _MAX_WIDTH else line[: _MAX_WIDTH - 1] + "…"

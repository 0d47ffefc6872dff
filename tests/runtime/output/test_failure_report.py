from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from realrl.errors import CallError, ConfigError
from realrl.runtime.output import failure_report as report
from realrl.runtime.output.logs import log_size, tail
from realrl.sched.events import WorkerLost, WorkerSilent
from realrl.sched.master import diagnosis
from realrl.sched.messages import RunCall, WorkerFailed

DEEP = "Traceback (most recent call last):\n" + "".join(
    f'  File "model.py", line {line}, in f{line}\n    f{line + 1}()\n    ~~~~^^\n' for line in range(100)
)


def failed(traceback: str = DEEP, message: str = "output has a NaN", waiting: int = 2) -> report.FailureReport:
    reply = WorkerFailed(3, 7, "rew_inf", 12, "ValueError", message, traceback + "ValueError: x\n", 1, ("0/17", "0/18"))
    decided = msgspec.structs.replace(
        diagnosis.worker_failed(reply, (), None),
        waiting_ranks=tuple(range(waiting)),
        waiting_calls=("actor_train",),
    )
    return report.from_failure(decided, log=Path("logs/w.log"))


def test_the_report_of_a_failed_worker_tells_everything_on_one_screen() -> None:
    text = str(failed())
    lines = text.splitlines()
    assert lines[:2] == [
        "realrl: error: worker 3 failed in call 'rew_inf' of step 12: ValueError: output has a NaN",
        "  samples: 0/17, 0/18",
    ]
    assert lines[-2:] == [
        "  waiting for it: workers 0, 1 (actor_train)",
        "  log: logs/w.log",
    ]
    assert "    ValueError: x" in lines  # the end of the traceback is what tells
    assert "f99" in text
    assert "of 202 lines" in text
    assert "~~~~^^" not in text
    assert len(lines) == report.MAX_LINES


def test_a_long_message_does_not_push_the_rest_off_the_screen() -> None:
    lines = str(failed(message="\n".join("x" * 500 for _ in range(90)))).splitlines()
    assert len(lines) <= report.MAX_LINES
    assert max(map(len, lines)) <= 160
    assert "    ValueError: x" in lines


def test_the_last_line_of_a_traceback_is_folded_not_cut() -> None:
    last = "ValueError: " + " ".join(f"word{i}" for i in range(40))
    for frames in (DEEP, ""):
        text = str(report.from_failure(diagnosis.worker_failed(
            WorkerFailed(3, 7, "rew_inf", 12, "ValueError", "x", frames + last + "\n", 1, ()), (), None
        )))  # fmt: skip
        assert "…" not in text
        assert last in " ".join(text.split())
        assert len(text.splitlines()) <= report.MAX_LINES


def test_a_long_message_without_traceback_may_take_most_of_the_screen() -> None:
    text = report.render(report.FailureReport("\n".join(f"line {n}" for n in range(90)), remedy="Mend it."))
    assert "line 15" in text
    assert text.endswith("  remedy: Mend it.")
    assert len(text.splitlines()) <= report.MAX_LINES


def test_samples_that_the_message_names_are_not_repeated() -> None:
    assert "samples" not in str(report.FailureReport("NaN in sample '0/1'", sample_ids=("0/1",)))


def test_hundreds_of_waiting_workers_take_one_line() -> None:
    assert "workers 0, 1, 2, 3, 4, 5, 6, 7 and 248 more (actor_train)" in str(failed(waiting=256))


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (-signal.SIGKILL, ["killed by SIGKILL", "Was the machine out of memory?"]),
        (-signal.SIGSEGV, ["killed by SIGSEGV", "native library crashed"]),
        (-signal.SIGTERM, ["killed by SIGTERM", "job scheduler"]),
        (-250, ["killed by signal 250"]),
        (3, ["exited with code 3", "Code in it ended the process", "its log tells"]),
    ],
)
def test_a_dead_worker_is_named_with_its_signal_and_last_words(
    tmp_path: Path, exit_code: int, expected: list[str]
) -> None:
    log = tmp_path / "worker_1.log"
    log.write_text("".join(f"line {n}\n" for n in range(1000)))
    lost = WorkerLost(1, exit_code, report.signal_name(exit_code))
    call = RunCall(4, 0, "actor_gen", 2, (("0/1",),), ())
    text = str(report.from_failure(diagnosis.worker_lost(lost, (), call), log=log))
    assert text.startswith(f"realrl: error: worker 1 ended ({expected[0]}) in call 'actor_gen' of step 2\n")
    for part in (*expected, "line 999", str(log)):
        assert part in text
    assert len(text.splitlines()) <= report.MAX_LINES


def test_a_loss_after_which_the_run_goes_on_is_a_warning_about_this_attempt(tmp_path: Path) -> None:
    log = tmp_path / "worker_1.log"
    log.write_text("the attempt before\n")
    begin = log_size(log)
    log.write_text("the attempt before\nthis attempt\n")
    lost = diagnosis.worker_lost(WorkerLost(1, -9, ""), (), None)
    text = str(report.from_failure(lost, log=log, log_begin=begin, again="it starts again by itself"))
    assert text.startswith("realrl: warning: worker 1 ended ")
    assert "this attempt" in text
    assert "the attempt before" not in text
    assert text.endswith("\n  it starts again by itself")
    assert log_size(tmp_path / "none.log") == log_size(None) == 0


def test_a_silent_worker_is_named_with_its_call_and_its_stack(tmp_path: Path) -> None:
    log = tmp_path / "worker_2.log"
    log.write_text("Thread 0x1, most recent call first\n")
    silent = WorkerSilent(2, "critic_train", 125.4)
    call = RunCall(4, 0, "critic_train", 9, (("0/1",),), ())
    text = str(report.from_failure(diagnosis.worker_silent(silent, (), call), log=log))
    assert text.startswith("realrl: error: worker 2 gave no sign of life for 125 s in call 'critic_train' of step 9")
    assert "most recent call first" in text
    assert "cluster.worker_timeout_s" in text


def test_a_users_mistake_has_no_traceback_and_exit_code_2() -> None:
    failure = report.from_error(ConfigError("steps must be positive, not -1", remedy="Write steps=1 or more."))
    assert str(failure) == "realrl: error: steps must be positive, not -1\n  remedy: Write steps=1 or more."
    assert failure.exit_code == 2


def test_an_error_with_a_call_says_where() -> None:
    failure = report.from_error(CallError("a metric is NaN", call="actor_train", step=3))
    assert failure.headline == "a metric is NaN in call 'actor_train' at step 3"
    assert failure.exit_code == 1


def test_a_bug_shows_its_traceback() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        text = str(report.from_bug(error))
    assert text.startswith("realrl: error: realrl itself failed: KeyError")
    assert "test_failure_report.py" in text
    assert "report it" in text


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\xff first\n\nsecond  \n")
    assert tail(log, 1) == ["second"]
    assert tail(log, 9)[1:] == ["second"]
    assert tail(tmp_path / "none.log", 9) == []
    assert tail(None, 9) == []
    assert tail(log, 0) == []


def test_a_message_of_several_lines_keeps_them() -> None:
    failure = report.FailureReport(headline="the reward function raised\n  line 2 of your file\nZeroDivisionError")
    assert report.render(failure).splitlines() == [
        "realrl: error: the reward function raised",
        "  line 2 of your file",
        "ZeroDivisionError",
    ]

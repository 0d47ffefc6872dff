from __future__ import annotations

import signal
from pathlib import Path

import pytest

from realrl.errors import CallError, ConfigError
from realrl.runtime import report
from realrl.runtime.logs import tail
from realrl.sched.messages import WorkerFailed

DEEP = "Traceback (most recent call last):\n" + "".join(
    f'  File "model.py", line {line}, in f{line}\n    f{line + 1}()\n    ~~~~^^\n' for line in range(100)
)


def failed(traceback: str = DEEP, message: str = "output has a NaN") -> WorkerFailed:
    return WorkerFailed(3, 7, "rew_inf", 12, "CallError", message, traceback + "CallError: x\n", 1, ("0/17", "0/18"))


def test_the_report_of_a_failed_worker_tells_everything_on_one_screen() -> None:
    failure = report.worker_failed(
        failed(), waiting={1: "actor_train", 0: "actor_train", 2: ""}, log=Path("logs/w.log")
    )
    text = str(failure)
    lines = text.splitlines()
    assert lines[:3] == [
        "error: worker 3 failed in call 'rew_inf' at step 12: CallError",
        "  output has a NaN",
        "  samples: 0/17, 0/18",
    ]
    assert lines[-3:] == [
        "  waiting for it: workers 0, 1 (actor_train)",
        "  waiting for it: worker 2",
        "  log: logs/w.log",
    ]
    assert "    CallError: x" in lines  # the end of the traceback is what tells
    assert "f99" in text
    assert "of 202 lines" in text
    assert "~~~~^^" not in text
    assert len(lines) == report.MAX_LINES


def test_a_long_message_does_not_push_the_rest_off_the_screen() -> None:
    failure = report.worker_failed(failed(message="\n".join("x" * 500 for _ in range(90))), waiting={0: ""})
    lines = str(failure).splitlines()
    assert len(lines) <= report.MAX_LINES
    assert max(map(len, lines)) <= 160
    assert "    CallError: x" in lines


def test_hundreds_of_waiting_workers_take_one_line() -> None:
    failure = report.worker_failed(failed(), waiting=dict.fromkeys(range(256), "critic_train"))
    assert "workers 0, 1, 2, 3, 4, 5, 6, 7 and 248 more (critic_train)" in str(failure)


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (-signal.SIGKILL, ["killed by SIGKILL", "Was the machine out of memory?"]),
        (-signal.SIGSEGV, ["killed by SIGSEGV", "native library crashed"]),
        (-signal.SIGTERM, ["killed by SIGTERM", "job scheduler"]),
        (-250, ["killed by signal 250"]),
        (3, ["exited with code 3", "Its log tells"]),
    ],
)
def test_a_dead_worker_is_named_with_its_signal_and_last_words(
    tmp_path: Path, exit_code: int, expected: list[str]
) -> None:
    log = tmp_path / "worker_1.log"
    log.write_text("".join(f"line {n}\n" for n in range(1000)))
    failure = report.worker_died(1, exit_code, call="actor_gen", step=2, waiting={0: "actor_gen"}, log=log)
    text = str(failure)
    assert text.startswith("error: worker 1 died in call 'actor_gen' at step 2: " + expected[0])
    for part in (*expected, "line 999", "waiting for it: worker 0 (actor_gen)", str(log)):
        assert part in text
    assert len(text.splitlines()) <= report.MAX_LINES


def test_a_silent_worker_is_named_with_its_call() -> None:
    text = str(report.worker_silent(2, 125.4, call="critic_train", step=9))
    assert text.splitlines()[0] == "error: worker 2 has not answered for 125 s in call 'critic_train' at step 9"
    assert "cluster.worker_timeout_s" in text


def test_a_users_mistake_has_no_traceback_and_exit_code_2() -> None:
    failure = report.from_error(ConfigError("steps must be positive, not -1", remedy="Write steps=1 or more."))
    assert str(failure) == "error: steps must be positive, not -1\n  remedy: Write steps=1 or more."
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
    assert text.startswith("error: realrl itself failed: KeyError")
    assert "test_report.py" in text
    assert "report it" in text


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\xff first\n\nsecond  \n")
    assert tail(log, 1) == ["second"]
    assert tail(log, 9)[1:] == ["second"]
    assert tail(tmp_path / "none.log", 9) == []
    assert tail(None, 9) == []
    assert tail(log, 0) == []

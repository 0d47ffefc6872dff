"""A session inside this process: exit codes, files, and what is closed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from realrl.errors import ConfigError, TransportError, UsageError
from realrl.runtime.processes import session as sessions
from realrl.runtime.processes.lifeline import socket_folder
from realrl.runtime.processes.session import (
    Session,
    SessionStart,
    decode_start,
    encode_start,
    load_dotted,
)
from realrl.runtime.processes.signals import SignalReceived
from realrl.runtime.processes.supervise import run_inline
from realrl.sched.messages import Goodbye, Hello, Shutdown

HERE = __name__


def greet_and_leave(session: Session) -> int:
    session.launcher.start(1, session.admission)
    assert isinstance(session.transport.receive(0), Hello)
    session.metrics.write(1, 0, {"reward/mean": 1.0})
    session.transport.send(0, Shutdown(0))
    assert session.transport.receive(0) == Goodbye(0, 0)
    return 0


def refuse(session: Session) -> int:
    raise ConfigError("steps must be positive")


def interrupt(session: Session) -> int:
    raise KeyboardInterrupt


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Session], int]], int]:
    def runner(program: Callable[[Session], int]) -> int:
        monkeypatch.setattr(sessions, "load_dotted", lambda path: program)
        return run_inline(SessionStart(run=b"{}", run_dir=str(tmp_path / "run"), program="here:program"))

    return runner


def test_an_inline_run_writes_its_files(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(greet_and_leave) == 0
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["reward/mean"] == 1.0
    assert json.loads((tmp_path / "run" / "trace.json").read_text())
    assert (tmp_path / "run" / "logs" / "master.log").exists()


def test_an_error_becomes_a_report_and_its_exit_code(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(refuse) == 2
    assert capsys.readouterr().err == "realrl: error: steps must be positive\n"
    assert "steps must be positive" in (tmp_path / "run" / "logs" / "master.log").read_text()


def test_ctrl_c_becomes_130(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(interrupt) == 130
    assert "interrupted by SIGINT" in capsys.readouterr().err


def test_ordinary_handlers_do_not_swallow_an_interrupt() -> None:
    assert not issubclass(SignalReceived, Exception)
    assert SignalReceived(15).exit_code == 143


def test_the_start_message_survives_the_pipe() -> None:
    start = SessionStart(run=b"\x00{}", run_dir="/runs/1", track=("tensorboard",), port=5)
    stream = io.BytesIO(encode_start(start))
    size = int.from_bytes(stream.read(8), "big")
    assert decode_start(stream.read()) == start
    assert size == len(stream.getvalue()) - 8
    with pytest.raises(TransportError, match="malformed start message"):
        decode_start(b"\x80")


@pytest.mark.parametrize("path", ["no.such.module:x", "realrl.errors:Nothing", "realrl.errors", ":"])
def test_a_dotted_path_that_leads_nowhere_is_named(path: str) -> None:
    with pytest.raises(UsageError, match=r"cannot load .*\n.*package.module:name"):
        load_dotted(path)


def test_neither_master_nor_supervisor_import_torch() -> None:
    modules = "realrl.runtime.processes.main, realrl.runtime.processes.supervise"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sockets_are_among_the_temporary_files_where_their_paths_are_short_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder, expected in (("/scratch/tmp", "/scratch/tmp/realrl-0123"), ("/" + "x" * 90, "/tmp/realrl-0123")):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        assert socket_folder("0123") == Path(expected)


def test_a_folder_of_sockets_is_new_and_for_its_user_alone(tmp_path: Path) -> None:
    with sessions._open_folder(tmp_path / "sockets") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "master").touch()
    assert not folder.exists()
    told = rf"cannot make the folder of the run's sockets, {tmp_path}: File exists\n.*TMPDIR"
    with pytest.raises(UsageError, match=told), sessions._open_folder(tmp_path):
        pass
    assert tmp_path.exists()

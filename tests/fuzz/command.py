"""A command with its files, run as a user would until just before a run starts, and the promises that hold for any."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import realrl.runtime.processes.start as start
from realrl import cli
from realrl.experiment import pieces, registry

MAX_LINES, MAX_CHARS, MAX_CPU_S, MAX_GROWTH_BYTES = 25, 4000, 5.0, 1 << 30


@dataclass(frozen=True)
class Command:
    """Arguments of ``realrl``, and the files of the working directory by path; a `Path` is linked to."""

    arguments: tuple[str, ...]
    files: Mapping[str, bytes | Path] = field(default_factory=dict)


def check(command: Command, folder: Path) -> int:
    """Run a command in this process, in an empty folder, and assert what holds for any input; returns its exit code."""
    with _in_place(command, folder), _limited_memory():
        out, err = io.StringIO(), io.StringIO()
        start_s = time.process_time()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(command.arguments)
        took_s = time.process_time() - start_s
    assert_promises(code, err.getvalue())
    assert took_s <= MAX_CPU_S, f"{took_s:.1f} s of a processor"
    return code


def check_apart(command: Command, folder: Path) -> int:
    """Like `check`, in a process of its own with limits on its address space and its processor time."""
    program = (
        "import resource, sys; import realrl.runtime.processes.start as start; from realrl import cli;"
        "start.run_inline = start.run_supervised = lambda *_: 0;"
        "import realrl.data.datasets, realrl.model.files.hf, realrl.doctor, transformers.models.auto, pyarrow.parquet;"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        f"resource.setrlimit(resource.RLIMIT_AS, (size + {MAX_GROWTH_BYTES},) * 2);"
        f"used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + {int(MAX_CPU_S)} + 1;"
        "resource.setrlimit(resource.RLIMIT_CPU, (used, used)); sys.exit(cli.main())"
    )
    with _in_place(command, folder):
        arguments = [argument.encode("utf-8", "surrogateescape") for argument in command.arguments]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
        )  # fmt: skip
    assert_promises(done.returncode, done.stderr.decode(errors="replace"))
    return done.returncode


def assert_promises(code: int, err: str) -> None:
    """0 or 2 and nothing else; no traceback; one screen, which names the problem where there is one."""
    assert code in (0, 2), f"exit code {code}\n{err[-3000:]}"
    assert "Traceback (most recent call last)" not in err, err[-3000:]
    assert len(err.splitlines()) <= MAX_LINES, err[:3000]
    assert len(err) <= MAX_CHARS, err[:5000]
    assert code == 0 or "realrl: error: " in err or not err.strip(), err


@contextlib.contextmanager
def _in_place(command: Command, folder: Path) -> Iterator[None]:
    """Make the files, and leave no trace of user code in this process."""
    before = os.getcwd(), list(sys.path), set(sys.modules), start.run_inline, start.run_supervised
    registered = {module: dict(module._registered) for module in (registry, pieces)}
    folder.mkdir()
    os.chdir(folder)
    start.run_inline = start.run_supervised = lambda *_: 0  # type: ignore[assignment]
    try:
        for name, content in command.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content) if isinstance(content, bytes) else path.symlink_to(content)
        yield
    finally:
        os.chdir(before[0])
        sys.path[:] = before[1]
        for name in set(sys.modules) - before[2]:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        start.run_inline, start.run_supervised = before[3:]
        for module, names in registered.items():
            module._registered.clear()
            module._registered.update(names)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_GROWTH_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

"""A command with its files, run as a user would until just before a run starts, and the promises that hold for any."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
MAX_LINES, MAX_CHARS, MAX_CPU_S, MAX_GROWTH_BYTES, MAX_WAIT_S = 25, 4000, 5.0, 1 << 30, 60.0


@dataclass(frozen=True)
class Command:
    """Arguments of ``realrl``, and the files of the working directory by path; a `Path` is linked to."""

    arguments: tuple[str, ...]
    files: Mapping[str, bytes | Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """End of a command.

    Attributes:
        code: exit code; the negative number of the signal that ended it.
        cpu_s: seconds of a processor.
        growth_bytes: address space that it took at most, beyond what imports take; 0 if it was killed.
        err: standard error.
    """

    code: int
    cpu_s: float
    growth_bytes: int
    err: str


class Server:
    """A process that has imported everything, and runs each command in a fork of its own; see `tests.fuzz.server`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder, self._count = process, folder, 0

    def run(self, command: Command, *, is_warm_up: bool = False) -> Outcome:
        """Run a command in a new folder with its files: in a fork and within the limits, unless it is to warm up."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        try:
            for name, content in command.files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content) if isinstance(content, bytes) else path.symlink_to(content)
            return Outcome(
                **self._ask({"arguments": command.arguments, "folder": str(folder), "is_warm_up": is_warm_up})
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def serving(folder: Path, warm: Iterable[Command]) -> Iterator[Server]:
    """Start a server that has run the commands `warm`, which must succeed, and end it."""
    program = [sys.executable, "-m", "tests.fuzz.server"]
    with subprocess.Popen(program, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            server = Server(process, folder)
            for command in warm:
                outcome = server.run(command, is_warm_up=True)
                assert outcome.code == 0, outcome.err
            yield server
        finally:
            process.kill()


def assert_promises(outcome: Outcome) -> None:
    """0 or 2 and nothing else; no traceback; one screen, which names the problem where there is one; little of all."""
    code, err = outcome.code, outcome.err
    assert code in (0, 2), f"exit code {code}\n{err[-3000:]}"
    assert "Traceback (most recent call last)" not in err, err[-3000:]
    assert len(err.splitlines()) <= MAX_LINES, err[:3000]
    assert len(err) <= MAX_CHARS, err[:5000]
    assert code == 0 or "realrl: error: " in err or not err.strip(), err
    assert outcome.cpu_s <= MAX_CPU_S, f"{outcome.cpu_s:.1f} s of a processor"
    assert outcome.growth_bytes <= MAX_GROWTH_BYTES, f"{outcome.growth_bytes:,} bytes of memory"

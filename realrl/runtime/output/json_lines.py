"""Files with one JSON object a line and step, to which a resumed run appends."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

from realrl.errors import RunError
from realrl.files import open_output, read_input


def cut_after(path: Path, last_step: int) -> None:
    """Remove lines of steps after `last_step`, which an earlier attempt wrote, and a line that a crash cut short.

    Raises:
        OSError: the file cannot be rewritten; it is then as it was.
        RunError: a line is no object with a step.
    """
    path = path.resolve()  # a link stays one
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.new")
    try:
        with (
            io.BufferedReader(open_output(path, append=True)) as old,
            io.BufferedWriter(open_output(temporary)) as new,
        ):
            for line in old:
                if line.endswith(b"\n") and _step_of(line, path) <= last_step:
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def last_step(path: Path) -> int:
    """The step of the last whole line; 0 if there is none."""
    try:
        lines = read_input(path).split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return _step_of(lines[-1], path) if lines else 0


def _step_of(line: bytes, path: Path) -> int:
    try:
        step = json.loads(line)["step"]
        if not isinstance(step, int):
            raise TypeError("a step is a whole number")
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} holds something that no run wrote: {line[:60]!r}",
            remedy="Name another file, or remove this one.",
        ) from error
    return step

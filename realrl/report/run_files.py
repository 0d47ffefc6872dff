"""Files of a run folder. A run may still write them, or have died in a line: what cannot be read is left out and told.

No more than `_MOST_BYTES` of a file are read: of a longer one, pieces that lie evenly, its beginning and its end among
them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from realrl.config.secrets import masked
from realrl.config.serialize import CONFIG_FILE, WORKING_FOLDER
from realrl.errors import ConfigError, UsageError, counted, is_text
from realrl.experiment.discovery import GIVEN
from realrl.files import open_input, read_input

CONFIG, METRICS, GENERATIONS, TRACE = CONFIG_FILE, "metrics.jsonl", "generations.jsonl", "trace.json"
MOST_RUNS = 512
_LOCK, _FAILURE = ".lock", "logs/failure.json"
_MOST_BYTES, _N_PIECES = 128_000_000, 24
_SAMPLE_BYTES = 24_000_000
_MOST_METRICS = 400

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Content of a run folder, but for the traces.

    Attributes:
        config: the text of ``config.json``; empty if there is none.
        settings: the same, decoded, without secrets.
        rows: metrics of a step each, in the order of steps; only finite numbers.
        samples: lines of ``generations.jsonl``.
        state: the run's state in a few words.
        is_live: the run goes on.
        notes: sentences about what is missing or damaged.
    """

    path: Path
    config: bytes = b""
    settings: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    samples: Sequence[Row] = ()
    state: str = ""
    is_live: bool = False
    notes: Sequence[str] = ()

    @property
    def experiment(self) -> str:
        """The experiment's name; that of its file for one of the user's own."""
        reference = str(self.settings.get("experiment", ""))
        return Path(reference).stem if reference.endswith(".py") else reference.removeprefix(GIVEN)

    @property
    def last_step(self) -> int:
        """The last step that has metrics; 0 if there is none."""
        return int(self.rows[-1]["step"]) if self.rows else 0


def find_runs(paths: Iterable[str]) -> list[Path]:
    """Return the run folders that paths name: folders of runs, or folders that hold such folders.

    Raises:
        ConfigError: a path is neither, or there are too many.
    """
    found: dict[Path, Path] = {}
    for text in paths:
        path = Path(text)
        folders = list(_runs_in(path))
        if not folders:
            raise ConfigError(f"{text} is no run folder: {_why(path)}", remedy="Give the run_dir of a run.")
        found.update((folder.resolve(), folder) for folder in folders if folder.resolve() not in found)
    if len(found) > MOST_RUNS:
        raise ConfigError(f"{len(found)} runs are too many for a page", remedy=f"Give at most {MOST_RUNS} folders.")
    return list(found.values())


def read_run(path: Path) -> RunFolder:
    """Read a run folder.

    Raises:
        UsageError: a file is there and cannot be read at all.
    """
    notes: list[str] = []
    config = _bytes(path / CONFIG, notes)
    settings = _object(config, path / CONFIG, notes) if config else {}
    settings.pop(WORKING_FOLDER, None)  # no setting: runs from two folders are the same otherwise
    rows = _metrics(path / METRICS, notes)
    samples = list(json_lines(samples_file(path, settings), notes, most_bytes=_SAMPLE_BYTES, is_optional=True))
    state, is_live = _state(path, settings, rows)
    return RunFolder(path, config, settings, rows, samples, state, is_live, notes)


def json_lines(
    path: Path, notes: list[str], *, most_bytes: int = _MOST_BYTES, is_optional: bool = False
) -> Iterator[Row]:
    """Yield the JSON objects in the lines of a file, and note how many lines hold none.

    Args:
        is_optional: a file that is not there is worth no note.
    """
    n_damaged = 0
    for line in lines_of(path, notes, most_bytes=most_bytes, is_optional=is_optional):
        row = decoded(line)
        if isinstance(row, dict):
            yield row
        elif line.strip():
            n_damaged += 1
    if n_damaged:
        notes.append(f"{path.name}: {_lines(n_damaged, 'damaged ')} left out.")


def lines_of(path: Path, notes: list[str], *, most_bytes: int, is_optional: bool = False) -> Iterator[bytes]:
    """Yield the lines of a file, or of pieces of it, without what a run is writing at this moment.

    Raises:
        UsageError: it is there, and cannot be read.
    """
    try:
        with open_input(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                notes.append(f"{path.name}: {most_bytes / 1e6:,.0f} of {size / 1e6:,.0f} MB were read, evenly spread.")
            for begin, end in _pieces(size, most_bytes):
                file.seek(max(0, begin - 1))
                content = file.read(end - max(0, begin - 1))
                is_cut = begin > 0  # the byte before shows if a line begins here
                lines = content.split(b"\n")
                yield from lines[1 if is_cut else 0 : len(lines) - (not _is_whole(lines[-1]))]
    except FileNotFoundError:
        if not is_optional:
            notes.append(f"{path.name}: there is no such file.")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def decoded(line: bytes) -> object:
    """Return a line's JSON value; None if it is none."""
    try:
        return cast(object, msgspec.json.decode(line))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        with contextlib.suppress(ValueError, RecursionError):
            return cast(object, json.loads(line))  # slow; takes halves of surrogate pairs
    return None


def finite(value: object) -> float | None:
    """Return a number that a float can hold; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number of hundreds of digits
        return None


# ---------------------------------------------------------------- parts


def _lines(n: int, kind: str = "") -> str:
    return f"1 {kind}line" if n == 1 else f"{n:,} {kind}lines"


def _runs_in(path: Path) -> Iterator[Path]:
    if _is_run(path):
        yield path
    elif path.is_dir():
        inner = sorted(one for one in path.iterdir() if one.is_dir() and not one.is_symlink())
        for folder in inner:
            if _is_run(folder):
                yield folder
            else:
                yield from sorted(one for one in folder.iterdir() if _is_run(one)) if os.access(folder, os.R_OK) else ()


def _is_run(path: Path) -> bool:
    return (path / METRICS).is_file() or ((path / CONFIG).is_file() and (path / "logs").is_dir())


def _why(path: Path) -> str:
    if not path.exists():
        return "it does not exist"
    return f"neither it nor a folder in it has {METRICS}" if path.is_dir() else "it is a file"


def _pieces(size: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces of a file to read, as offsets: all of it, or some that lie evenly from beginning to end."""
    if size <= most_bytes:
        yield 0, size
        return
    length = most_bytes // _N_PIECES
    for i in range(_N_PIECES):
        begin = (size - length) * i // (_N_PIECES - 1)
        yield begin, begin + length


def _is_whole(line: bytes) -> bool:
    """Return True for a last line that has no line break, but is a whole object all the same."""
    return line.endswith(b"}") and isinstance(decoded(line), dict)


def _bytes(path: Path, notes: list[str]) -> bytes:
    try:
        return read_input(path, most_bytes=16_000_000)
    except FileNotFoundError:
        notes.append(f"{path.name}: there is no such file.")
        return b""
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def _object(content: bytes, path: Path, notes: list[str]) -> dict[str, Any]:
    value = decoded(content)
    with contextlib.suppress(RecursionError):
        if isinstance(value, dict):
            return dict(masked(value))
    notes.append(f"{path.name}: it is damaged.")
    return {}


def _metrics(path: Path, notes: list[str]) -> list[Row]:
    """Return the rows of metrics by step; of two rows of a step the later one holds."""
    rows: dict[int, Row] = {}
    names: dict[str, None] = {}
    n_left_out, n_stepless = 0, 0
    for line in json_lines(path, notes):
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
            n_stepless += 1
            continue
        row = rows[step] = {"step": step}
        for name, value in line.items():
            if name not in names:
                if len(names) >= _MOST_METRICS:
                    n_left_out += 1
                    continue
                names[name] = None
            is_plain = type(value) is float and -math.inf < value < math.inf  # as nearly all of very many are
            if is_plain or finite(value) is not None:
                row[name] = value
    if n_stepless:
        notes.append(f"{path.name}: {_lines(n_stepless)} without a step left out.")
    if n_left_out:
        notes.append(f"{path.name}: only the first {_MOST_METRICS} names are shown.")
    return [rows[step] for step in sorted(rows)]


def samples_file(path: Path, settings: Row) -> Path:
    """Return the file of responses: beside the metrics, unless the run was told another place."""
    save = settings.get("save")
    other = save.get("generations_path") if isinstance(save, dict) else None
    return Path(other) if isinstance(other, str) and is_text(other) and other else path / GENERATIONS


def _state(path: Path, settings: Row, rows: Sequence[Row]) -> tuple[str, bool]:
    """Return a run's state in words, and True if it goes on."""
    done, steps = int(rows[-1]["step"]) if rows else 0, settings.get("steps")
    known = isinstance(steps, int) and steps > 0
    count = f"step {done:,} of {steps:,}" if known else f"step {done:,}"
    if _is_going_on(path / _LOCK):
        return f"going on, {count}", True
    if known and done >= int(steps or 0):
        return f"complete, {counted(done, 'step')}", False
    failure = decoded(_quietly(path / _FAILURE)) or {}
    message = failure.get("message") if isinstance(failure, dict) else None
    if isinstance(message, str) and message:
        return f"failed after {count}: {message}", False
    return f"ended after {count}", False


def _is_going_on(lock: Path) -> bool:
    """Return True if the process whose id a lock file holds is there."""
    text = _quietly(lock).strip()
    return text.isdigit() and len(text) < 12 and Path(f"/proc/{int(text)}").exists()


def _quietly(path: Path) -> bytes:
    try:
        return read_input(path, most_bytes=1_000_000)
    except OSError:
        return b""

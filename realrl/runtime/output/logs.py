"""Log files of a run: ``<run_dir>/logs/master.log`` and ``worker_<rank>.log``."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from realrl.files import open_output

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TAIL_BYTES = 16_384


def log_path(run_dir: Path, rank: int | None) -> Path:
    """Log file of worker `rank`, or of the master for None."""
    return run_dir / "logs" / ("master.log" if rank is None else f"worker_{rank}.log")


@contextlib.contextmanager
def logging_to(path: Path | None) -> Iterator[None]:
    """Send this process's log records to `path` (appended), or to stderr for None, inside a ``with`` block.

    The least level is REALRL_LOG_LEVEL (default INFO) for realrl's own records, and WARNING for those of libraries.
    """
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger("realrl").setLevel(os.environ.get("REALRL_LOG_LEVEL", "INFO").upper())
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
            handler.close()


class _LogFile(logging.FileHandler):
    """Log file that loses lines on a full disk, instead of filling the screen with tracebacks."""

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(open_output(self.baseFilename, append=True), "utf-8", "backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_size(path: Path | None) -> int:
    """Bytes of a log, behind which a process that starts now writes; 0 when there is no such file."""
    try:
        return 0 if path is None else path.stat().st_size
    except OSError:
        return 0


def tail(path: Path | None, n_lines: int, *, begin: int = 0) -> list[str]:
    """The last `n_lines` non-empty lines of a log, fewer when there are fewer, none when there is no such file.

    Args:
        begin: byte where the lines of the process in question begin; what others wrote before it is left out.
    """
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, begin, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines[-n_lines:] if n_lines > 0 else []

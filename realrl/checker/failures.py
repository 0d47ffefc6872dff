"""The error of a failed run, in a few lines."""

from __future__ import annotations

_MOST_LINES = 12


def failure_of(output: str) -> str:
    """Return the error in a run's output: from where it is named, without the log's address and progress."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if "error" in line.lower() or "failed" in line.lower()]
    kept = lines[starts[0] :] if starts else lines
    return "\n".join(kept[:_MOST_LINES])

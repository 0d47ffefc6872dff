"""Reader of a run's trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace, complete or left behind by a killed run, whose last line may be cut short."""
    lines = [line.removesuffix(",") for line in path.read_text(encoding="utf-8").splitlines()]
    events: list[dict[str, Any]] = []
    for line in lines:
        if line.startswith("{"):
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return events

"""Results of an evaluation as a line, as a table and as ``eval.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realrl.errors import RunError
from realrl.experiment.run_plan import RunPlan
from realrl.files import write_output

FILE_NAME = "eval.json"
_ERROR = "/stderr"
_HEADLINES = ("reward", "pass@", "loss", "perplexity", "accuracy", "cost")


def estimates(metrics: Mapping[str, float]) -> dict[str, tuple[float, float | None]]:
    """Name without ``eval/`` and ``/mean`` -> value and standard error (None where there is none)."""
    found = {}
    for name, value in metrics.items():
        if name.startswith("eval/") and not name.endswith((_ERROR, "eval/n_samples")):
            base = name.removesuffix("/mean")
            found[base.removeprefix("eval/")] = (value, metrics.get(base + _ERROR))
    return found


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """The most telling results: ``reward 0.51 ± 0.02  pass@1 0.4 ± 0.06``."""
    found = estimates(metrics)
    named = {name: value for name, value in found.items() if name.startswith(_HEADLINES)} or found
    return "  ".join(f"{name} {_text(value, error)}" for name, (value, error) in named.items())


def evaluation_table(metrics: Mapping[str, float]) -> dict[str, str]:
    """Name -> value and standard error, as text."""
    rows = {name: _text(value, error) for name, (value, error) in estimates(metrics).items()}
    return {**rows, "samples": f"{metrics.get('eval/n_samples', 0):.0f}"}


def write_evaluation(path: Path, plan: RunPlan, metrics: Mapping[str, float]) -> None:
    """Write ``eval.json``: experiment, models, data and ``{name: {"value": ..., "stderr": ...}}``.

    Raises:
        RunError: the file cannot be written.
    """
    config = plan.config
    found: dict[str, Any] = {
        "experiment": plan.experiment.name,
        "models": {role: config.models[role].path for role in plan.roles},
        "data": config.eval.path or config.dataset.described,
        "n_samples": int(metrics.get("eval/n_samples", 0)),
        "metrics": {
            name: {"value": _finite(value), "stderr": None if error is None else _finite(error)}
            for name, (value, error) in estimates(metrics).items()
        },
    }
    try:
        write_output(path, json.dumps(found, indent=1, allow_nan=False).encode() + b"\n")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", remedy="Free some space there.") from error


def _text(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

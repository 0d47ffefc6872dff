"""Checks that the files and folders of a configuration exist before anything starts.

They use `os.path`, since `pathlib` raises where a name is too long for any file system.
"""

from __future__ import annotations

import os
from pathlib import Path

from realrl.config.problems import Problem, raise_problems
from realrl.config.schema import BUILT_IN, REASONING_TASKS, RunConfig
from realrl.errors import AssetError, DataError

FETCH = "run: python scripts/fetch_assets.py"


def check_paths(config: RunConfig, *, cache_dir: Path) -> None:
    """Refuse a run whose inputs are missing or whose results cannot be written.

    Raises:
        ConfigError: `run_dir` is not writable, or `resume` does not exist.
        AssetError: a model folder is missing.
        DataError: the dataset file is missing.
    """
    problems = [*_check_run_dir(config.run_dir), *_check_resume(config)]
    raise_problems(problems, config.experiment)
    for role, model in config.models.items():
        _check_model(role, model.path, cache_dir)
    if not config.eval.only:
        _check_dataset("dataset.path", config.dataset.path, cache_dir)
    if config.eval.path and (config.eval.is_on or config.eval.only):
        _check_dataset("eval.path", config.eval.path, cache_dir)


def _check_dataset(key: str, name: str, cache_dir: Path) -> None:
    path = Path(name)
    if name.startswith(REASONING_TASKS) or name == BUILT_IN or os.path.isfile(path):
        return
    message = f"{key}={path}: " + ("is a folder, not a file" if os.path.isdir(path) else "there is no such file")
    if _is_cached(path, cache_dir):
        raise AssetError(message, remedy=FETCH)
    raise DataError(message, remedy=_home_hint(path) or f"Give a JSON, JSONL or parquet file, or '{BUILT_IN}'.")


def _check_model(role: str, name: str, cache_dir: Path) -> None:
    path = Path(name)
    if name == BUILT_IN or os.path.isfile(path / "config.json"):
        return
    found = "there is no config.json in this folder" if os.path.isdir(path) else "there is no such folder"
    remedy = FETCH if _is_cached(path, cache_dir) else _home_hint(path)
    if remedy is None and "checkpoints" in path.parts:
        remedy = "An earlier run writes it there: train that model first, or give another folder."
    raise AssetError(
        f"models.{role}.path={name}: {found}",
        remedy=remedy or f"Give a folder in Hugging Face format (config.json, *.safetensors), or '{BUILT_IN}'.",
    )


def _check_run_dir(run_dir: str) -> list[Problem]:
    path = Path(run_dir or "runs").absolute()
    subject = f"run_dir={run_dir}" if run_dir else "run_dir"
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
    except OSError as error:
        return [Problem(subject, f"is no usable path: {error.strerror}")]
    if not existing.is_dir():
        return [Problem(subject, f"'{existing}' is not a folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [Problem(subject, f"no permission to write in '{existing}'; give another folder with run_dir=PATH")]
    return []


def _check_resume(config: RunConfig) -> list[Problem]:
    if config.resume == "auto" and not config.run_dir:
        return [Problem("resume=auto", "continues the run in run_dir: give it with run_dir=PATH")]
    if config.resume in ("never", "auto") or os.path.isdir(config.resume):
        return []
    return [
        Problem(f"resume={config.resume}", "there is no such folder; use never, auto, or the folder of a checkpoint")
    ]


def _is_cached(path: Path, cache_dir: Path) -> bool:
    return path.absolute().is_relative_to(cache_dir.absolute())


def _home_hint(path: Path) -> str | None:
    return "The shell did not expand ~; write the whole path, or $HOME." if str(path).startswith("~") else None

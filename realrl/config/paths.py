"""Checks that the files and folders of a configuration exist before anything starts, and what names stand for.

They use `os.path`, since `pathlib` raises where a name is too long for any file system.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from itertools import islice
from pathlib import Path

from realrl.config.problems import Problem, raise_problems
from realrl.config.schema import BUILT_IN, REASONING_TASKS, RunConfig
from realrl.errors import AssetError, DataError

FETCH = "run: python scripts/fetch_assets.py"
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w.-]+))?(/(?P<inside>.+))?")
_NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_TRAINING = frozenset({"train", "training"})
_MOST_ENTRIES = 10_000


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
    for key, path in {} if config.eval.only else config.dataset.paths.items():
        _check_dataset(key, path, cache_dir)
    if config.eval.path and (config.eval.is_on or config.eval.only):
        _check_dataset("eval.path", config.eval.path, cache_dir)


def find_data_files(name: str) -> list[str]:
    """Return the files that a path of a dataset stands for, sorted: itself, or those of a folder or pattern.

    Of a folder with files of several splits, which their names tell, only those that are called train are taken.

    Raises:
        DataError: a folder or pattern has no file of a known suffix, or those of several folders or suffixes.
    """
    is_folder = os.path.isdir(name)
    if os.path.isfile(name) or name.startswith(REASONING_TASKS) or not (is_folder or glob.has_magic(name)):
        return [name]
    pattern = os.path.join(glob.escape(name), "**") if is_folder else name
    entries = list(islice(glob.iglob(pattern, recursive=True), _MOST_ENTRIES + 1))
    if len(entries) > _MOST_ENTRIES:
        raise DataError(f"{name} holds more than {_MOST_ENTRIES:,} files and folders", remedy="Name fewer of them.")
    found = [f for f in sorted(entries) if f.lower().endswith(DATA_SUFFIXES) and os.path.isfile(f)]
    found = [f for f in found if os.path.basename(f) not in _NO_DATA]
    training = [f for f in found if _TRAINING.intersection(re.split(r"[^a-z]+", os.path.relpath(f, name).lower()))]
    if is_folder and training:
        found = training
    if not found:
        raise DataError(f"{name} holds no file with one of the suffixes {', '.join(DATA_SUFFIXES)}")
    kinds = dict.fromkeys(os.path.join(os.path.dirname(f), "*" + os.path.splitext(f)[1]) for f in found)
    if is_folder and len(kinds) > 1:
        raise DataError(
            f"{name} holds files in several folders or formats: {', '.join(list(kinds)[:4])}",
            remedy="Name one of them, or all under dataset.files.",
        )
    return found


def with_hub_names(config: RunConfig, hub: Path) -> RunConfig:
    """Return the configuration with folders of the cache of `huggingface_hub` in the place of names that are there.

    A name is "org/model" or "org/data"; of data sets, a folder, file or beginning of files may follow, such as
    "org/data/main/test". "@" after the name asks for another revision than main. What exists on disk under such a
    path is no name.

    Args:
        hub: the cache, a folder with ``models--org--model/snapshots/COMMIT``.
    """
    models = {
        role: model.model_copy(update={"path": _in_hub(model.path, hub, "models")})
        for role, model in config.models.items()
    }
    data = config.dataset
    files = {
        name: file.model_copy(update={"path": _in_hub(file.path, hub, "datasets")}) for name, file in data.files.items()
    }
    changes = {
        "models": models,
        "dataset": data.model_copy(update={"path": _in_hub(data.path, hub, "datasets"), "files": files}),
        "eval": config.eval.model_copy(update={"path": _in_hub(config.eval.path, hub, "datasets")}),
    }
    return config.model_copy(update=changes)


def _in_hub(path: str, hub: Path, kind: str) -> str:
    """Return the place of a name in the cache; `path` itself if it is no name, or not there."""
    found = _HUB_NAME.fullmatch(path)
    if found is None or os.path.exists(path) or (kind == "models" and found["inside"]):
        return path
    folder = hub / f"{kind}--{found['name'].replace('/', '--')}"
    revision = found["revision"] or "main"
    try:
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    snapshot = folder / "snapshots" / commit
    if not os.path.isdir(snapshot):
        return path
    place = os.path.join(snapshot, found["inside"] or "").rstrip("/")
    return place if os.path.exists(place) or glob.has_magic(place) else glob.escape(place) + "[-._]*"


def _check_dataset(key: str, name: str, cache_dir: Path) -> None:
    if name.startswith(REASONING_TASKS) or name == BUILT_IN or os.path.isfile(name):
        return
    if os.path.isdir(name) or glob.has_magic(name):
        try:
            find_data_files(name)
        except DataError as error:
            raise DataError(f"{key}: {error.message}", remedy=error.remedy) from error
        return
    message = f"{key}={name}: there is no such file"
    if _is_cached(Path(name), cache_dir):
        raise AssetError(message, remedy=FETCH)
    remedy = _home_hint(name) or f"Give a JSON, JSONL or parquet file, or '{BUILT_IN}'."
    raise DataError(message + _not_in_hub(name), remedy=_fetch_hint(name, "--repo-type dataset ") or remedy)


def _check_model(role: str, name: str, cache_dir: Path) -> None:
    path = Path(name)
    newest = path / "checkpoints" / "latest"  # of a run, whose own config.json is no model's
    if name == BUILT_IN or (os.path.isfile(path / "config.json") and not os.path.isdir(newest)):
        return
    found = "there is no config.json in this folder" if os.path.isdir(path) else "there is no such folder"
    remedy = FETCH if _is_cached(path, cache_dir) else _home_hint(name)
    saved = [folder for folder in (newest, path) if os.path.isfile(folder / role / "config.json")]
    if saved:
        found, remedy = "this is no model, but holds some", f"Give one of them, such as {saved[0] / role}."
    if remedy is None and "checkpoints" in path.parts:
        remedy = "An earlier run writes it there: train that model first, or give another folder."
    if remedy is None and not os.path.isdir(path):
        found, remedy = found + _not_in_hub(name), _fetch_hint(name)
    raise AssetError(
        f"models.{role}.path={name}: {found}",
        remedy=remedy or f"Give a folder in Hugging Face format (config.json, *.safetensors), or '{BUILT_IN}'.",
    )


def _not_in_hub(name: str) -> str:
    return ", and no such name in the local cache of huggingface_hub" if _fetch_hint(name) else ""


def _fetch_hint(name: str, option: str = "") -> str | None:
    """The command that fetches a name of the Hub; None for what cannot be one."""
    found = _HUB_NAME.fullmatch(name)
    if found is None or os.path.splitext(name)[1].lower() in DATA_SUFFIXES:
        return None
    revision = f" --revision {found['revision']}" if found["revision"] else ""
    return f"Nothing is downloaded by name: run 'hf download {option}{found['name']}{revision}' first, or give a path."


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
    reason = _reason_against(path)
    return [Problem(subject, f"it cannot be made: {reason}; give another folder with run_dir=PATH")] if reason else []


def _reason_against(folder: Path) -> str:
    """Return why a folder cannot be made; empty if it is there or was made, which is taken back."""
    made: list[Path] = []
    try:
        for path in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
            path.mkdir(0o700)
            made.append(path)
    except FileExistsError:  # another run makes it at this moment
        pass
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # another run has put something there
                path.rmdir()
    return ""


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


def _home_hint(name: str) -> str | None:
    return "The shell did not expand ~; write the whole path, or $HOME." if name.startswith("~") else None

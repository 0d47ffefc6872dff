"""Tasks of the package reasoning-gym as a dataset: generated questions, each with the entry that its verifier reads.

    dataset.path=reasoning_gym:chain_sum
    dataset.path=reasoning_gym:chain_sum?size=500&seed=1&min_terms=2&max_terms=3
    dataset.path=reasoning_gym:chain_sum+leg_counting?size=500&chain_sum.max_terms=2

`size` (rows of each task, 500), `seed` (0) and `instruction` (text below every question, in percent encoding or with +
for spaces) apply to all tasks, or to one if written ``task.size``. Any other name is a setting of the task, written
``task.setting`` where there are several tasks. The rows are a function of the path alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from realrl.config.schema import REASONING_TASKS
from realrl.data.readers import RawRow
from realrl.errors import ConfigError, DataError, did_you_mean

FIELD = "reasoning_gym"
DEFAULT_SIZE = 500
INSTRUCTION = "instruction"
_TUPLE, _ITEMS = "(tuple)", "(items)"


def task_rows(path: str) -> list[RawRow]:
    """The rows of ``reasoning_gym:...``: `prompt`, `answer`, and `reasoning_gym` for the verifier of that name.

    Raises:
        ConfigError: reasoning-gym is not installed.
        DataError: there is no such task, or it does not take such settings.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            f"dataset.path={path} needs the package reasoning-gym, which is not installed",
            remedy="pip install 'realrl[rewards]'",
        )
    rows: list[RawRow] = []
    for task, settings in parse_task_path(path).items():
        instruction = settings.pop(INSTRUCTION)
        dataset = _open(path, task, settings)
        for index in range(len(dataset)):
            where = f"{path}, task {task}, row {index + 1}"
            try:
                rows.append(RawRow(_row(dataset, task, settings, index, instruction), where))
            except Exception as error:  # a task may raise anything for settings that it did not check
                raise DataError(f"{where} cannot be made: {type(error).__name__}: {error}") from error
    return rows


def parse_task_path(path: str) -> dict[str, dict[str, Any]]:
    """Return task -> its settings, `size`, `seed` and `instruction` among them.

    Values are read as JSON where they are JSON, and are text otherwise; an instruction is text.

    Raises:
        DataError: no task, a setting without value, or one that names no task where there are several.
    """
    names, _, query = path.removeprefix(REASONING_TASKS).partition("?")
    tasks = names.split("+")
    if not all(tasks):
        raise DataError(f"dataset.path={path} names no task", remedy="Write reasoning_gym:<task>?size=500&seed=1.")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise DataError(
            f"dataset.path={path}: {error}", remedy="Settings are written name=value, with & between."
        ) from None
    common: dict[str, Any] = {"size": DEFAULT_SIZE, "seed": 0, INSTRUCTION: ""}
    settings: dict[str, dict[str, Any]] = {task: {} for task in tasks}
    for name, text in pairs:
        task, _, own = name.rpartition(".")
        value = text if own == INSTRUCTION else _value(text)
        if name in common:
            common[name] = value
        elif not task and len(tasks) == 1:
            settings[tasks[0]][name] = value
        elif task in settings:
            settings[task][own] = value
        else:
            raise DataError(
                f"dataset.path={path}: setting {name!r} belongs to none of the tasks {', '.join(tasks)}",
                remedy=f"Write it as {tasks[0]}.{own}.",
            )
    return {task: {**common, **settings[task]} for task in tasks}


def task_entry(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The task's dataset, which scores answers, and the entry that a row was made from.

    Args:
        row: content of the field `reasoning_gym` in a row of `task_rows`.
    """
    dataset = _dataset(row["task"], json.dumps(row["settings"], sort_keys=True))
    return dataset, _unpack(row["entry"]) if "entry" in row else _entry(dataset, row["task"], row["index"])


def _row(dataset: Any, task: str, settings: Mapping[str, Any], index: int, instruction: str) -> dict[str, Any]:
    entry = _entry(dataset, task, index)
    made: dict[str, Any] = {"task": task, "settings": dict(settings), "index": index}
    with contextlib.suppress(TypeError):  # an entry that JSON cannot hold is made again when needed
        made["entry"] = _pack(entry)
    prompt = f"{entry['question']}\n{instruction}" if instruction else entry["question"]
    return {"id": f"{task}/{index}", "prompt": prompt, "answer": entry["answer"], FIELD: made}


def _entry(dataset: Any, task: str, index: int) -> dict[str, Any]:
    """Entry `index`. The global generator is seeded and then restored, because some tasks draw from it."""
    state = random.getstate()
    random.seed(f"{task}/{dataset.seed}/{index}")
    try:
        entry: dict[str, Any] = dataset[index]
    finally:
        random.setstate(state)
    return entry


def _pack(value: Any) -> Any:
    """`value` as JSON from which `_unpack` makes an equal one: tuples stay tuples, and numbers may be keys.

    Raises:
        TypeError: it holds something else than JSON, tuples and such mappings.
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) in (list, tuple):
        packed = [_pack(item) for item in value]
        return packed if type(value) is list else {_TUPLE: packed}
    if type(value) is dict:
        if all(type(key) is str for key in value):
            return {key: _pack(item) for key, item in value.items()}
        return {_ITEMS: [[_pack(key), _pack(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__name__} is not packed")


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_unpack(item) for item in value[_TUPLE])
    if _ITEMS in value:
        return {_unpack(key): _unpack(item) for key, item in value[_ITEMS]}
    return {key: _unpack(item) for key, item in value.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _open(path: str, task: str, settings: Mapping[str, Any]) -> Any:
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        hint = did_you_mean(task, DATASETS)
        raise DataError(f"dataset.path={path}: reasoning-gym has no task {task!r}.{hint}")
    known = [item.name for item in dataclasses.fields(DATASETS[task][1])]
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known)
            raise DataError(
                f"dataset.path={path}: task {task} has no setting {name!r}.{hint}",
                remedy=f"Its settings: {', '.join(known)}.",
            )
    for name, least in (("size", 1), ("seed", 0)):
        value = settings[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise DataError(f"dataset.path={path}: {name}={value} of task {task} must be a whole number >= {least}")
    try:
        return _dataset(task, json.dumps(settings, sort_keys=True))
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"dataset.path={path}: task {task} refuses its settings: {error}") from error


@lru_cache(maxsize=16)
def _dataset(task: str, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(settings))

"""JSON form of a resolved configuration, for the run folder and for workers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from realrl.config.keys import Declared, known_keys
from realrl.config.problems import raise_problems
from realrl.config.schema import BUILT_IN, REASONING_TASKS, RunConfig
from realrl.config.secrets import masked
from realrl.config.validate import describe_plainly, validate
from realrl.errors import ConfigError

CONFIG_FILE = "config.json"
"""Name of the file of a run folder that `recorded_config` is written to."""

WORKING_FOLDER = "working_folder"
# what a run may change between its steps without being another one
_OF_THE_ATTEMPT = (
    *("experiment", "preset", "plan", "steps", "epochs", "run_dir", "resume"),
    *("launcher", "allocation", "cluster", "save", "eval", "recover", "track", "show"),
)


def dump_config(config: RunConfig) -> bytes:
    """Return the configuration as indented JSON; `load_config` gives back an equal one."""
    return config.model_dump_json(indent=2).encode() + b"\n"


def shown_config(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as JSON values for people to read, without its secrets."""
    shown: dict[str, Any] = masked(config.model_dump(mode="json"))
    return shown


def recorded_config(config: RunConfig, folder: str) -> bytes:
    """Return what a run folder holds: the configuration without its secrets, and the folder that paths count from."""
    return json.dumps({**shown_config(config), WORKING_FOLDER: folder}, indent=2).encode() + b"\n"


def with_paths_of(data: bytes) -> bytes:
    """Return a recorded configuration whose relative paths of files, folders and functions count from anywhere."""
    values = _parse(data)
    folder = values.pop(WORKING_FOLDER, None)
    if not isinstance(folder, str):
        return data

    def resolved(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {name: resolved(inner, name) for name, inner in value.items()}
        if not isinstance(value, str) or not value:
            return value
        file, colon, name = value.partition(".py:")
        if colon:
            return os.path.normpath(os.path.join(folder, f"{file}.py")) + f":{name}"
        is_name = value == BUILT_IN or value.startswith(REASONING_TASKS)
        return os.path.normpath(os.path.join(folder, value)) if key == "path" and not is_name else value

    return json.dumps(resolved(values)).encode()


def flattened(values: object, prefix: str = "") -> dict[str, Any]:
    """Return dotted path -> value of nested mappings; an empty mapping has no path."""
    if not isinstance(values, Mapping):
        return {prefix: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def changed_settings(recorded: bytes, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return dotted path -> (value before, value now) of settings that make a run another one than was recorded.

    Where calls run, how many steps there are and what is saved does not count. A path that one of them lacks has None.
    """
    before, now = flattened(_parse(recorded)), flattened(shown_config(config))
    before.pop(WORKING_FOLDER, None)
    return {
        path: (before.get(path), now.get(path))
        for path in {**before, **now}
        if path.partition(".")[0] not in _OF_THE_ATTEMPT and before.get(path) != now.get(path)
    }


def experiment_reference(data: bytes) -> str:
    """Return the experiment of a dumped configuration: a registered name, a file or a module.

    Raises:
        ConfigError: the data is no dumped configuration.
    """
    values = _parse(data)
    reference = values.get("experiment")
    if not isinstance(reference, str):
        raise ConfigError("a dumped configuration must name its experiment under the key 'experiment'")
    return reference


def load_config(data: bytes, experiment: Declared) -> RunConfig:
    """Return the configuration that `dump_config` or `recorded_config` wrote.

    Raises:
        ConfigError: the data is not JSON, or holds values that the experiment does not accept.
    """
    values = _parse(data)
    values.pop(WORKING_FOLDER, None)
    reference = str(values.get("experiment", experiment.name))
    config, problems = validate(values, experiment, known_keys(experiment), describe_plainly)
    raise_problems(problems, reference)
    assert config is not None
    return config


def _parse(data: bytes) -> dict[str, object]:
    try:
        values = json.loads(data)
    except ValueError as error:
        raise ConfigError(f"a dumped configuration is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("a dumped configuration must be a JSON object")
    return values

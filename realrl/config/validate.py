"""Validation of nested plain values into a `RunConfig`: types, limits, and conditions between keys.

Errors name the dotted path, the value and the allowed values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from realrl.config.keys import Declared, Key
from realrl.config.problems import Problem, subject_of
from realrl.config.schema import BUILT_IN, MAX_DEVICES, CallConfig, DatasetConfig, RunConfig
from realrl.config.secrets import without_secrets
from realrl.errors import did_you_mean

Describe = Callable[[str, object], tuple[str, str]]
"""(path, value) -> (subject, origin) of a problem."""


def validate(
    values: Mapping[str, object], experiment: Declared, keys: Mapping[str, Key], describe: Describe
) -> tuple[RunConfig | None, list[Problem]]:
    """Check everything; the configuration is None when there is a problem."""
    problems: list[Problem] = []
    algorithm: Any = None
    try:
        algorithm = experiment.options.model_validate(values.get("algorithm", {}))
    except ValidationError as error:
        problems += _translate(error, ("algorithm",), keys, describe)
    try:
        config = RunConfig.model_validate({**values, "algorithm": algorithm})
    except ValidationError as error:
        return None, _translate(error, (), keys, describe) + problems
    if problems:
        return None, problems
    problems = cross_check(config)
    return (None if problems else config), problems


def cross_check(config: RunConfig) -> list[Problem]:
    """Return violations of conditions between keys of different sections."""
    problems: list[Problem] = []
    places: list[tuple[str, RunConfig | CallConfig]] = [("", config)]
    places += [(f"calls.{name}.", own) for name, own in config.calls.items()]
    for prefix, section in places:
        if section.n_mbs is not None and section.max_tokens_per_mb is not None:
            problems.append(
                Problem(
                    f"{prefix}max_tokens_per_mb={section.max_tokens_per_mb}",
                    f"{prefix}n_mbs={section.n_mbs} is given too; micro-batches follow one of them, so set the other "
                    "to null",
                )
            )
    n_devices = config.cluster.n_nodes * config.cluster.n_devices_per_node
    if n_devices > MAX_DEVICES:
        text = f"with cluster.n_devices_per_node={config.cluster.n_devices_per_node} there are {n_devices}"
        problems.append(
            Problem(f"cluster.n_nodes={config.cluster.n_nodes}", f"{text} devices; the most is {MAX_DEVICES}")
        )
    if config.launcher == "inline" and n_devices > 1:
        problems.append(
            Problem(
                "launcher=inline",
                f"one process cannot run the {n_devices} workers of cluster.n_nodes="
                f"{config.cluster.n_nodes}, cluster.n_devices_per_node={config.cluster.n_devices_per_node}; "
                "use launcher=local, or one device",
            )
        )
    if config.is_on_machines and config.cluster.shares_devices:
        text = "workers of several machines share no device; use launcher=local"
        problems.append(Problem("cluster.shares_devices=true", text))
    if config.save.keep_best.startswith("eval/") and not config.eval.is_on:
        text = "the run is not evaluated; set eval.every_steps, or name a metric of training"
        problems.append(Problem(f"save.keep_best={config.save.keep_best}", text))
    problems += _data_problems(config.dataset)
    n_minibatches = getattr(config.algorithm, "n_minibatches", 1)
    if config.n_seqs % n_minibatches:
        problems.append(
            Problem(
                f"n_seqs={config.n_seqs}",
                f"must be a multiple of algorithm.n_minibatches={n_minibatches}, "
                f"such as {max(1, config.n_seqs // n_minibatches) * n_minibatches}",
            )
        )
    return problems


def _data_problems(dataset: DatasetConfig) -> list[Problem]:
    """Return contradictions between a path, several files and their weights."""
    problems: list[Problem] = []
    if dataset.files and dataset.path != BUILT_IN:
        text = f"dataset.files names {', '.join(dataset.files)} too; give one or several"
        text += " (~dataset.path takes back what a preset says)"
        problems.append(Problem(f"dataset.path={dataset.path}", text))
    weighted = [name for name, file in dataset.files.items() if file.weight is not None]
    for name, file in dataset.files.items():
        if not name.isidentifier():
            problems.append(Problem(f"dataset.files.{name}", "a name has letters, digits and _ only"))
        if weighted and file.weight is None:
            text = f"has no weight, and {weighted[0]} has one; give it to all files or to none"
            problems.append(Problem(f"dataset.files.{name}", text))
    return problems


def _translate(
    error: ValidationError, prefix: tuple[str, ...], keys: Mapping[str, Key], describe: Describe
) -> list[Problem]:
    """Translate pydantic's errors into problems with keys; several about one key become one."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        loc = (*prefix, *detail["loc"])
        path, key = _locate(loc, keys)
        value = detail["input"]
        subject, origin = describe(path, value)
        if detail["type"] == "missing" and ".".join(map(str, loc)) == path:
            problems.setdefault(path, Problem(path, f"has no default; give it: {path}=VALUE", origin))
            continue
        reason = detail.get("ctx", {}).get("error")  # raised by a validator of ours
        if key is None:
            text = str(reason) if reason is not None else detail["msg"]
            problems.setdefault(path, Problem(path, without_secrets(text, {path: value}), origin))
            continue
        text = f"must be {key.allowed}"
        if reason is not None and not isinstance(value, bool):
            text = str(reason)
        elif detail["type"] == "literal_error" and isinstance(value, str):
            meant = did_you_mean(value, key.allowed.removeprefix("one of ").split(", "))
            text += f".{meant}" if meant else ""
        problems.setdefault(path, Problem(subject, without_secrets(text, {path: value}), origin))
    return list(problems.values())


def _locate(loc: tuple[int | str, ...], keys: Mapping[str, Key]) -> tuple[str, Key | None]:
    """Return path and key of a pydantic location, which may go deeper than keys: list items, members of a union."""
    path = ""
    for part in loc:
        path = f"{path}.{part}" if path else str(part)
        key = keys.get(path)
        if key is not None:
            rest = loc[path.count(".") + 1 :]
            if len(rest) > 1 and str(rest[1]) in key.fields:
                return f"{path}.{rest[0]}.{rest[1]}", key.fields[str(rest[1])]
            if key.is_mapping and rest:
                path = f"{path}.{rest[0]}"
            return path, key
    return path, None


def describe_plainly(path: str, value: object) -> tuple[str, str]:
    """Return the subject of a problem whose origin is not known."""
    return subject_of(path, value), ""

"""Overrides that choose a YAML file: ``preset=tiny``, ``cluster=NAME``, ``allocation=NAME``, ``models.<role>=NAME``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from realrl.config.groups import compose_groups, group_options, load_yaml
from realrl.config.keys import Declared
from realrl.config.overrides import Edit
from realrl.config.problems import Problem
from realrl.errors import did_you_mean

FILE_ENDINGS = (".yaml", ".yml")


@dataclass
class Choices:
    """Files chosen on the command line; "" where there is none. `models` maps roles to options of the group model."""

    preset: str = ""
    cluster: str = ""
    allocation: str = ""
    models: dict[str, str] = field(default_factory=dict)


def take_choices(
    edits: Sequence[Edit], experiment: Declared, config_dir: Path | None
) -> tuple[Choices, list[Edit], list[Problem]]:
    """Separate the edits that choose a file from those that set values; an unknown file is a problem."""
    choices, left, problems = Choices(), list[Edit](), list[Problem]()
    for edit in edits:
        name = edit.text
        role = edit.path.removeprefix("models.")
        if edit.path == "preset" and (edit.is_deletion or edit.value in (None, "")):
            choices.preset = ""
        elif edit.is_deletion or name is None:
            left.append(edit)
        elif edit.path == "preset":
            if name.endswith(FILE_ENDINGS) or _is_option(edit, "preset", config_dir, problems):
                choices.preset = name
        elif edit.path == "cluster":
            if _is_option(edit, "cluster", config_dir, problems):
                choices.cluster = name
        elif edit.path == "allocation":
            if name in group_options("allocation", config_dir):
                choices.allocation = name
            else:
                left.append(Edit("allocation.mode", name, name))
        elif edit.path == f"models.{role}" and role in experiment.roles:
            if _is_option(edit, "model", config_dir, problems):
                choices.models[role] = name
        else:
            left.append(edit)
    return choices, left, problems


def yaml_layers(
    choices: Choices, experiment: Declared, config_dir: Path | None
) -> Iterator[tuple[Mapping[str, object], str]]:
    """Yield values and origin of the chosen files: a preset of the user's own, then Hydra's groups from `config_dir`.

    Raises:
        ConfigError: a file cannot be read or composed.
    """
    selected: list[str] = []
    if choices.preset.endswith(FILE_ENDINGS):
        yield load_yaml(Path(choices.preset)), choices.preset
    elif choices.preset:
        selected.append(f"+preset={choices.preset}")
        if experiment.name in group_options(f"preset/{choices.preset}", config_dir):
            selected.append(f"+preset/{choices.preset}={experiment.name}")
    selected += [f"+cluster={choices.cluster}"] if choices.cluster else []
    selected += [f"+allocation={choices.allocation}"] if choices.allocation else []
    selected += [f"+model@models.{role}={name}" for role, name in choices.models.items()]
    if selected and config_dir is not None:
        yield compose_groups(selected, config_dir), "configs: " + ", ".join(item.lstrip("+") for item in selected)


def _is_option(edit: Edit, group: str, config_dir: Path | None, problems: list[Problem]) -> bool:
    """Return True if the edit's value is a file of the group; otherwise add a problem."""
    options = group_options(group, config_dir)
    if edit.text in options:
        return True
    known = f"choose from {', '.join(options)}" if options else "there is none to choose from"
    text = f"no such {group}; {known}.{did_you_mean(str(edit.text), options)}"
    if group == "model":
        text += f" A folder is given by {edit.path}.path"
    problems.append(Problem(edit.subject, text))
    return False

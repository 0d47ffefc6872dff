"""Overrides that choose a YAML file: ``preset=tiny``, ``cluster=NAME``, ``allocation=NAME``, ``models.<role>=NAME``.

Hydra composes the files, which stand in one folder for each group: preset, cluster, allocation and model.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realrl.config.keys import Declared
from realrl.config.overrides import Edit
from realrl.config.problems import Problem
from realrl.errors import ConfigError, did_you_mean
from realrl.files import read_input

FILE_ENDINGS = (".yaml", ".yml")
_MAX_BYTES, _MAX_VALUES, _MAX_LEVELS = 100_000, 10_000, 20  # of a YAML file of the user's own


def take_choices(
    edits: Sequence[Edit], experiment: Declared, config_dir: Path | None
) -> tuple[dict[str, str], list[Edit], list[Problem]]:
    """Separate the edits that choose a file from those that set values; an unknown file is a problem.

    Returns:
        path of an override -> the file that it chooses; the other edits; problems.
    """
    choices, left, problems = dict[str, str](), list[Edit](), list[Problem]()
    groups = {"preset": "preset", "cluster": "cluster", "allocation": "allocation"}
    groups |= {f"models.{role}": "model" for role in experiment.roles}
    for edit in edits:
        name, group = edit.text, groups.get(edit.path)
        if group == "preset" and (edit.is_deletion or edit.value in (None, "")):
            choices.pop("preset", None)
        elif group is None or edit.is_deletion or name is None:
            left.append(edit)
        elif group == "allocation" and name not in _options("allocation", config_dir):
            left.append(Edit("allocation.mode", name, name))
        elif (group == "preset" and name.endswith(FILE_ENDINGS)) or _is_option(edit, group, config_dir, problems):
            choices[edit.path] = name
    return choices, left, problems


def yaml_layers(
    choices: Mapping[str, str], experiment: Declared, config_dir: Path | None
) -> Iterator[tuple[Mapping[str, object], str]]:
    """Yield values and origin of the chosen files: a preset of the user's own, then those of `config_dir`.

    A preset has a part for an experiment. A variant without one takes its nearest ancestor's, and puts what its own
    defaults state in the place of what is there.

    Raises:
        ConfigError: a file cannot be read or composed.
    """
    selected: list[str] = []
    preset = choices.get("preset", "")
    if preset.endswith(FILE_ENDINGS):
        yield load_yaml(Path(preset), f"preset={preset}"), preset
    elif preset:
        selected.append(f"+preset={preset}")
        parts = _options(f"preset/{preset}", config_dir)
        part = next((name for name in (experiment.name, *experiment.ancestors) if name in parts), None)
        if part == experiment.name:
            selected.append(f"+preset/{preset}={part}")
        elif part is not None:
            yield from _composed(selected, config_dir)
            for values, origin in _composed([f"+preset/{preset}={part}"], config_dir):
                yield _as_stated(values, experiment.ancestors[part]), origin
            selected = []
    selected += [f"+{group}={choices[group]}" for group in ("cluster", "allocation") if group in choices]
    selected += [f"+model@{path}={name}" for path, name in choices.items() if path.startswith("models.")]
    yield from _composed(selected, config_dir)


def _options(group: str, config_dir: Path | None) -> list[str]:
    """Return the names of the YAML files of a group, sorted."""
    return [] if config_dir is None else sorted(path.stem for path in (config_dir / group).glob("*.yaml"))


def _is_option(edit: Edit, group: str, config_dir: Path | None, problems: list[Problem]) -> bool:
    """Return True if the edit's value is a file of the group; otherwise add a problem."""
    options = _options(group, config_dir)
    if edit.text in options:
        return True
    known = f"choose from {', '.join(options)}" if options else "there is none to choose from"
    text = f"no such {group}; {known}.{did_you_mean(str(edit.text), options)}"
    if group == "model":
        text += f" A folder is given by {edit.path}.path"
    problems.append(Problem(edit.subject, text))
    return False


def _as_stated(values: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, section by section with what `stated` has in the place of them."""
    merged = {}
    for name, value in values.items():
        own = stated.get(name, value)
        are_sections = isinstance(value, Mapping) and isinstance(own, Mapping)
        merged[name] = _as_stated(value, own) if are_sections else own
    return merged


def _composed(selected: Sequence[str], config_dir: Path | None) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield values and origin of the selected files, such as ``+preset=tiny`` and ``+model@models.actor=tiny``.

    Interpolations are left as they are: their values come from later layers.
    """
    if not selected or config_dir is None:
        return
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        with initialize_config_dir(config_dir=str(config_dir.resolve()), version_base="1.3"):
            composed = compose(overrides=list(selected))
    except (HydraException, YAMLError) as error:
        raise ConfigError(f"the YAML files in '{config_dir}' cannot be composed: {_one_line(error)}") from error
    yield _as_plain(OmegaConf.to_container(composed)), "configs: " + ", ".join(item.lstrip("+") for item in selected)


def load_yaml(path: Path, source: str) -> Mapping[str, Any]:
    """Load a YAML file of the user's own: a mapping. `source` names it in messages.

    Raises:
        ConfigError: it cannot be read, or is no such YAML.
    """
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = read_input(path, most_bytes=_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        text = content.decode()
        check_extent(text)
        loaded = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
        json.dumps(loaded, default=str)  # fails for numbers of thousands of digits
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{source}: is no YAML that can be used: {_one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{source}: must hold keys and values, such as 'steps: 10'")
    return _as_plain(loaded)


def check_extent(text: str) -> None:
    """Refuse YAML that is too deep, or too large with its aliases written out; nothing of it is built.

    Raises:
        ValueError: says what is too much, or which alias stands inside of what it stands for.
        YAMLError: the text is no YAML.
    """
    import yaml

    known: dict[str, tuple[int, int]] = {}  # anchor -> values and levels below it
    above: list[tuple[str | None, int, int]] = [(None, 0, 0)]
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        n_values, n_levels, anchor = 1, 0, getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            above.append((anchor, 1, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, n_values, n_levels = above.pop()
        elif isinstance(event, yaml.AliasEvent):
            if anchor in (name for name, _, _ in above):
                raise ValueError(f"the alias '{anchor}' stands inside of what it stands for")
            n_values, n_levels = known.get(str(anchor), (1, 0))
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if not isinstance(event, yaml.CollectionStartEvent):
            known |= {anchor: (n_values, n_levels)} if anchor is not None else {}
            parent, n_inside, levels_inside = above.pop()
            above.append((parent, n_inside + n_values, max(levels_inside, n_levels + 1)))
        if above[-1][1] > _MAX_VALUES or len(above) + above[-1][2] > _MAX_LEVELS:
            raise ValueError(
                f"it has more than {_MAX_VALUES:,} values with aliases written out, or {_MAX_LEVELS} levels"
            )


def _as_plain(loaded: Any) -> dict[str, Any]:
    return {str(name): value for name, value in loaded.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]

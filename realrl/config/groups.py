"""Named YAML files, composed by Hydra."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realrl.errors import ConfigError

_MAX_CHARS, _MAX_VALUES, _MAX_LEVELS = 100_000, 10_000, 20


def group_options(group: str, config_dir: Path | None) -> list[str]:
    """Return the names of the YAML files of a group, sorted."""
    return [] if config_dir is None else sorted(path.stem for path in (config_dir / group).glob("*.yaml"))


def compose_groups(selected: Sequence[str], config_dir: Path) -> dict[str, Any]:
    """Compose the chosen options, such as ``+preset=tiny`` and ``+model@models.actor=tiny``, with Hydra.

    Interpolations are left as they are: their values come from later layers.

    Raises:
        ConfigError: a file cannot be composed.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        with initialize_config_dir(config_dir=str(config_dir.resolve()), version_base="1.3"):
            composed = compose(overrides=list(selected))
    except (HydraException, YAMLError) as error:
        raise ConfigError(f"the YAML files in '{config_dir}' cannot be composed: {_one_line(error)}") from error
    plain = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def load_yaml(path: Path) -> Mapping[str, Any]:
    """Load a YAML file of the user's own: a mapping, nested like the configuration.

    Raises:
        ConfigError: the file is missing, no YAML, or no mapping.
    """
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CHARS + 1)
        if len(text) > _MAX_CHARS:
            raise ValueError(f"it has more than {_MAX_CHARS:,} characters")
        _check_extent(text)
        loaded = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
        json.dumps(loaded, default=str)  # fails for numbers of thousands of digits
    except OSError as error:
        raise ConfigError(f"preset={path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, OmegaConfBaseException) as error:
        raise ConfigError(f"preset={path}: is no YAML that can be used: {_one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"preset={path}: must hold keys and values, such as 'steps: 10'")
    return {str(name): value for name, value in loaded.items()}


def _check_extent(text: str) -> None:
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]

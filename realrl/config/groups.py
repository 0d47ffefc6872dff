"""Named YAML files, composed by Hydra."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realrl.errors import ConfigError

_MAX_CHARS, _MAX_VALUES, _MAX_DEPTH = 100_000, 10_000, 20


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
        n_values, depth = _extent(yaml.compose(text, Loader=yaml.SafeLoader), (), {})
        if len(text) > _MAX_CHARS or n_values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise ConfigError(
                f"preset={path}: is too large: it has more than {_MAX_CHARS:,} characters, {_MAX_VALUES:,} values with "
                f"aliases written out, or {_MAX_DEPTH} levels"
            )
        loaded = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
        json.dumps(loaded, default=str)  # fails for numbers of thousands of digits
    except OSError as error:
        raise ConfigError(f"preset={path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, OmegaConfBaseException) as error:
        raise ConfigError(f"preset={path}: is not YAML: {_one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"preset={path}: must hold keys and values, such as 'steps: 10'")
    return {str(name): value for name, value in loaded.items()}


def _extent(node: Any, above: tuple[int, ...], known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of values and of levels of a YAML node with its aliases written out.

    Raises:
        ValueError: the node holds itself.
    """
    if node is None or isinstance(node.value, str):
        return 1, 0
    if id(node) in above:
        raise ValueError("an alias stands inside of what it stands for")
    if id(node) not in known:
        children = [child for item in node.value for child in (item if isinstance(item, tuple) else (item,))]
        sizes = [_extent(child, (*above, id(node)), known) for child in children]
        known[id(node)] = 1 + sum(n for n, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    return known[id(node)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]

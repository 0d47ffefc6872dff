"""Named YAML files, composed by Hydra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realrl.errors import ConfigError


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
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except OSError as error:
        raise ConfigError(f"preset={path}: cannot be read: {error.strerror or error}") from error
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"preset={path}: is not YAML: {_one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"preset={path}: must hold keys and values, such as 'steps: 10'")
    return {str(name): value for name, value in loaded.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]

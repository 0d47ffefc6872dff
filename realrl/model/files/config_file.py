"""`config.json` of Hugging Face model folders, read and written. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from realrl.errors import AssetError
from realrl.model.families import FAMILIES, find_family
from realrl.model.families.format import Family
from realrl.shape import DecoderConfig, DType, HeadKind


def read_config(folder: str | Path) -> DecoderConfig:
    """Read the configuration in `folder`; `head` and `dtype` are the checkpoint's.

    Raises:
        AssetError: the folder or its config.json is missing, unreadable or of an unsupported architecture.
    """
    return read_stored(Path(folder))[0]


def read_model_config(folder: str | Path, *, head: HeadKind = "lm", dtype: DType = "float32") -> DecoderConfig:
    """Read the configuration of the decoder that `load_model` would return.

    Raises:
        AssetError: `load_model` would refuse config.json.
    """
    folder = Path(folder)
    stored, _ = read_stored(folder)
    check_head(folder, stored, head)
    return replace(stored, head=head, dtype=dtype)


def check_head(folder: Path, stored: DecoderConfig, head: HeadKind) -> None:
    """Refuse a checkpoint whose head cannot become the wanted one.

    Raises:
        AssetError: a language model is wanted, and the folder holds a reward or value model.
    """
    if head == "lm" and stored.is_scalar:
        raise AssetError(
            f"{folder} holds a reward or value model, which cannot predict tokens",
            remedy="Give this role the folder of a language model.",
        )


def read_stored(folder: Path) -> tuple[DecoderConfig, Family]:
    """Like `read_config`, and return the family of the format too.

    Raises:
        AssetError: as `read_config`.
    """
    if not folder.is_dir():
        raise AssetError(f"model folder {folder} does not exist", remedy="Check models.<role>.path.")
    path = folder / "config.json"
    if not path.is_file():
        raise AssetError(f"{folder} has no config.json", remedy="It must be a Hugging Face model folder.")
    raw = read_json(path)
    family = find_family(raw, str(path))
    return family.config_from_hf(raw, str(path)), family


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        AssetError: the file cannot be read, or does not hold an object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise AssetError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise AssetError(f"{path} is not a JSON object")
    return raw


def config_to_hf(config: DecoderConfig, where: str) -> dict[str, Any]:
    """The content of a model's `config.json`.

    Raises:
        ValueError: the family's format cannot express the configuration.
    """
    family = family_of(config)
    raw = family.config_to_hf(config)
    read_back = replace(family.config_from_hf(raw, where), head=config.head, dtype=config.dtype)
    different = [
        field.name for field in fields(config) if getattr(read_back, field.name) != getattr(config, field.name)
    ]
    if different:
        raise ValueError(f"the format of family {config.family!r} cannot express {', '.join(different)} of {config}")
    return raw


def family_of(config: DecoderConfig) -> Family:
    """The family in whose format a model is written.

    Raises:
        ValueError: there is no such family.
    """
    if config.family not in FAMILIES:
        raise ValueError(f"there is no family {config.family!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[config.family]

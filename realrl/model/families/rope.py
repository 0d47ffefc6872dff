"""Rotary positions in `config.json`, read as `transformers` 5 reads them.

A `rope_scaling` that says anything takes the place of all of `rope_parameters`, its base included. The base is the one
in there, else the `rope_theta` beside it, else the family's. `realrl.model.files.contradictions` names keys that lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.errors import AssetError
from realrl.shape import DecoderConfig, RopeScaling

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters that count."""
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def read_theta(raw: Mapping[str, Any], default: float) -> float:
    """Return the base of the frequencies, or `default` where no key names one."""
    rope = rope_of(raw)
    return float(rope.get("rope_theta") or raw.get("rope_theta") or default)


def rotated_share(raw: Mapping[str, Any]) -> float:
    """Return the share of a head's dims that are rotated."""
    return float(rope_of(raw).get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)


def kind_of(rope: Mapping[str, Any], where: str, known: tuple[str, ...] = _ROPE_TYPES) -> str:
    """Return the kind of scaling, "default" for none.

    Raises:
        AssetError: the kind is not among the known ones.
    """
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in known:
        raise AssetError(f"{where}: rope type {kind!r} is not supported", remedy=f"Supported: {', '.join(known)}.")
    return kind


def read_scaling(rope: Mapping[str, Any], where: str, max_positions: int) -> RopeScaling | None:
    """Read the scaling of frequencies; None for the default kind.

    Args:
        rope: parameters that count.
        where: the file's path, for messages.
        max_positions: length of the context trained on where no key says it.

    Raises:
        AssetError: the kind of scaling is not supported.
        KeyError, TypeError, ValueError: a value is missing or impossible.
    """
    kind = kind_of(rope, where)
    if kind == "default":
        return None
    factor = float(rope["factor"])
    original = int(rope.get("original_max_position_embeddings") or max_positions)
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return RopeScaling("llama3", factor, low, high, original)
    return RopeScaling(
        "yarn",
        factor,
        original_max_positions=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_attention_factor(rope, factor),
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """YaRN's attention factor; mscale and mscale_all_dim, if both are given, weigh the logarithm in a quotient."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (
            RopeScaling("yarn", factor).amplitude * float(rope[key]) + 1.0 - float(rope[key])
            for key in ("mscale", "mscale_all_dim")
        )
        return above / below
    return None


def write_rope(config: DecoderConfig) -> dict[str, Any]:
    """Write the keys that this module reads, and those that readers older than `transformers` 5 look for."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    scaling = config.rope_scaling
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind != "linear":
            rope["original_max_position_embeddings"] = scaling.original_max_positions
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        if scaling.kind == "yarn":
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
            if scaling.attention_factor is not None:
                rope["attention_factor"] = scaling.attention_factor
    raw: dict[str, Any] = {"rope_parameters": rope, "rope_theta": config.rope_theta}
    if scaling is not None:
        raw["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return raw

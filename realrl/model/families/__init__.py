"""Model families: one module each, found by the architecture or model type that `config.json` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.errors import AssetError, did_you_mean
from realrl.model.families import gemma, gpt2, gpt_oss, llama, mistral, mixtral, olmo2, phi3, qwen, qwen3_moe
from realrl.model.families.format import Family

_ALL = (
    llama.FAMILY,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen3_moe.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    gemma.GEMMA,
    gemma.GEMMA2,
    gemma.GEMMA3,
    olmo2.FAMILY,
    phi3.FAMILY,
    gpt2.FAMILY,
    gpt_oss.FAMILY,
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
"""Families by `model_type`."""

ARCHITECTURES: Mapping[str, Family] = {
    name: family for family in _ALL for name in (family.lm_architecture, family.scalar_architecture)
}
"""Families by architecture, of language models and sequence classifiers."""


_REASONS = {
    "gemma3": "Of Gemma 3, models of text alone are known here: Gemma3ForCausalLM, of model_type 'gemma3_text'.",
}  # by the beginning of the name


def find_family(raw: Mapping[str, Any], where: str) -> Family:
    """Find the family of a parsed `config.json` by its architecture, or by its model type if it names none.

    Args:
        raw: the parsed file.
        where: the file's path, for messages.

    Raises:
        AssetError: the architecture or the model type is not supported, or they belong to different families.
    """
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    if not architectures:
        return _look_up(FAMILIES, "model_type", str(model_type or "(none)"), where)
    family = _look_up(ARCHITECTURES, "architecture", str(architectures[0]), where)
    if model_type not in (None, family.model_type):
        raise AssetError(
            f"{where}: architecture {architectures[0]!r} is one of {family.model_type!r}, but model_type is "
            f"{model_type!r}",
            remedy="The file was edited, or belongs to another model.",
        )
    return family


def _look_up(families: Mapping[str, Family], key: str, name: str, where: str) -> Family:
    if name not in families:
        name = name[:100]
        reason = next((f" {text}" for start, text in _REASONS.items() if name.lower().startswith(start)), None)
        raise AssetError(
            f"{where}: {key} {name!r} is not supported.{reason or did_you_mean(name, families)}",
            remedy=f"Supported: {', '.join(sorted(families))}.",
        )
    return families[name]

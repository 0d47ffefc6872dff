"""Mistral (Jiang et al. 2023): llama in which every layer may see only a window of the last tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.errors import AssetError
from realrl.model.families.common import check_activation, read_shared, reading, stored_tensors, write_shared
from realrl.model.families.format import Family
from realrl.shape import DecoderConfig

_LM, _SCALAR = "MistralForCausalLM", "MistralForSequenceClassification"
_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072}  # values of absent keys in this format


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        check_activation(raw, where, known=("silu",))
        window = raw.get("sliding_window", 4096)
        if window is not None and "full_attention" in (raw.get("layer_types") or ()):
            raise AssetError(f"{where}: layer_types is not supported", remedy="Every layer of a Mistral is alike.")
        shared = read_shared({**_DEFAULTS, **raw}, where, family="mistral")
        return DecoderConfig(**shared, sliding_window=None if window is None else int(window))


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    return write_shared(config, lm=_LM, scalar=_SCALAR) | {"sliding_window": config.sliding_window}


FAMILY = Family("mistral", _LM, _SCALAR, config_from_hf, config_to_hf, stored_tensors)

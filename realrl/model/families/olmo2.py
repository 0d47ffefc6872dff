"""OLMo 2 (OLMo Team 2024): llama with norms after attention and MLP, and of all queries and all keys together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.model.families.common import check_activation, read_shared, reading, stored_tensors, write_shared
from realrl.model.families.format import Family
from realrl.shape import DecoderConfig

_LM, _SCALAR = "Olmo2ForCausalLM", "Olmo2ForSequenceClassification"
_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}  # values of absent keys in this format


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        check_activation(raw, where, known=("silu",))
        shared = read_shared({**_DEFAULTS, **raw}, where, family="olmo2")
        has_bias = bool(raw.get("attention_bias", False))
        return DecoderConfig(**shared, attention_bias=has_bias, o_bias=has_bias, norm_place="after", qk_norm="all")


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    return write_shared(config, lm=_LM, scalar=_SCALAR) | {"attention_bias": config.attention_bias}


FAMILY = Family("olmo2", _LM, _SCALAR, config_from_hf, config_to_hf, stored_tensors)

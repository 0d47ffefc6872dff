"""llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped KV heads, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.model.families.common import check_activation, read_shared, reading, stored_tensors, write_shared
from realrl.model.families.format import Family
from realrl.shape import DecoderConfig

_LM, _SCALAR = "LlamaForCausalLM", "LlamaForSequenceClassification"


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        check_activation(raw, where, known=("silu",))
        has_bias = bool(raw.get("attention_bias", False))
        shared = read_shared({"max_position_embeddings": 2048, **raw}, where, family="llama")
        return DecoderConfig(
            **shared, attention_bias=has_bias, o_bias=has_bias, mlp_bias=bool(raw.get("mlp_bias", False))
        )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    raw = write_shared(config, lm=_LM, scalar=_SCALAR)
    return raw | {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


FAMILY = Family("llama", _LM, _SCALAR, config_from_hf, config_to_hf, stored_tensors)

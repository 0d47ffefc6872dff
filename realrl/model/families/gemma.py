"""Gemma 1 (Gemma Team 2024): GeGLU, norms that multiply by 1 + weight, scaled embeddings, tied head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from realrl.model.families.common import check_activation, read_shared, reading, stored_tensors, write_shared
from realrl.model.families.format import Family
from realrl.shape import DecoderConfig

_LM, _SCALAR = "GemmaForCausalLM", "GemmaForSequenceClassification"
_DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192}
_GELU = ("gelu_pytorch_tanh", "gelu")  # the first release said "gelu" and meant the approximation


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        for key in ("hidden_act", "hidden_activation"):
            check_activation(raw, where, key=key, known=_GELU)
        shared = read_shared({**_DEFAULTS, **raw}, where, family="gemma")
        has_bias = bool(raw.get("attention_bias", False))
        return DecoderConfig(
            **shared,
            attention_bias=has_bias,
            o_bias=has_bias,
            activation="gelu_tanh",
            norm_offset=True,
            embedding_scale=math.sqrt(shared["hidden_size"]),
        )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    raw = write_shared(config, lm=_LM, scalar=_SCALAR)
    return raw | {"attention_bias": config.attention_bias, "hidden_activation": raw["hidden_act"]}


FAMILY = Family("gemma", _LM, _SCALAR, config_from_hf, config_to_hf, stored_tensors)

"""Qwen 2 to 3: llama with a window in the later layers.

Qwen 2 and 2.5 (Yang et al. 2024) have biases of q, k and v; Qwen 3 (Yang et al. 2025) normalises queries and keys head
by head instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.model.families.common import (
    check_activation,
    read_shared,
    read_windows,
    reading,
    stored_tensors,
    write_shared,
    write_windows,
)
from realrl.model.families.format import Family
from realrl.shape import DecoderConfig

_LM2, _SCALAR2 = "Qwen2ForCausalLM", "Qwen2ForSequenceClassification"
_LM3, _SCALAR3 = "Qwen3ForCausalLM", "Qwen3ForSequenceClassification"
# values of absent keys in these formats
_DEFAULTS2 = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_DEFAULTS3 = {**_DEFAULTS2, "head_dim": 128}


def _qwen2_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    with reading(where):
        check_activation(raw, where, known=("silu",))
        shared = read_shared({**_DEFAULTS2, **raw}, where, family="qwen2")
        windows = read_windows(raw, shared["n_layers"])
        return DecoderConfig(**shared, **windows, attention_bias=True)


def _qwen2_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return write_shared(config, lm=_LM2, scalar=_SCALAR2) | write_windows(config)


def _qwen3_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    with reading(where):
        check_activation(raw, where, known=("silu",))
        shared = read_shared({**_DEFAULTS3, **raw}, where, family="qwen3")
        windows = read_windows(raw, shared["n_layers"])
        has_bias = bool(raw.get("attention_bias", False))
        return DecoderConfig(**shared, **windows, qk_norm="head", attention_bias=has_bias, o_bias=has_bias)


def _qwen3_to_hf(config: DecoderConfig) -> dict[str, Any]:
    raw = write_shared(config, lm=_LM3, scalar=_SCALAR3) | write_windows(config)
    return raw | {"attention_bias": config.attention_bias}


QWEN2 = Family("qwen2", _LM2, _SCALAR2, _qwen2_from_hf, _qwen2_to_hf, stored_tensors)
QWEN3 = Family("qwen3", _LM3, _SCALAR3, _qwen3_from_hf, _qwen3_to_hf, stored_tensors)

"""Qwen 3 (Yang et al. 2025): llama with queries and keys normalised head by head, and a window in the later layers."""

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

_LM, _SCALAR = "Qwen3ForCausalLM", "Qwen3ForSequenceClassification"
_HEAD_DIM = 128  # value of an absent head_dim in this format


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        check_activation(raw, where, known=("silu",))
        shared = read_shared({"head_dim": _HEAD_DIM, **raw}, where, family="qwen3")
        windows = read_windows(raw, shared["n_layers"])
        has_bias = bool(raw.get("attention_bias", False))
        return DecoderConfig(**shared, **windows, qk_norm=True, attention_bias=has_bias, o_bias=has_bias)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    raw = write_shared(config, lm=_LM, scalar=_SCALAR) | write_windows(config)
    return raw | {"attention_bias": config.attention_bias}


FAMILY = Family("qwen3", _LM, _SCALAR, config_from_hf, config_to_hf, stored_tensors)

"""Qwen 2 and 2.5 (Yang et al. 2024): llama with biases of q, k and v, and a window in the later layers."""

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

_LM, _SCALAR = "Qwen2ForCausalLM", "Qwen2ForSequenceClassification"


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        check_activation(raw, where, known=("silu",))
        shared = read_shared(raw, where, family="qwen2")
        windows = read_windows(raw, shared["n_layers"])
        return DecoderConfig(**shared, **windows, attention_bias=True)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    return write_shared(config, lm=_LM, scalar=_SCALAR) | write_windows(config)


FAMILY = Family("qwen2", _LM, _SCALAR, config_from_hf, config_to_hf, stored_tensors)

"""Gemma 1 to 3, text only (Gemma Team 2024, 2024, 2025): GeGLU, norms that multiply by 1 + weight, scaled embeddings.

Gemma 2 adds norms after attention and MLP, bounds of scores and logits, and a window in every other layer. Gemma 3
normalises queries and keys instead of bounding scores, and its layers with a window have rotary positions of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from realrl.errors import AssetError
from realrl.model.families.common import (
    check_activation,
    read_shared,
    reading,
    stored_tensors,
    windows_by_kind,
    write_kinds,
    write_shared,
)
from realrl.model.families.format import Family
from realrl.model.families.rope import kind_of, read_scaling, write_rope
from realrl.shape import DecoderConfig

_LM1, _SCALAR1 = "GemmaForCausalLM", "GemmaForSequenceClassification"
_LM2, _SCALAR2 = "Gemma2ForCausalLM", "Gemma2ForSequenceClassification"
_LM3, _SCALAR3 = "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"
# values of absent keys in these formats
_DEFAULTS1 = {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192}
_DEFAULTS2 = _DEFAULTS1 | {
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_DEFAULTS3 = _DEFAULTS2 | {
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_KNOWN_CAPS = {"gemma": (), "gemma2": _CAPS, "gemma3_text": _CAPS[1:]}  # transformers has no other bound of Gemma 3
_GELU = ("gelu_pytorch_tanh", "gelu")  # the first release said "gelu" and meant the approximation
_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETA, _LOCAL_THETA = 1e6, 1e4  # Gemma 3's, where no key says them


def _shared(raw: Mapping[str, Any], where: str, family: str) -> dict[str, Any]:
    """Read what all generations have in common."""
    shared = read_shared(raw, where, family=family, known=_KNOWN_CAPS[family])
    has_bias = bool(raw.get("attention_bias", False))
    return shared | {
        "attention_bias": has_bias,
        "o_bias": has_bias,
        "activation": "gelu_tanh",
        "norm_offset": True,
        "embedding_scale": math.sqrt(shared["hidden_size"]),
    }


def _gemma1_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    with reading(where):
        for key in ("hidden_act", "hidden_activation"):
            check_activation(raw, where, key=key, known=_GELU)
        return DecoderConfig(**_shared({**_DEFAULTS1, **raw}, where, "gemma"))


def _gemma1_to_hf(config: DecoderConfig) -> dict[str, Any]:
    raw = write_shared(config, lm=_LM1, scalar=_SCALAR1)
    return raw | {"attention_bias": config.attention_bias, "hidden_activation": raw["hidden_act"]}


# ---------------------------------------------------------------- Gemma 2


def _later(raw: Mapping[str, Any], n_layers: int, *, every: int) -> dict[str, Any]:
    """Read what Gemma 2 and 3 have beside Gemma 1; each `every`-th layer has no window unless layer_types says it."""
    kinds = raw.get("layer_types") or [_SLIDING if (i + 1) % every else _FULL for i in range(n_layers)]
    score_cap, logit_cap = (None if raw[key] is None else float(raw[key]) for key in _CAPS)
    return {
        "norm_place": "both",
        "score_size": int(raw["query_pre_attn_scalar"]),
        "score_softcap": score_cap,
        "logit_softcap": logit_cap,
        **windows_by_kind(kinds, raw["sliding_window"], n_layers),
    }


def _later_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Write what Gemma 2 and 3 have in common."""
    lm, scalar = (_LM2, _SCALAR2) if config.family == "gemma2" else (_LM3, _SCALAR3)
    raw = write_shared(config, lm=lm, scalar=scalar)
    return raw | {
        "attention_bias": config.attention_bias,
        "hidden_activation": raw["hidden_act"],
        "layer_types": write_kinds(config),
        "sliding_window": config.sliding_window,
        "query_pre_attn_scalar": config.score_size,
        "attn_logit_softcapping": config.score_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def _gemma2_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    with reading(where):
        check_activation(raw, where, key="hidden_activation", known=_GELU[:1])
        raw = {**_DEFAULTS2, **raw}
        shared = _shared(raw, where, "gemma2")
        return DecoderConfig(**shared, **_later(raw, shared["n_layers"], every=2))


# ---------------------------------------------------------------- Gemma 3


def _gemma3_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    with reading(where):
        check_activation(raw, where, key="hidden_activation", known=_GELU[:1])
        raw = {**_DEFAULTS3, **raw}
        ropes: Mapping[str, Any] = raw.get("rope_parameters") or {}
        if ropes and not {_FULL, _SLIDING} & ropes.keys():
            raise AssetError(
                f"{where}: rope_parameters says nothing of {_FULL!r} and {_SLIDING!r}",
                remedy="Gemma 3 has rotary positions for each kind of layer: write one entry for each.",
            )
        full = {**(ropes.get(_FULL) or {}), **(raw.get("rope_scaling") or {})}
        local = ropes.get(_SLIDING) or {}
        kind_of(local, where, known=("default",))
        shared = _shared({**raw, "rope_parameters": None, "rope_scaling": None}, where, "gemma3_text")
        shared |= {
            "rope_theta": float(full.get("rope_theta") or raw.get("rope_theta") or _THETA),
            "rope_scaling": read_scaling(full, where, shared["max_positions"]),
            "local_rope_theta": float(local.get("rope_theta") or raw.get("rope_local_base_freq") or _LOCAL_THETA),
            "qk_norm": "head",
        }
        later = _later(raw, shared["n_layers"], every=int(raw.get("sliding_window_pattern") or 6))
        return DecoderConfig(**shared, **later)


def _gemma3_to_hf(config: DecoderConfig) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    ropes = {_FULL: write_rope(config)["rope_parameters"], _SLIDING: local}
    return _later_to_hf(config) | {"rope_parameters": ropes, "rope_local_base_freq": config.local_rope_theta}


GEMMA = Family("gemma", _LM1, _SCALAR1, _gemma1_from_hf, _gemma1_to_hf, stored_tensors)
GEMMA2 = Family("gemma2", _LM2, _SCALAR2, _gemma2_from_hf, _later_to_hf, stored_tensors)
GEMMA3 = Family("gemma3_text", _LM3, _SCALAR3, _gemma3_from_hf, _gemma3_to_hf, stored_tensors)

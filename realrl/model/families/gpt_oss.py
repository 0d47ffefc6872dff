"""gpt-oss (OpenAI 2025): experts with biases and a bounded SwiGLU, sinks, biases, a window in every other layer.

Weights in MXFP4, as first published, are refused; copies in bfloat16 are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.model.families.common import (
    attention_names,
    check_activation,
    end_names,
    read_shared,
    reading,
    windows_by_kind,
    write_kinds,
    write_shared,
)
from realrl.model.families.format import Family, Part, StoredTensor, renamed
from realrl.shape import DecoderConfig, MoEConfig

_LM, _SCALAR = "GptOssForCausalLM", "GptOssForSequenceClassification"
# values of absent keys in this format
_DEFAULTS = {"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        check_activation(raw, where, known=("silu",))
        raw = {**_DEFAULTS, **raw}
        if raw.get("rope_parameters") is None:
            raw["rope_parameters"] = _ROPE
        shared = read_shared(raw, where, family="gpt_oss", default_theta=150000.0)
        n_layers, has_bias = shared["n_layers"], bool(raw.get("attention_bias", True))
        usual = ["full_attention" if i % 2 else "sliding_attention" for i in range(n_layers)]
        moe = MoEConfig(
            n_experts=int(raw.get("num_local_experts", 128)),
            top_k=int(raw.get("num_experts_per_tok", 4)),
            intermediate_size=shared["intermediate_size"],
            aux_loss_coef=float(raw.get("router_aux_loss_coef", 0.001)),
            biases=True,
            limit=float(raw.get("swiglu_limit", 7.0)),
            gain=float(raw.get("swiglu_alpha", 1.702)),
        )
        windows = windows_by_kind(raw.get("layer_types") or usual, raw.get("sliding_window", 128), n_layers)
        return DecoderConfig(**shared, **windows, attention_bias=has_bias, o_bias=has_bias, sinks=True, moe=moe)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    moe = config.moe
    assert moe is not None, "a gpt-oss has experts"
    return write_shared(config, lm=_LM, scalar=_SCALAR) | {
        "attention_bias": config.attention_bias,
        "layer_types": write_kinds(config),
        "sliding_window": config.sliding_window,
        "intermediate_size": moe.intermediate_size,
        "num_local_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss_coef,
        "swiglu_limit": moe.limit,
        "swiglu_alpha": moe.gain,
    }


def stored_tensors(config: DecoderConfig) -> list[StoredTensor]:
    """The tensors of a checkpoint and their parts."""
    tensors = renamed(end_names(config))
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        experts, stored = f"{ours}.mlp.experts", f"{theirs}.mlp.experts"
        tensors += renamed(
            attention_names(config, layer)
            | {
                f"{ours}.attention.sinks": f"{theirs}.self_attn.sinks",
                f"{ours}.mlp.router.weight": f"{theirs}.mlp.router.weight",
                f"{ours}.mlp.router.bias": f"{theirs}.mlp.router.bias",
                f"{experts}.down_bias": f"{stored}.down_proj_bias",
            }
        )
        matrices, biases = ((Part(f"{experts}.gate{end}"), Part(f"{experts}.up{end}")) for end in ("", "_bias"))
        tensors += [
            StoredTensor(f"{stored}.gate_up_proj", matrices, dim=1, is_transposed=True, is_interleaved=True),
            StoredTensor(f"{stored}.gate_up_proj_bias", biases, dim=1, is_interleaved=True),
            StoredTensor(f"{stored}.down_proj", (Part(f"{experts}.down"),), is_transposed=True),
        ]
    return tensors


FAMILY = Family("gpt_oss", _LM, _SCALAR, config_from_hf, config_to_hf, stored_tensors)

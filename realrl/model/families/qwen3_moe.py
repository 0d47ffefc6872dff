"""Qwen 3 with experts (Yang et al. 2025): Qwen 3's attention, many small experts, plain MLPs in some blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.model.families.common import check_activation, read_shared, reading, write_shared
from realrl.model.families.experts import stored_by_expert, stored_together
from realrl.model.families.format import Family
from realrl.shape import DecoderConfig, MoEConfig

_LM, _SCALAR = "Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification"
_DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768}  # values of absent keys in this format
_WORDS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        check_activation(raw, where, known=("silu",))
        shared = read_shared({**_DEFAULTS, **raw}, where, family="qwen3_moe")
        has_bias = bool(raw.get("attention_bias", False))
        # unlike in the dense models, every layer has the window
        window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
        return DecoderConfig(
            **shared,
            qk_norm="head",
            attention_bias=has_bias,
            o_bias=has_bias,
            sliding_window=None if window is None else int(window),
            moe=_experts(raw, shared["n_layers"]),
        )


def _experts(raw: Mapping[str, Any], n_layers: int) -> MoEConfig | None:
    """Read the experts; None if all layers are dense."""
    n_experts = int(raw.get("num_experts", raw.get("num_local_experts", 128)))
    only_mlp, every = set(raw.get("mlp_only_layers") or ()), int(raw.get("decoder_sparse_step", 1))
    dense = tuple(i for i in range(n_layers) if n_experts == 0 or i in only_mlp or (i + 1) % every)
    if len(dense) == n_layers:
        return None
    return MoEConfig(
        n_experts=n_experts,
        top_k=int(raw.get("num_experts_per_tok", 8)),
        intermediate_size=int(raw.get("moe_intermediate_size", 768)),
        normalise_top_k=bool(raw.get("norm_topk_prob", False)),
        aux_loss_coef=float(raw.get("router_aux_loss_coef", 0.001)),
        dense_layers=dense,
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    moe = config.moe
    raw = write_shared(config, lm=_LM, scalar=_SCALAR) | {
        "attention_bias": config.attention_bias,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.n_layers) if moe is None else moe.dense_layers),
    }
    if moe is not None:
        raw |= {
            "num_experts": moe.n_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.intermediate_size,
            "norm_topk_prob": moe.normalise_top_k,
            "router_aux_loss_coef": moe.aux_loss_coef,
        }
    return raw


_STORED = stored_by_expert("mlp", _WORDS)
FAMILY = Family("qwen3_moe", _LM, _SCALAR, config_from_hf, config_to_hf, _STORED, other_forms=(stored_together,))

"""Phi 3, 3.5 and 4 (Abdin et al. 2024): llama in which a part of each head may be rotated, and a window may be there.

On disk q, k and v are one matrix, and so are gate and up.

A model with "longrope" would change with the length of its text; it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.model.families.common import check_activation, end_names, read_shared, reading, write_shared
from realrl.model.families.format import Family, Part, StoredTensor, renamed
from realrl.model.families.rope import kind_of, rope_of, rotated_share
from realrl.shape import DecoderConfig

_LM, _SCALAR = "Phi3ForCausalLM", "Phi3ForSequenceClassification"
# values of absent keys in this format
_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        check_activation(raw, where, known=("silu",))
        raw = {**_DEFAULTS, **raw}
        kind_of(rope_of(raw), where, known=("default",))
        shared = read_shared(raw, where, family="phi3", known=("partial_rotary_factor",))
        share, window = rotated_share(raw), raw.get("sliding_window")
        return DecoderConfig(
            **shared,
            rotary_dim=None if share == 1.0 else int(shared["head_dim"] * share),
            sliding_window=None if window is None else int(window),
        )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    raw = write_shared(config, lm=_LM, scalar=_SCALAR) | {"sliding_window": config.sliding_window}
    if config.rotary_dim is not None:
        raw["partial_rotary_factor"] = share = config.rotary_dim / config.head_dim
        raw["rope_parameters"]["partial_rotary_factor"] = share
    return raw


def stored_tensors(config: DecoderConfig) -> list[StoredTensor]:
    """The tensors of a checkpoint and their parts."""
    tensors = renamed(end_names(config))
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        tensors += renamed(
            {
                f"{ours}.attention_norm.weight": f"{theirs}.input_layernorm.weight",
                f"{ours}.mlp_norm.weight": f"{theirs}.post_attention_layernorm.weight",
                f"{ours}.attention.o.weight": f"{theirs}.self_attn.o_proj.weight",
                f"{ours}.mlp.down.weight": f"{theirs}.mlp.down_proj.weight",
            }
        )
        for name, layers in {
            "self_attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
            "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
        }.items():
            parts = tuple(Part(f"{ours}.{part}.weight") for part in layers)
            tensors.append(StoredTensor(f"{theirs}.{name}.weight", parts))
    return tensors


FAMILY = Family("phi3", _LM, _SCALAR, config_from_hf, config_to_hf, stored_tensors)

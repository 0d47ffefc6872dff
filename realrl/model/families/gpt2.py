"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, an MLP without gate, biases everywhere, tied head.

On disk q, k and v are one matrix, and all matrices of the blocks are [in, out]. Dropout is left out: sampling and
training must see the same model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from realrl.errors import AssetError
from realrl.model.families.common import check_activation, read_ends, reading, refuse_variants, write_ends
from realrl.model.families.format import Family, Part, StoredTensor, renamed
from realrl.shape import DecoderConfig

_LM, _SCALAR = "GPT2LMHeadModel", "GPT2ForSequenceClassification"
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")
_PREFIX = "transformer."
_CAUSAL_MASK = re.compile(r"\.attn\.(masked_)?bias$")
# options that change the computation, and their only supported values
_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        refuse_variants(raw, where)
        check_activation(raw, where, key="activation_function", known=_GELU_TANH)
        for key, supported in _FIXED.items():
            if raw.get(key, supported) != supported:
                raise AssetError(f"{where}: {key} {raw[key]!r} is not supported", remedy=f"Only {supported} is.")
        size, n_heads = int(raw["n_embd"]), int(raw["n_head"])
        if size % n_heads:
            raise ValueError(f"n_embd {size} is not a multiple of n_head {n_heads}")
        return DecoderConfig(
            family="gpt2",
            vocab_size=int(raw["vocab_size"]),
            hidden_size=size,
            n_layers=int(raw["n_layer"]),
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_dim=size // n_heads,
            intermediate_size=int(raw.get("n_inner") or 4 * size),
            norm_eps=float(raw.get("layer_norm_epsilon", 1e-5)),
            tied_embeddings=bool(raw.get("tie_word_embeddings", True)),
            max_positions=int(raw.get("n_positions", 1024)),
            attention_bias=True,
            o_bias=True,
            mlp_bias=True,
            norm="layer",
            activation="gelu_tanh",
            gated_mlp=False,
            learned_positions=True,
            **read_ends(raw),
        )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    return {
        "architectures": [_SCALAR if config.is_scalar else _LM],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        **write_ends(config),
    }


def stored_tensors(config: DecoderConfig) -> list[StoredTensor]:
    """The tensors of a checkpoint and their parts."""
    names = {"embedding.weight": "transformer.wte.weight", "position_embedding.weight": "transformer.wpe.weight"}
    names |= {f"norm.{part}": f"transformer.ln_f.{part}" for part in ("weight", "bias")}
    if config.is_scalar:
        names["head.weight"] = "score.weight"
    elif not config.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    tensors = renamed(names)
    for i in range(config.n_layers):
        tensors += _block_tensors(f"blocks.{i}", f"transformer.h.{i}")
    return tensors


def _block_tensors(ours: str, theirs: str) -> list[StoredTensor]:
    tensors = renamed(
        {
            f"{ours}.{norm}.{part}": f"{theirs}.{name}.{part}"
            for norm, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2"))
            for part in ("weight", "bias")
        }
    )
    layers = {
        "attn.c_attn": ("attention.q", "attention.k", "attention.v"),
        "attn.c_proj": ("attention.o",),
        "mlp.c_fc": ("mlp.up",),
        "mlp.c_proj": ("mlp.down",),
    }
    for name, sources in layers.items():
        for part in ("weight", "bias"):
            parts = tuple(Part(f"{ours}.{source}.{part}") for source in sources)
            tensors.append(StoredTensor(f"{theirs}.{name}.{part}", parts, is_transposed=part == "weight"))
    return tensors


def canonical_name(name: str) -> str:
    """The name in a language model's checkpoint; names of the bare model lack the prefix."""
    is_bare = re.match(r"(wte|wpe|ln_f|h)\.", name) is not None
    return _PREFIX + name if is_bare else name


def is_ignorable(name: str) -> bool:
    """True if a checkpoint tensor may be left unread: causal masks, and a language-model head that is not needed."""
    return name == "lm_head.weight" or _CAUSAL_MASK.search(name) is not None


FAMILY = Family(
    "gpt2", _LM, _SCALAR, config_from_hf, config_to_hf, stored_tensors, is_ignorable, canonical_name=canonical_name
)

"""Mixtral (Jiang et al. 2024): Mistral with experts in every block, a token's weights adding up to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.errors import AssetError
from realrl.model.families.common import check_activation, read_shared, reading, write_shared
from realrl.model.families.experts import stored_by_expert, stored_together
from realrl.model.families.format import Family
from realrl.shape import DecoderConfig, MoEConfig

_LM, _SCALAR = "MixtralForCausalLM", "MixtralForSequenceClassification"
# values of absent keys in this format
_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
_WORDS = {"gate": "w1", "up": "w3", "down": "w2"}


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; see `Family`."""
    with reading(where):
        check_activation(raw, where, known=("silu",))
        if raw.get("router_jitter_noise"):
            raise AssetError(
                f"{where}: router_jitter_noise {raw['router_jitter_noise']!r} is not supported",
                remedy="Set it to 0: noise in training would make sampling and training see different models.",
            )
        shared = read_shared({**_DEFAULTS, **raw}, where, family="mixtral", default_theta=1e6)
        window = raw.get("sliding_window")
        moe = MoEConfig(
            n_experts=int(raw.get("num_local_experts", 8)),
            top_k=int(raw.get("num_experts_per_tok", 2)),
            intermediate_size=shared["intermediate_size"],
            normalise_top_k=True,
            aux_loss_coef=float(raw.get("router_aux_loss_coef", 0.001)),
        )
        return DecoderConfig(**shared, sliding_window=None if window is None else int(window), moe=moe)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    moe = config.moe
    assert moe is not None, "a Mixtral has experts"
    return write_shared(config, lm=_LM, scalar=_SCALAR) | {
        "intermediate_size": moe.intermediate_size,
        "sliding_window": config.sliding_window,
        "num_local_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss_coef,
    }


_STORED = stored_by_expert("block_sparse_moe", _WORDS)
FAMILY = Family("mixtral", _LM, _SCALAR, config_from_hf, config_to_hf, _STORED, other_forms=(stored_together,))

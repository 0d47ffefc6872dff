"""The llama family: `config.json` and tensor names of Hugging Face, to and from ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from realrl.errors import AssetError
from realrl.model.config import DecoderConfig, RopeScaling

LM_ARCHITECTURE = "LlamaForCausalLM"
SCALAR_ARCHITECTURE = "LlamaForSequenceClassification"
ARCHITECTURES = (LM_ARCHITECTURE, SCALAR_ARCHITECTURE)

_DEFAULT_THETA = 10000.0  # what an absent rope_theta means in this format


def config_from_hf(raw: Mapping[str, Any], *, where: str) -> DecoderConfig:
    """Translate a parsed `config.json`; the head is "reward" for a sequence classifier.

    Args:
        raw: the parsed file.
        where: the file's path, for messages.

    Raises:
        AssetError: a required key is missing or mistyped, or an option changes the architecture in a way we lack.
    """
    _refuse_variants(raw, where)
    try:
        n_heads = int(raw["num_attention_heads"])
        eos = raw.get("eos_token_id")
        return DecoderConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            n_layers=int(raw["num_hidden_layers"]),
            n_heads=n_heads,
            n_kv_heads=int(raw.get("num_key_value_heads") or n_heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // n_heads),
            intermediate_size=int(raw["intermediate_size"]),
            rope_theta=float(_rope(raw).get("rope_theta") or raw.get("rope_theta") or _DEFAULT_THETA),
            rope_scaling=_rope_scaling(raw, where),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
            pad_token_id=raw.get("pad_token_id"),
            head="reward" if SCALAR_ARCHITECTURE in raw.get("architectures", ()) else "lm",
            dtype=_dtype(raw),
        )
    except KeyError as error:
        raise AssetError(f"{where} has no key {error.args[0]!r}", remedy="It is not a complete model folder.") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise AssetError(f"{where} holds an impossible value: {error}") from None


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that `transformers` reads back."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling is not None:
        rope |= {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
        if config.rope_scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": config.rope_scaling.low_freq_factor,
                "high_freq_factor": config.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": config.rope_scaling.original_max_positions,
            }
    eos = config.eos_token_ids
    raw: dict[str, Any] = {
        "architectures": [SCALAR_ARCHITECTURE if config.is_scalar else LM_ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # readers older than transformers 5 look here and in rope_scaling
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
        "dtype": str(config.dtype).removeprefix("torch."),
    }
    if config.rope_scaling is not None:
        raw["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if config.is_scalar:
        raw |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return raw


def tensor_names(config: DecoderConfig) -> dict[str, str]:
    """Our parameter name -> name in the checkpoint, for every parameter of the decoder."""
    names = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    for i in range(config.n_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        names[f"{ours}.attention_norm.weight"] = f"{theirs}.input_layernorm.weight"
        names[f"{ours}.mlp_norm.weight"] = f"{theirs}.post_attention_layernorm.weight"
        for part in ("weight", "bias") if config.attention_bias else ("weight",):
            for letter in "qkvo":
                names[f"{ours}.attention.{letter}.{part}"] = f"{theirs}.self_attn.{letter}_proj.{part}"
        for part in ("weight", "bias") if config.mlp_bias else ("weight",):
            for word in ("gate", "up", "down"):
                names[f"{ours}.mlp.{word}.{part}"] = f"{theirs}.mlp.{word}_proj.{part}"
    if config.is_scalar:
        names["head.weight"] = "score.weight"
    elif not config.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    return names


def is_ignorable(name: str) -> bool:
    """Whether a checkpoint tensor may be left unread: derived values, and a language-model head that is not needed."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _refuse_variants(raw: Mapping[str, Any], where: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise AssetError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported", remedy="Only 'silu' is.")
    if raw.get("quantization_config"):
        raise AssetError(
            f"{where}: quantized checkpoints cannot be trained", remedy="Use the unquantized model folder."
        )
    if float(_rope(raw).get("partial_rotary_factor", 1.0)) != 1.0:
        raise AssetError(f"{where}: partial_rotary_factor other than 1 is not supported")


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _rope_scaling(raw: Mapping[str, Any], where: str) -> RopeScaling | None:
    rope = _rope(raw)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise AssetError(f"{where}: rope type {kind!r} is not supported", remedy="Supported: default, linear, llama3.")


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)

"""Common parts of the families with llama's layout: keys of `config.json`, names of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from realrl.errors import AssetError
from realrl.model.families.format import StoredTensor, renamed
from realrl.model.families.rope import read_scaling, read_theta, rope_of, rotated_share, write_rope
from realrl.shape import DecoderConfig, NormPlace

_GELU_TANH = "gelu_pytorch_tanh"
_POST_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_NORMS: Mapping[NormPlace, Mapping[str, str]] = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "both": {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_POST_NORMS},
    "after": _POST_NORMS,
}  # our names of a block's norms -> llama's


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn failures to translate `config.json` into errors that name the file.

    Raises:
        AssetError: a key is missing, or a value is impossible.
    """
    try:
        yield
    except KeyError as error:
        raise AssetError(f"{where} has no key {error.args[0]!r}", remedy="It is not a complete model folder.") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise AssetError(f"{where} holds an impossible value: {error}") from None


# ---------------------------------------------------------------- config.json to ours


def read_shared(
    raw: Mapping[str, Any], where: str, *, family: str, default_theta: float = 1e4, known: Collection[str] = ()
) -> dict[str, Any]:
    """Read the fields of `DecoderConfig` that families with llama's keys have in common.

    Args:
        raw: the parsed `config.json`, with the family's `max_position_embeddings` where the key is absent.
        where: the file's path, for messages.
        default_theta: this family's rope_theta where the key is absent.
        known: see `refuse_variants`.

    Raises:
        AssetError: an option changes the architecture in an unsupported way.
        KeyError, TypeError, ValueError: for `reading` to translate.
    """
    refuse_variants(raw, where, known)
    n_heads = int(raw["num_attention_heads"])
    max_positions = int(raw["max_position_embeddings"])
    return {
        "family": family,
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "n_layers": int(raw["num_hidden_layers"]),
        "n_heads": n_heads,
        "n_kv_heads": int(raw.get("num_key_value_heads") or n_heads),
        "head_dim": int(raw.get("head_dim") or int(raw["hidden_size"]) // n_heads),
        "intermediate_size": int(raw["intermediate_size"]),
        "rope_theta": read_theta(raw, default_theta),
        "rope_scaling": read_scaling(rope_of(raw), where, max_positions),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "max_positions": max_positions,
        **read_ends(raw),
    }


def read_ends(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read special tokens, head and dtype, which every family writes alike."""
    eos = raw.get("eos_token_id")
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return {
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
        "pad_token_id": raw.get("pad_token_id"),
        "head": "reward" if any(map(is_classifier, raw.get("architectures") or ())) else "lm",
        "dtype": name if name in ("bfloat16", "float16") else "float32",
    }


def is_classifier(architecture: str) -> bool:
    return architecture.endswith("ForSequenceClassification")


def refuse_variants(raw: Mapping[str, Any], where: str, known: Collection[str] = ()) -> None:
    """Refuse options of several families that change the computation in an unsupported way.

    Args:
        known: keys of such options that the family has.

    Raises:
        AssetError: names the key.
    """
    if raw.get("quantization_config"):
        quantized = raw["quantization_config"]
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
        raise AssetError(
            f"{where}: quantized checkpoints cannot be trained" + (f" ({str(method)[:40]})" if method else ""),
            remedy="Use the unquantized model folder, in bf16 or float32.",
        )
    if "partial_rotary_factor" not in known and rotated_share(raw) != 1.0:
        raise AssetError(f"{where}: partial_rotary_factor other than 1 is not supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(key) and key not in known:
            raise AssetError(f"{where}: {key} {raw[key]!r} is not supported")


def check_activation(raw: Mapping[str, Any], where: str, *, key: str = "hidden_act", known: tuple[str, ...]) -> None:
    """Refuse an activation that the family does not have; an absent key means the first known one.

    Raises:
        AssetError: names the key.
    """
    name = raw.get(key) or known[0]
    if name not in known:
        supported = " or ".join(repr(other) for other in known)
        verb = "is" if len(known) == 1 else "are"
        raise AssetError(f"{where}: {key} {name!r} is not supported", remedy=f"Only {supported} {verb}.")


def read_windows(raw: Mapping[str, Any], n_layers: int) -> dict[str, Any]:
    """Read `sliding_window` and `windowed_layers` of families in which some layers have a window.

    Raises:
        ValueError: layer_types does not fit.
    """
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        kinds = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(n_layers)]
    return windows_by_kind(kinds, window, n_layers)


def windows_by_kind(kinds: Sequence[str], window: int | None, n_layers: int) -> dict[str, Any]:
    """Turn the kind of each layer into `sliding_window` and `windowed_layers`.

    Args:
        kinds: "full_attention" or "sliding_attention".
        window: tokens that a token sees in layers of the second kind.

    Raises:
        ValueError: the kinds are others, or not as many as layers, or there is no window.
    """
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"layer_types knows 'full_attention' and 'sliding_attention', not {min(unknown)!r}")
    if len(kinds) != n_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {n_layers} layers")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if not layers:
        return {"sliding_window": None, "windowed_layers": None}
    if window is None:
        raise ValueError("layer_types has 'sliding_attention', but sliding_window is not set or not used")
    return {"sliding_window": int(window), "windowed_layers": None if len(layers) == n_layers else layers}


# ---------------------------------------------------------------- ours to config.json


def write_shared(config: DecoderConfig, *, lm: str, scalar: str) -> dict[str, Any]:
    """Write the keys that `read_shared` reads.

    Args:
        lm, scalar: architectures of the language model and of the sequence classifier.
    """
    return {
        "architectures": [scalar if config.is_scalar else lm],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu" if config.activation == "silu" else _GELU_TANH,
        "rms_norm_eps": config.norm_eps,
        **write_rope(config),
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_positions,
        **write_ends(config),
    }


def write_ends(config: DecoderConfig) -> dict[str, Any]:
    """Write the keys that `read_ends` reads."""
    eos = config.eos_token_ids
    raw: dict[str, Any] = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
        "dtype": config.dtype,
    }
    if config.is_scalar:
        raw |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return raw


def write_windows(config: DecoderConfig) -> dict[str, Any]:
    """Write the keys that `read_windows` reads, and `use_sliding_window`."""
    windows = [config.window_of(i) for i in range(config.n_layers)]
    first = next((i for i, window in enumerate(windows) if window is not None), config.n_layers)
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": first,
        "layer_types": write_kinds(config),
    }


def write_kinds(config: DecoderConfig) -> list[str]:
    """The kind of each layer, as `windows_by_kind` reads it."""
    windows = (config.window_of(layer) for layer in range(config.n_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


# ---------------------------------------------------------------- tensors


def attention_names(config: DecoderConfig, layer: int) -> dict[str, str]:
    """Our name -> llama's, for a block's attention and both norms."""
    ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
    names = {f"{ours}.{norm}.weight": f"{theirs}.{name}.weight" for norm, name in _NORMS[config.norm_place].items()}
    for letter in "qkvo":
        has_bias = config.o_bias if letter == "o" else config.attention_bias
        for part in ("weight", "bias") if has_bias else ("weight",):
            names[f"{ours}.attention.{letter}.{part}"] = f"{theirs}.self_attn.{letter}_proj.{part}"
    if config.qk_norm is not None:
        for letter in "qk":
            names[f"{ours}.attention.{letter}_norm.weight"] = f"{theirs}.self_attn.{letter}_norm.weight"
    return names


def mlp_names(config: DecoderConfig, layer: int) -> dict[str, str]:
    """Our name -> llama's, for a block's dense MLP."""
    ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.mlp"
    parts = ("weight", "bias") if config.mlp_bias else ("weight",)
    return {
        f"{ours}.{word}.{part}": f"{theirs}.{word}_proj.{part}" for part in parts for word in ("gate", "up", "down")
    }


def end_names(config: DecoderConfig) -> dict[str, str]:
    """Our name -> llama's, for parameters outside of the blocks."""
    names = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if config.is_scalar:
        names["head.weight"] = "score.weight"
    elif not config.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    return names


def stored_tensors(config: DecoderConfig) -> list[StoredTensor]:
    """The tensors of a dense model with llama's names."""
    names = end_names(config)
    for layer in range(config.n_layers):
        names |= attention_names(config, layer) | mlp_names(config, layer)
    return renamed(names)

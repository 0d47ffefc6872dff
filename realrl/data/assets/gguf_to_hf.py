"""Conversion of a GGUF file of the llama family to a Hugging Face folder that `transformers` and realrl load.

Quantised tensors are dequantised (Q4_1 blocks hold 32 four-bit numbers with a scale and a minimum, Q8_0 blocks 32
eight-bit numbers with a scale) and written as bfloat16: its rounding is small beside the quantisation's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from realrl.errors import AssetError

# Tensor names outside and inside a block: GGUF -> Hugging Face.
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_CONTROL_TOKEN = 3  # token type of special tokens, from the GGUF specification
_PRE_TOKENIZERS = ("smollm",)


def convert_gguf(source: Path, target: Path) -> None:
    """Write config, weights (bfloat16 safetensors), tokenizer and generation defaults of `source` into folder `target`.

    Raises:
        AssetError: the `gguf` package is missing, the file is broken, or its architecture, tokenizer or a tensor is of
            a kind that is not supported.
    """
    from safetensors.torch import save_file

    fields, tensors = _open(source)
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise AssetError(f"{source.name} holds a model of architecture {architecture!r}, only 'llama' is supported")
    target.mkdir(parents=True, exist_ok=True)
    weights = {}
    for tensor in tensors:
        name, value = _weight(tensor, fields, source)
        weights[name] = value
    config = _model_config(fields, is_tied="lm_head.weight" not in weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", {"_from_model_config": True, **special})
    _write_tokenizer(fields, target, source)


def _open(source: Path) -> tuple[dict[str, Any], list[Any]]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise AssetError(
            "converting a GGUF file needs the package gguf, which is not installed",
            remedy="pip install 'realrl[quickstart]'",
        ) from error
    try:
        reader = GGUFReader(source)
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise AssetError(f"{source} is not a readable GGUF file: {error}", remedy="Fetch it again.") from error


def _weight(tensor: Any, fields: Mapping[str, Any], source: Path) -> tuple[str, torch.Tensor]:
    from gguf import dequantize

    if tensor.name in _GLOBAL:
        name, suffix = _GLOBAL[tensor.name], ""
    else:
        _, _, rest = tensor.name.partition("blk.")
        block, _, suffix = rest.partition(".")
        if suffix not in _BLOCK:
            raise AssetError(f"{source.name} holds the tensor {tensor.name!r}, which a llama does not have")
        name = f"model.layers.{block}.{_BLOCK[suffix]}"
    value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    if suffix in ("attn_q.weight", "attn_k.weight"):
        count = "head_count" if suffix == "attn_q.weight" else "head_count_kv"
        value = unpermute(value, fields[f"llama.attention.{count}"])
    return name, value.to(torch.bfloat16).contiguous()


def unpermute(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Undo the row order that GGUF gives to query and key projections of the llama family.

    GGUF rotates neighbouring rows ``(2i, 2i + 1)`` of a head together, Hugging Face rows ``(i, i + head_dim / 2)``.

    Args:
        weight: ``[n_heads * head_dim, hidden]`` in GGUF order.
        n_heads: query heads for the query projection, key-value heads for the key projection.
    """
    n_rows, hidden = weight.shape
    return weight.view(n_heads, n_rows // n_heads // 2, 2, hidden).transpose(1, 2).reshape(n_rows, hidden)


def _model_config(fields: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    hidden, n_heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    eos = fields["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": n_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // n_heads,
        "max_position_embeddings": fields["llama.context_length"],
        # float32 in the file: 1e-5 reads back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id", eos),
        "eos_token_id": eos,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", eos),
    }


def _write_tokenizer(fields: Mapping[str, Any], target: Path, source: Path) -> None:
    """Byte-level BPE that splits digits one by one, as SmolLM's does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, splitting = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or splitting not in _PRE_TOKENIZERS:
        raise AssetError(f"{source.name} holds a tokenizer of kind {kind!r}/{splitting!r}, which is not supported")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))
    special = {
        f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{theirs}_token_id" in fields
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **special,
    }
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    _write_json(target / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""Small models of every family, as `transformers` configures them, with the odd cases of each."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from realrl.model.families import find_family
from realrl.shape import DecoderConfig

SEQLENS = (7, 1, 12)  # the last is longer than every window below
VOCAB_SIZE = 61

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
# 20 and 12: on the CPU, `transformers` multiplies experts only whose rows are a multiple of 16 bytes
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20}
_QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 16}
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.5}
_MIXED_LAYERS = ["full_attention", "sliding_attention", "full_attention"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama yarn": ("llama", {"rope_parameters": YARN, "num_key_value_heads": 1}),
    "llama yarn, all options": (
        "llama",
        {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 0.9}},
    ),
    "llama yarn, mscale": ("llama", {"rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.7}}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": YARN},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 window": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "layer_types": _MIXED_LAYERS}
        | {"attention_bias": True, "num_key_value_heads": 4},
    ),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral, two tokens": ("mistral", {"sliding_window": 2, "num_key_value_heads": 1}),
    "mistral without window": ("mistral", {"sliding_window": None, "head_dim": 16, "rope_parameters": LINEAR}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma untied": ("gemma", {"head_dim": 8, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 4} | _CAPS),
    "gemma2 without caps": (
        "gemma2",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5, "num_key_value_heads": 4}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4, "sliding_window_pattern": 2}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}},
    ),
    "gemma3 caps": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 4, "num_key_value_heads": 1, "layer_types": _MIXED_LAYERS}
        | {"final_logit_softcapping": 1.5},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2 bias": (
        "olmo2",
        {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "phi3": ("phi3", {"sliding_window": 5}),
    "phi3 partial": ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20, "head_dim": 16}
        | {"sliding_window": 5, "swiglu_limit": 0.8, "rope_parameters": YARN | {"truncate": False}},
    ),
    "mixtral": ("mixtral", _MIXTRAL),
    "mixtral window, one expert a token": (
        "mixtral",
        _MIXTRAL | {"sliding_window": 5, "tie_word_embeddings": True, "num_experts_per_tok": 1, "head_dim": 16},
    ),
    "qwen3_moe": ("qwen3_moe", _QWEN_MOE),
    "qwen3_moe normalised": (
        "qwen3_moe",
        _QWEN_MOE | {"norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3_moe every other layer": ("qwen3_moe", _QWEN_MOE | {"decoder_sparse_step": 2, "num_key_value_heads": 1}),
    "qwen3_moe some dense": ("qwen3_moe", _QWEN_MOE | {"mlp_only_layers": [0, 2], "norm_topk_prob": True}),
    "qwen3_moe window": ("qwen3_moe", _QWEN_MOE | {"use_sliding_window": True, "sliding_window": 4}),
    "qwen3_moe all dense": ("qwen3_moe", _QWEN_MOE | {"mlp_only_layers": [0, 1, 2]}),
    "gpt2 untied": ("gpt2", {"n_inner": 50, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
}
ONE_EACH = (
    *("qwen2", "qwen3 window", "mistral", "gemma", "gemma2", "gemma3", "olmo2", "phi3 partial", "gpt2", "mixtral"),
    *("qwen3_moe some dense", "gpt_oss"),
)


def hf_config(case: str, **changes: Any) -> transformers.PretrainedConfig:
    """The `transformers` configuration of a case, with `changes`."""
    model_type, options = CASES[case]
    shared = _GPT2 if model_type == "gpt2" else _SHARED
    return transformers.AutoConfig.for_model(model_type, **(shared | options | changes))


def decoder_config(case: str) -> DecoderConfig:
    """Our configuration of the same model."""
    raw = hf_config(case).to_dict()
    return find_family(raw, "here").config_from_hf(raw, "here")


def hf_model(case: str, *, is_classifier: bool = False) -> transformers.PreTrainedModel:
    """Make a model in which no parameter is zero, one or tiny."""
    auto = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModelForCausalLM
    model = auto.from_config(hf_config(case, **({"num_labels": 1} if is_classifier else {}))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale, mean = (0.1, 0.0) if name.endswith("bias") else (0.3, float("norm" in name or "ln_" in name))
            p.copy_(torch.randn(p.shape, generator=generator) * scale + mean)
    return model


def sequences() -> list[torch.Tensor]:
    """Random tokens without special ones."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator) for n in SEQLENS]

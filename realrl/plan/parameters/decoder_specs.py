"""The parameters of a decoder, and the dims and units of their tensor-parallel split.

Parameters have the names of `realrl.model.decoder.Decoder`, in the order of its `named_parameters()`.

| parameter | split along | in units of |
|---|---|---|
| embedding, language-model head | dim 0 | vocabulary rows |
| embedding of learned positions | dim 0 | positions |
| q and its bias | dim 0 | attention heads |
| k, v and their biases | dim 0 | KV heads |
| gate, up and their biases | dim 0 | rows |
| o | dim 1 | attention heads |
| down | dim 1 | columns |
| sinks | dim 0 | attention heads |
| gate, up of all experts and their biases | dim 1, of [experts, rows, columns] | rows |
| down of all experts | dim 2 | columns |
| router of the experts, biases of router and down | replicated | |
| norm of all queries, of all keys | dim 0 | attention heads, KV heads |
| other norms and their biases, biases of o and down, value or reward head | replicated | |
"""

from __future__ import annotations

from functools import lru_cache

from realrl.errors import AllocationError
from realrl.plan.parameters.adapters import with_adapters
from realrl.plan.parameters.specs import DTYPE_BYTES, ParameterSpec, Unit
from realrl.shape import DecoderConfig, MoEConfig


@lru_cache(maxsize=64)
def parameter_specs(config: DecoderConfig) -> tuple[ParameterSpec, ...]:
    """Return all parameters of a model, in the order of `Decoder.named_parameters()`.

    Raises:
        AllocationError: the dtype is not a floating-point type whose size is known.
    """
    dtype = config.dtype
    if dtype not in DTYPE_BYTES:
        raise AllocationError(f"parameters of dtype {dtype}", remedy=f"Use one of {', '.join(DTYPE_BYTES)}.")
    vocabulary = (config.vocab_size, config.hidden_size)
    is_lm = config.head == "lm"
    tied = is_lm and config.tied_embeddings
    specs = [
        ParameterSpec(
            "embedding.weight", vocabulary, dtype, "embedding", 0, config.vocab_size, "head" if tied else None, "row"
        )
    ]
    if config.learned_positions:
        n, shape = config.max_positions, (config.max_positions, config.hidden_size)
        specs.append(ParameterSpec("position_embedding.weight", shape, dtype, "embedding", 0, n, None, "row"))
    for index in range(config.n_layers):
        specs += _block_specs(config, index, dtype)
    for part in ("weight", "bias") if config.norm_bias else ("weight",):
        specs.append(ParameterSpec(f"norm.{part}", (config.hidden_size,), dtype, "head"))
    if not is_lm:
        specs.append(ParameterSpec("head.weight", (1, config.hidden_size), dtype, "head"))
    elif not tied:
        specs.append(ParameterSpec("head.weight", vocabulary, dtype, "head", 0, config.vocab_size, None, "row"))
    return with_adapters(specs, config.lora)


def _block_specs(config: DecoderConfig, index: int, dtype: str) -> list[ParameterSpec]:
    specs: list[ParameterSpec] = []
    size, inner = config.hidden_size, config.intermediate_size

    def norm(name: str) -> None:
        for part in ("weight", "bias") if config.norm_bias else ("weight",):
            specs.append(ParameterSpec(f"blocks.{index}.{name}.{part}", (size,), dtype, index))

    def qk_norm(name: str, length: int, n_units: int, unit: Unit) -> None:
        name = f"blocks.{index}.attention.{name}.weight"
        if config.qk_norm == "all":
            specs.append(ParameterSpec(name, (length,), dtype, index, 0, n_units, None, unit))
        else:
            specs.append(ParameterSpec(name, (config.head_dim,), dtype, index, is_tp_partial=True))

    def linear(name: str, shape: tuple[int, int], dim: int, n_units: int, unit: Unit, *, bias: bool) -> None:
        prefix = f"blocks.{index}.{name}"
        specs.append(ParameterSpec(f"{prefix}.weight", shape, dtype, index, dim, n_units, None, unit))
        if bias and dim == 0:
            specs.append(ParameterSpec(f"{prefix}.bias", shape[:1], dtype, index, 0, n_units, None, unit))
        elif bias:
            specs.append(ParameterSpec(f"{prefix}.bias", shape[:1], dtype, index))

    q_size, kv_size = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    if config.norm_place != "after":
        norm("attention_norm")
    if config.sinks:
        name, n = f"blocks.{index}.attention.sinks", config.n_heads
        specs.append(ParameterSpec(name, (n,), dtype, index, 0, n, None, "head"))
    linear("attention.q", (q_size, size), 0, config.n_heads, "head", bias=config.attention_bias)
    linear("attention.k", (kv_size, size), 0, config.n_kv_heads, "kv_head", bias=config.attention_bias)
    linear("attention.v", (kv_size, size), 0, config.n_kv_heads, "kv_head", bias=config.attention_bias)
    linear("attention.o", (size, q_size), 1, config.n_heads, "head", bias=config.o_bias)
    if config.qk_norm is not None:
        qk_norm("q_norm", q_size, config.n_heads, "head")
        qk_norm("k_norm", kv_size, config.n_kv_heads, "kv_head")
    if config.norm_place != "before":
        norm("attention_post_norm")
    if config.norm_place != "after":
        norm("mlp_norm")
    experts = config.experts_of(index)
    if experts is not None:
        specs += _expert_specs(experts, index, size, dtype)
    else:
        if config.gated_mlp:
            linear("mlp.gate", (inner, size), 0, inner, "row", bias=config.mlp_bias)
        linear("mlp.up", (inner, size), 0, inner, "row", bias=config.mlp_bias)
        linear("mlp.down", (size, inner), 1, inner, "row", bias=config.mlp_bias)
    if config.norm_place != "before":
        norm("mlp_post_norm")
    return specs


def _expert_specs(moe: MoEConfig, index: int, size: int, dtype: str) -> list[ParameterSpec]:
    n, inner, prefix = moe.n_experts, moe.intermediate_size, f"blocks.{index}.mlp"

    def experts(word: str, shape: tuple[int, ...], dim: int) -> ParameterSpec:
        return ParameterSpec(
            f"{prefix}.experts.{word}", shape, dtype, index, dim, inner, None, "row", n_experts=n, top_k=moe.top_k
        )

    specs = [
        ParameterSpec(f"{prefix}.router.weight", (n, size), dtype, index, is_tp_partial=True),
        experts("gate", (n, inner, size), 1),
        experts("up", (n, inner, size), 1),
        experts("down", (n, size, inner), 2),
    ]
    if moe.biases:
        specs.insert(1, ParameterSpec(f"{prefix}.router.bias", (n,), dtype, index, is_tp_partial=True))
        specs += [
            experts("gate_bias", (n, inner), 1),
            experts("up_bias", (n, inner), 1),
            ParameterSpec(f"{prefix}.experts.down_bias", (n, size), dtype, index, is_tp_partial=True),
        ]
    return specs

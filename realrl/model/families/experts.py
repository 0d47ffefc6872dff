"""Tensor names of the families with experts, in the two forms in which files hold them.

`transformers` keeps all experts of a layer in two tensors, ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I]. By
default it writes them expert by expert, as the original checkpoints are, and reads either form; so do we.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from realrl.model.families.common import attention_names, end_names, mlp_names
from realrl.model.families.format import Part, StoredTensor, renamed
from realrl.shape import DecoderConfig, MoEConfig

Stored = Callable[[DecoderConfig], list[StoredTensor]]


def stored_by_expert(block: str, words: Mapping[str, str]) -> Stored:
    """Lay out one tensor for each matrix of each expert.

    Args:
        block: name of the module of router and experts in ``model.layers.{i}``.
        words: our gate, up and down -> theirs.
    """

    def tensors(layer: int, moe: MoEConfig) -> list[StoredTensor]:
        ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.{block}"
        return renamed({f"{ours}.router.weight": f"{theirs}.gate.weight"}) + [
            StoredTensor(f"{theirs}.experts.{expert}.{word}.weight", (Part(f"{ours}.experts.{name}", expert),))
            for expert in range(moe.n_experts)
            for name, word in words.items()
        ]

    return lambda config: _stored(config, tensors)


def stored_together(config: DecoderConfig) -> list[StoredTensor]:
    """Lay out two tensors for all experts of a layer, as `transformers` has them in memory."""

    def tensors(layer: int, moe: MoEConfig) -> list[StoredTensor]:
        ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.mlp"
        gate_up = (Part(f"{ours}.experts.gate"), Part(f"{ours}.experts.up"))
        return [
            *renamed({f"{ours}.router.weight": f"{theirs}.gate.weight"}),
            StoredTensor(f"{theirs}.experts.gate_up_proj", gate_up, dim=1),
            StoredTensor(f"{theirs}.experts.down_proj", (Part(f"{ours}.experts.down"),)),
        ]

    return _stored(config, tensors)


def _stored(config: DecoderConfig, experts: Callable[[int, MoEConfig], list[StoredTensor]]) -> list[StoredTensor]:
    stored = renamed(end_names(config))
    for layer in range(config.n_layers):
        stored += renamed(attention_names(config, layer))
        moe = config.experts_of(layer)
        stored += renamed(mlp_names(config, layer)) if moe is None else experts(layer, moe)
    return stored

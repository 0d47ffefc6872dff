"""Low-rank adapters as parameters: the layers that have one, and the split of its two matrices.

LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1): y = W x + (alpha / rank) B A x, with W [out, in]
frozen, A [rank, in] and B [out, rank]. An adapter is split like its layer: of a layer cut by rows B is cut and A is on
every tensor rank; of one cut by columns A is cut and B is on every rank.

Invariants of `with_adapters`:
- the parameters given keep their order, and each adapter follows the weight (and bias) of its layer;
- the cut factor of an adapter has the units of its weight, so it allows exactly the tensor-parallel sizes of the model;
- adapters are float32, with a model of any dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from realrl.errors import ConfigError, did_you_mean
from realrl.plan.parameters.specs import ParameterSpec
from realrl.shape import DecoderConfig, LoRA

LORA_A, LORA_B = ".lora_a", ".lora_b"
ALL_LINEAR = "all-linear"

_LAYERS = ("q", "k", "v", "o", "gate", "up", "down")
_HF_NAMES: dict[str, tuple[str, ...]] = {f"{layer}_proj": (layer,) for layer in _LAYERS}
_HF_NAMES |= {"c_attn": ("q", "k", "v"), "c_fc": ("up",), "c_proj": ("o", "down")}  # GPT-2's names


def is_adapter(name: str) -> bool:
    """Return True if a parameter is a part of an adapter."""
    return name.endswith((LORA_A, LORA_B))


def is_trained(config: DecoderConfig, name: str) -> bool:
    """Return True if the optimizer of a trained role updates a parameter: with adapters these alone, and a scalar head.

    A head that scores has no pretrained weights, and no adapter could take its place.
    """
    return config.lora is None or is_adapter(name) or (config.is_scalar and name == "head.weight")


def resolve_targets(wanted: Sequence[str], specs: Sequence[ParameterSpec], *, role: str) -> tuple[str, ...]:
    """Return our names of the layers that a user means, in the order of a block.

    Args:
        wanted: names of ours or of Hugging Face's, or "all-linear".
        specs: parameters of the role's model.
        role: name of the role, for messages.

    Raises:
        ConfigError: a name matches no layer of the model; lists the layers.
    """
    present = {_layer_of(spec) for spec in specs}
    layers = [layer for layer in _LAYERS if layer in present]
    known = [*layers, *(name for name, ours in _HF_NAMES.items() if set(ours) <= present), ALL_LINEAR]
    chosen: set[str] = set()
    for name in wanted:
        if name not in known:
            raise ConfigError(
                f"models.{role}.lora.targets: {name!r} matches no layer of the model of role '{role}'."
                + did_you_mean(name, known),
                remedy=f"It has {', '.join(layers)}; {ALL_LINEAR} means all of them.",
            )
        chosen.update(layers if name == ALL_LINEAR else _HF_NAMES.get(name, (name,)))
    return tuple(layer for layer in layers if layer in chosen)


def with_adapters(specs: Sequence[ParameterSpec], lora: LoRA | None) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a model and of its adapters."""
    if lora is None:
        return tuple(specs)
    return tuple(_interleaved(specs, lora))


def _interleaved(specs: Sequence[ParameterSpec], lora: LoRA) -> Iterator[ParameterSpec]:
    waiting: tuple[ParameterSpec, ...] = ()
    for spec in specs:
        if not spec.name.endswith(".bias"):
            yield from waiting
            waiting = ()
        yield spec
        if _layer_of(spec) in lora.targets:
            waiting = _adapter_of(spec, lora.rank)
    yield from waiting


def _layer_of(spec: ParameterSpec) -> str | None:
    """Return the layer's name among targets, for the matrix of a linear layer; None for any other parameter."""
    parts = spec.name.split(".")
    is_matrix = parts[0] == "blocks" and parts[-1] == "weight" and len(spec.shape) == 2 and spec.sharded_dim is not None
    return parts[-2] if is_matrix and parts[-2] in _LAYERS else None


def _adapter_of(weight: ParameterSpec, rank: int) -> tuple[ParameterSpec, ParameterSpec]:
    layer, (n_out, n_in) = weight.name.removesuffix(".weight"), weight.shape
    a = replace(weight, name=layer + LORA_A, shape=(rank, n_in), dtype="float32")
    b = replace(weight, name=layer + LORA_B, shape=(n_out, rank), dtype="float32")
    if weight.sharded_dim == 0:
        return _replicated(a), b
    return a, _replicated(b)


def _replicated(spec: ParameterSpec) -> ParameterSpec:
    return replace(spec, sharded_dim=None, n_units=1, unit=None, is_tp_partial=True)

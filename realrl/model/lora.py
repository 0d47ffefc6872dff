"""Low-rank adapters beside the layers of a decoder: y = W x + (alpha / rank) B A x (LoRA, Hu et al. 2021).

W and its bias are frozen; A [rank, in] and B [out, rank] are float32 parameters, trained in their place. B starts at
zero, so that the model starts as its base. With tensor parallelism a layer cut by rows has a slice of B and all of A, a
layer cut by columns a slice of A and all of B: either way B A x is what the layer's own product is, rows or a summand
of it, and no further message is needed. Each rank computes a part of the gradient of the factor that it has whole.

`DecoderConfig.lora` says which layers have one; see `realrl.plan.parameters.adapters` for names and slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from realrl.cpu import linear
from realrl.model.layers.linear import Linear
from realrl.plan.parameters.adapters import LORA_A, LoRA, is_adapter
from realrl.plan.parameters.layout import parameter_specs

if TYPE_CHECKING:
    from realrl.model.decoder import Decoder
    from realrl.shape import DecoderConfig


class LoRALinear(Linear):
    """A layer that takes over the parameters of another one, and its adapter, uninitialised.

    The adapter computes in the dtype of the activations, from its float32 parameters; its gradients are float32.

    Args:
        layer: the frozen layer, or a rank's slice of it.
        rank: of the adapter.
        scale: factor of B A.
    """

    def __init__(self, layer: nn.Linear, *, rank: int, scale: float) -> None:
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, bias=has_bias, device=torch.device("meta"))
        self.weight, self.bias = layer.weight, layer.bias
        device = layer.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features, dtype=torch.float32, device=device))
        self.lora_b = nn.Parameter(torch.empty(layer.out_features, rank, dtype=torch.float32, device=device))
        self.scale = scale
        self.is_on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return self._adapted(x, linear(x, self.weight, self.bias))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` without the bias."""
        return self._adapted(x, linear(x, self.weight))

    def _adapted(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not self.is_on:
            return y
        inner = linear(x, self.lora_a.to(x.dtype)) * self.scale  # [T, rank]
        return y + linear(inner, self.lora_b.to(x.dtype))

    def merged_weight(self) -> torch.Tensor:
        """W + (alpha / rank) B A in float32, without gradient."""
        with torch.no_grad():
            return torch.addmm(self.weight.float(), self.lora_b, self.lora_a, alpha=self.scale)


def effective_weight(layer: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [out, in] that a layer multiplies with, its adapter included; the layer's own memory if it can be."""
    return layer.merged_weight().to(dtype) if isinstance(layer, LoRALinear) else layer.weight.to(dtype)


# ---------------------------------------------------------------- decoders


def insert_adapters(decoder: Decoder) -> None:
    """Give every layer for which ``decoder.specs`` has an adapter an uninitialised one; its weight stays itself."""
    lora = decoder.config.lora
    assert lora is not None
    for name in decoder.specs:
        if name.endswith(LORA_A):
            path, _, attribute = name.removesuffix(LORA_A).rpartition(".")
            parent = decoder.get_submodule(path)
            layer = parent.get_submodule(attribute)
            assert isinstance(layer, nn.Linear)
            setattr(parent, attribute, LoRALinear(layer, rank=lora.rank, scale=lora.scale))


def add_adapters(decoder: Decoder, lora: LoRA, *, seed: int) -> None:
    """Turn a decoder without adapters into one with new ones; what it computes does not change.

    Args:
        lora: which layers.
        seed: A follows from it and the layer's name, the same on every rank; see `init_adapter`.
    """
    from realrl.model.init import init_parameter

    decoder.config = replace(decoder.config, lora=lora)
    specs = parameter_specs(decoder.config)
    decoder.specs = {spec.name: spec for spec in specs if any(map(decoder.shard.has, spec.layers))}
    insert_adapters(decoder)
    for name, parameter in decoder.named_shards():
        if is_adapter(name):
            init_parameter(decoder, name, parameter, seed=seed)


def trained_parameters(decoder: Decoder) -> list[tuple[str, nn.Parameter]]:
    """What an optimizer updates, by global name: everything, or with adapters these and a scalar head.

    A head that scores has no pretrained weights, and no adapter could take its place.
    """
    return [(name, p) for name, p in decoder.named_shards() if is_trained(decoder.config, name)]


def is_trained(config: DecoderConfig, name: str) -> bool:
    """Whether a trained model's optimizer updates a parameter; see `trained_parameters`."""
    return config.lora is None or is_adapter(name) or (config.is_scalar and name == "head.weight")


def adapted_layers(decoder: Decoder) -> Iterator[tuple[str, LoRALinear]]:
    """The layers of this shard that have an adapter, by global name."""
    for name, module in decoder.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


@contextmanager
def without_adapters(decoder: Decoder) -> Iterator[None]:
    """Let the decoder compute as its base model for a while."""
    layers = [layer for _, layer in adapted_layers(decoder)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def merged_shards(decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Global name and values of each parameter of an equal model without adapters, one at a time, in its order."""
    adapted = {f"{name}.weight": layer for name, layer in adapted_layers(decoder)}
    for name, parameter in decoder.named_shards():
        if name in adapted:
            yield name, effective_weight(adapted[name], parameter.dtype)
        elif not is_adapter(name):
            yield name, parameter.detach()

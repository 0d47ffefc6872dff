"""Decoders with low-rank adapters; see `realrl.model.layers.linear` for one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from realrl.model.decoder import Decoder
from realrl.model.init import init_parameter
from realrl.model.layers.linear import LoRALinear, effective_weight, insert_adapters
from realrl.plan.parameters.adapters import is_adapter, is_trained
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.shape import LoRA


def add_adapters(decoder: Decoder, lora: LoRA, *, seed: int) -> None:
    """Give a decoder without adapters new ones; its outputs do not change.

    Args:
        lora: rank, scale and adapted layers.
        seed: determines A together with the layer's name, the same on every rank; see `init_parameter`.
    """
    decoder.config = replace(decoder.config, lora=lora)
    specs = parameter_specs(decoder.config)
    decoder.specs = {spec.name: spec for spec in specs if decoder.shard.holds(spec)}
    insert_adapters(decoder, decoder.specs, lora)
    for name, parameter in decoder.named_shards():
        if is_adapter(name):
            init_parameter(decoder, name, parameter, seed=seed)


def trained_parameters(decoder: Decoder) -> list[tuple[str, nn.Parameter]]:
    """The parameters that an optimizer updates, by global name; see `is_trained`."""
    return [(name, p) for name, p in decoder.named_shards() if is_trained(decoder.config, name)]


def adapted_layers(decoder: Decoder) -> Iterator[tuple[str, LoRALinear]]:
    """The layers of this shard that have an adapter, by global name."""
    for name, module in decoder.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


@contextmanager
def without_adapters(decoder: Decoder) -> Iterator[None]:
    """Let the decoder compute as its base model within the block."""
    layers = [layer for _, layer in adapted_layers(decoder)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def merged_shards(
    decoder: Decoder, present: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (global name, values) of the parameters of an equal model without adapters, in the model's order.

    Args:
        present: context in which a parameter is read, and stays until the next one is asked for.
    """
    adapted = {f"{name}.weight": layer for name, layer in adapted_layers(decoder)}
    for name, parameter in decoder.named_shards():
        with present(name):
            if name in adapted:
                yield name, effective_weight(adapted[name], parameter.dtype)
            elif not is_adapter(name):
                yield name, parameter.detach()

"""Decoders with trained-looking adapters, and equal ones without."""

from __future__ import annotations

from dataclasses import replace

import torch

from realrl.model.decoder import Decoder
from realrl.model.lora import merged_shards
from realrl.plan.parameters.adapters import LORA_B
from realrl.shape import LoRA

ALL = ("q", "k", "v", "o", "gate", "up", "down")
LORA = LoRA(3, 6.0, ALL)


def fill_adapters(decoder: Decoder, *, seed: int = 7, std: float = 0.2) -> Decoder:
    """Give every B, zero at first, random numbers that depend on name and seed only; other parameters stay."""
    with torch.no_grad():
        for name, parameter in decoder.named_shards():
            if name.endswith(LORA_B):
                generator = torch.Generator().manual_seed(seed + sum(name.encode()))
                whole = torch.empty(decoder.specs[name].shape).normal_(0.0, std, generator=generator)
                parameter.copy_(whole[decoder.place_of(name)])
    return decoder


def merged(decoder: Decoder) -> Decoder:
    """Make a whole decoder without adapters that computes the same."""
    plain = Decoder(replace(decoder.config, lora=None))
    plain.set_parameters({name: tensor.clone() for name, tensor in merged_shards(decoder)})
    return plain

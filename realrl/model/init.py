"""Random parameters that depend on the seed and the parameter's name only, never on rank, order or other roles."""

from __future__ import annotations

import hashlib

import torch

from realrl.model.config import DecoderConfig
from realrl.model.decoder import Decoder

_STD = 0.02  # GPT-2 (Radford et al. 2019)
_VALUE_HEAD_STD = 0.002  # first values close to zero, yet gradient reaches the blocks from the first step


def random_model(config: DecoderConfig, seed: int, *, device: torch.device | None = None) -> Decoder:
    """Return a decoder with normal(0, 0.02) weights, unit norms and zero biases."""
    decoder = Decoder(config, device=device)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            init_parameter(name, parameter, config=config, seed=seed)
    return decoder


def init_parameter(name: str, parameter: torch.Tensor, *, config: DecoderConfig, seed: int) -> None:
    """Fill one decoder parameter in place; the same (name, seed, shape) gives the same numbers on every rank.

    The caller disables gradients.
    """
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
    elif name.endswith(".bias"):
        parameter.zero_()
    else:
        std = _VALUE_HEAD_STD if name == "head.weight" and config.head == "value" else _STD
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=_generator(seed, name)))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)

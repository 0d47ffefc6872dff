"""Random parameters that depend on the seed and the parameter's name only, never on rank, order or other roles."""

from __future__ import annotations

import hashlib

import torch

from realrl.model.decoder import Decoder
from realrl.model.parallel import UNSHARDED, TensorParallel
from realrl.plan.parameters.adapters import LORA_A, LORA_B
from realrl.plan.parameters.shards import ModelShard
from realrl.shape import DecoderConfig

_STD = 0.02  # GPT-2 (Radford et al. 2019)
_VALUE_HEAD_STD = 0.002  # first values close to zero, yet gradient reaches the blocks from the first step


def random_model(
    config: DecoderConfig,
    seed: int,
    *,
    shard: ModelShard | None = None,
    parallel: TensorParallel = UNSHARDED,
    device: torch.device | None = None,
) -> Decoder:
    """Return a decoder with normal(0, 0.02) weights, norms that multiply by one, and zero biases.

    Args:
        shard: layers and slices to build, see `Decoder`; its numbers are the whole model's at that place.
    """
    decoder = Decoder(config, shard=shard, parallel=parallel, device=device)
    for name, parameter in decoder.named_shards():
        init_parameter(decoder, name, parameter, seed=seed)
    return decoder


@torch.no_grad()
def init_parameter(decoder: Decoder, name: str, parameter: torch.Tensor, *, seed: int) -> None:
    """Fill one parameter of the decoder in place; the same seed and name give the same whole parameter on every rank.

    Args:
        name: name in the whole model.
        parameter: this rank's part.
    """
    if name.endswith("norm.weight"):
        parameter.fill_(0.0 if decoder.config.norm_offset else 1.0)
    elif name.endswith((".bias", "_bias", LORA_B)):
        parameter.zero_()
    elif name.endswith(LORA_A):
        bound = decoder.specs[name].shape[1] ** -0.5  # Kaiming uniform with slope sqrt(5), as the layers of torch
        whole = torch.empty(decoder.specs[name].shape).uniform_(-bound, bound, generator=_generator(seed, name))
        parameter.copy_(whole[decoder.place_of(name)])
    else:
        std = _VALUE_HEAD_STD if name == "head.weight" and decoder.config.head == "value" else _STD
        whole = torch.empty(decoder.specs[name].shape).normal_(0.0, std, generator=_generator(seed, name))
        parameter.copy_(whole[decoder.place_of(name)])


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)

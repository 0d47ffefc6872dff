"""Construction of a shard's layers and parameters, in the sizes that the shard has."""

from __future__ import annotations

import torch
from torch import nn

from realrl.model.dtypes import torch_dtype
from realrl.model.layers.linear import Linear
from realrl.model.layers.norm import Norm, QKNorm
from realrl.model.parallel import TensorParallel
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.shards import ModelShard
from realrl.plan.parameters.specs import slice_of
from realrl.shape import DecoderConfig


class Builder:
    """Makes the layers of one shard, their parameters uninitialised.

    Args:
        config: the whole model.
        shard: the layers and slices to build.
        device: "meta" gives shapes without memory.

    Attributes:
        specs: the whole model's specification of each parameter of the shard, by global name.
    """

    def __init__(self, config: DecoderConfig, shard: ModelShard, device: torch.device | None) -> None:
        self.config = config
        self.shard = shard
        self.device = device
        self._dtype = torch_dtype(config.dtype)
        self.specs = {spec.name: spec for spec in parameter_specs(config) if shard.holds(spec)}

    def place(self, name: str) -> tuple[tuple[int, int], ...]:
        """This rank's (start, stop) in each dim of the whole parameter."""
        return slice_of(self.specs[name], self.shard.tp_rank, self.shard.tp_size)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part of a parameter."""
        return tuple(stop - start for start, stop in self.place(name))

    def parameter(self, name: str) -> nn.Parameter:
        """This rank's part of a parameter."""
        return nn.Parameter(torch.empty(self.shape(name), dtype=self._dtype, device=self.device))

    def linear(self, name: str) -> Linear:
        """The layer with ``{name}.weight`` and, where the model has it, ``{name}.bias``."""
        out_size, in_size = self.shape(f"{name}.weight")
        has_bias = f"{name}.bias" in self.specs
        return Linear(in_size, out_size, bias=has_bias, dtype=self._dtype, device=self.device)

    def norm(self, name: str) -> Norm:
        """The norm with ``{name}.weight`` and, where the model has it, ``{name}.bias``."""
        config, bias = self.config, f"{name}.bias"
        return Norm(
            self.parameter(f"{name}.weight"),
            self.parameter(bias) if bias in self.specs else None,
            kind=config.norm,
            eps=config.norm_eps,
            has_offset=config.norm_offset,
        )

    def qk_norm(self, name: str, parallel: TensorParallel) -> QKNorm:
        """The norm of queries or keys with ``{name}.weight``."""
        config = self.config
        return QKNorm(
            self.parameter(f"{name}.weight"),
            eps=config.norm_eps,
            has_offset=config.norm_offset,
            is_joint=config.qk_norm == "all",
            parallel=parallel,
        )


def leave(layer: Linear, x: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """Apply a layer cut by columns and sum over the group; its bias is whole on every rank, and added once."""
    if parallel.tp_size == 1:
        return layer(x)
    y = parallel.leave(layer.product(x))
    return y if layer.bias is None else y + layer.bias

"""Parameters that hooks average into, in half precision: float32 masters, which the parameters follow.

Half precision has 8 or 11 significant bits, so that a small step, such as one percent of the way to another role, is
rounded away. A master takes each step in float32, and the parameter is the master, rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from realrl.engine.backends.base import move
from realrl.model.decoder import Decoder
from realrl.model.dtypes import dtype_name


class AveragedParameters:
    """The masters of one rank's shard of a frozen role.

    Args:
        decoder: a shard in float32, which becomes the masters; its parameters get memory of `compute_dtype`.
        compute_dtype: dtype in half precision.

    Attributes:
        masters: float32 tensors by global name.
    """

    def __init__(self, decoder: Decoder, compute_dtype: torch.dtype) -> None:
        self._parameters = dict(decoder.named_shards())
        self.masters = {name: p.detach() for name, p in self._parameters.items()}
        for p in self._parameters.values():
            p.data = p.data.to(compute_dtype)
        decoder.config = replace(decoder.config, dtype=dtype_name(compute_dtype))

    @torch.no_grad()
    def move(self, values: Iterable[tuple[str, torch.Tensor]], eta: float) -> None:
        """Set masters to ``eta * value + (1 - eta) * master``, and their parameters to the result.

        Args:
            values: (global name, value) of parameters in the shapes of the shard, in any dtype.
            eta: above 0, up to 1.
        """
        for name, value in values:
            move(self.masters[name], value, eta)
            self._parameters[name].data.copy_(self.masters[name])


def load_masters(decoder: Decoder, averages: AveragedParameters | None, saved: Mapping[str, torch.Tensor]) -> None:
    """Set a frozen decoder's parameters to saved masters, or as close as the decoder's dtype allows.

    Raises:
        ValueError: the shard has no parameter of a name, or of another shape.
    """
    parameters = dict(decoder.named_shards())
    for name, master in saved.items():
        if name not in parameters or parameters[name].shape != master.shape:
            raise ValueError(f"it holds a master of {name!r}, {list(master.shape)}, which does not fit the model")
    if averages is not None:
        averages.move(saved.items(), 1.0)
        return
    for name, master in saved.items():
        move(parameters[name].data, master, 1.0)

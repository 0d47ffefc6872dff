"""The trained parameters of a decoder that may compute in bf16 or fp16, and their float32 gradients.

With adapters, only they and a scalar head are trained; the rest of the module is frozen in the compute dtype. Adapters
are always float32. A half-precision gradient is added to a float32 sum as soon as autograd has finished it, so that
micro-batches accumulate in float32 and no half-precision gradient of the whole model ever exists.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from realrl.model.decoder import Decoder
from realrl.model.dtypes import dtype_name
from realrl.model.lora import trained_parameters
from realrl.plan.parameters.adapters import is_adapter


class TrainedParameters:
    """Parameters that an optimizer updates, by global name.

    Until `convert`, the parameters keep the dtype that the decoder was given, so that masters can be made from them.

    Args:
        decoder: its trained parameters (`realrl.model.lora.trained_parameters`) get gradients, the others none.
        compute_dtype: dtype of the decoder's forward and backward pass.

    Attributes:
        names: global names of the parameters.
        parameters: the decoder's own parameters, in the order of `names`.
        is_in_saved_model: True if a model saved from the decoder holds their masters exactly: in float32, without
            adapters.
    """

    def __init__(self, decoder: Decoder, compute_dtype: torch.dtype) -> None:
        named = trained_parameters(decoder)
        self.names = [name for name, _ in named]
        self.parameters: list[nn.Parameter] = [p for _, p in named]
        self.compute_dtype = compute_dtype
        self._decoder = decoder
        self._gradients: dict[int, torch.Tensor] = {}  # place -> float32 sum, of half-precision parameters
        decoder.requires_grad_(False)
        for p in self.parameters:
            p.requires_grad_(True)
        self.is_in_saved_model = decoder.config.lora is None and compute_dtype == torch.float32

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of the working parameter."""
        return torch.float32 if is_adapter(name) else self.compute_dtype

    def convert(self, *, accumulate: bool = True) -> None:
        """Give all parameters their working dtype, in place.

        Args:
            accumulate: gather the gradients of half-precision parameters in float32, for `gradients`.
        """
        for place, (name, p) in enumerate(zip(self.names, self.parameters, strict=True)):
            p.data = p.data.to(self.dtype_of(name))
            if accumulate and p.dtype != torch.float32:
                p.register_post_accumulate_grad_hook(_MoveGradient(self._gradients, place))
        for p in self._decoder.parameters():
            if not p.requires_grad:
                p.data = p.data.to(self.compute_dtype)
        self._decoder.config = replace(self._decoder.config, dtype=dtype_name(self.compute_dtype))

    def gradients(self) -> list[torch.Tensor]:
        """float32 gradients in the order of `names`; zeros for a parameter that none reached."""
        found = []
        for place, p in enumerate(self.parameters):
            if p.dtype != torch.float32:
                if place not in self._gradients:
                    self._gradients[place] = torch.zeros_like(p, dtype=torch.float32)
                found.append(self._gradients[place])
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            found.append(p.grad)
        return found

    def clear_gradients(self) -> None:
        self._gradients.clear()
        for p in self.parameters:
            p.grad = None


class _MoveGradient:
    """Hook: add a working parameter's gradient to its float32 sum, and drop it."""

    def __init__(self, sums: dict[int, torch.Tensor], place: int) -> None:
        self._sums = sums
        self._place = place

    def __call__(self, working: torch.Tensor) -> None:
        grad = working.grad
        if grad is None:
            return
        if self._place in self._sums:
            self._sums[self._place].add_(grad)
        else:
            self._sums[self._place] = grad.float()
        working.grad = None

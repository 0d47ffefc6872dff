"""Linear layers, plain or with a low-rank adapter: y = W x + (alpha / rank) B A x (LoRA, Hu et al. 2021).

W and its bias are frozen; A [rank, in] and B [out, rank] are float32 parameters, trained in their place. B starts at
zero, so that the model starts as its base. With tensor parallelism a layer cut by rows has a slice of B and all of A, a
layer cut by columns a slice of A and all of B. Either way B A x has the same form as the layer's own product, rows or a
summand, and no further message is needed. Each rank computes a part of the gradient of the factor that it has whole.

`DecoderConfig.lora` says which layers have one; see `realrl.plan.parameters.adapters` for names and slices.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from realrl.cpu import linear
from realrl.plan.parameters.adapters import LORA_A
from realrl.shape import LoRA


class Linear(nn.Linear):
    """`nn.Linear` for packed tokens [T, in], uninitialised."""

    def reset_parameters(self) -> None:
        """Leave the parameters alone: numbers come from files, other ranks or `realrl.model.init`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` without the bias."""
        return linear(x, self.weight)


class LoRALinear(Linear):
    """A layer that takes over the parameters of another one, and its adapter, uninitialised.

    The adapter computes in the dtype of the activations, from its float32 parameters; its gradients are float32.

    Args:
        layer: the frozen layer, or a rank's slice of it.
        rank: rank of the adapter.
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
        """Map [T, in] to [T, out]."""
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
    """The matrix [out, in] of a layer with its adapter merged in; it may share the layer's memory."""
    return layer.merged_weight().to(dtype) if isinstance(layer, LoRALinear) else layer.weight.to(dtype)


def insert_adapters(module: nn.Module, names: Iterable[str], lora: LoRA) -> None:
    """Give layers an uninitialised adapter; their weights stay themselves.

    Args:
        module: parent of the layers.
        names: parameter names; those of adapters say which layers get one.
    """
    for name in names:
        if name.endswith(LORA_A):
            path, _, attribute = name.removesuffix(LORA_A).rpartition(".")
            parent = module.get_submodule(path)
            layer = parent.get_submodule(attribute)
            assert isinstance(layer, nn.Linear)
            setattr(parent, attribute, LoRALinear(layer, rank=lora.rank, scale=lora.scale))

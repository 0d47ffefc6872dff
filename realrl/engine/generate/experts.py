"""A block's experts as generation runs them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from realrl.engine.groups import Communicator
from realrl.model.layers.moe import MoE, mix_experts, route


class FusedExperts:
    """Norm, router, experts and the residual, without packing: in a decode step an expert has a few rows at most.

    Args:
        moe: source of the weights, which are not copied if they have `dtype` already.
        norm: norm before router and experts, for activations of `dtype`.
        dtype: dtype to compute in.
        tp: the ranks that hold the other slices; all have the same rows and so route alike.
    """

    def __init__(
        self, moe: MoE, norm: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, tp: Communicator
    ) -> None:
        self._norm = norm
        self._config = moe.config
        self._router = moe.router.weight.to(dtype)
        self._gate, self._up, self._down = (w.to(dtype) for w in (moe.experts.gate, moe.experts.up, moe.experts.down))
        self._tp = tp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``x + experts(norm(x))``, [T, H]."""
        normed = self._norm(x)
        y = mix_experts(normed, route(normed, self._router, self._config), self._gate, self._up, self._down)
        if self._tp.rank == 0:
            y += x
        return self._tp.all_reduce_(y)

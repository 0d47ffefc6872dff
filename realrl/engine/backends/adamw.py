"""AdamW by torch's fused kernel, without the class `torch.optim.AdamW`.

That class imports torch's compiler when it is first used, only to keep the compiler away from itself: it would cost
every worker that trains a second or two of its start and 70 MB of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim.adamw import adamw

from realrl.config.schema import OptimizerConfig
from realrl.engine.backends.base import MOMENTS


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        groups: pairs of float32 tensors and their common weight decay.
        config: betas and eps.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[torch.Tensor], float]], config: OptimizerConfig) -> None:
        self._groups = [(list(tensors), weight_decay) for tensors, weight_decay in groups]
        self._config = config
        # tensor that has been through a step -> its moments, and "step", a float32 scalar on its device
        self._state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every tensor by its `grad`."""
        (beta1, beta2), eps = self._config.betas, self._config.eps
        for tensors, weight_decay in self._groups:
            states = [self._state_of(tensor) for tensor in tensors]
            exp_avgs, exp_avg_sqs = ([state[key] for state in states] for key in MOMENTS)
            adamw(
                tensors,
                [_gradient_of(tensor) for tensor in tensors],
                exp_avgs,
                exp_avg_sqs,
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=weight_decay,
                eps=eps,
                maximize=False,
            )

    def moment_of(self, tensor: torch.Tensor, key: str) -> torch.Tensor:
        """The tensor's moment `key`, one of `MOMENTS`; zeros before the first step."""
        state = self._state.get(tensor)
        return torch.zeros_like(tensor) if state is None else state[key]

    def restore(self, tensor: torch.Tensor, n_steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue after `n_steps` with these moments themselves, which have the tensor's shape and device."""
        self._state[tensor] = {"step": torch.tensor(float(n_steps), device=tensor.device), **moments}

    def _state_of(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if tensor not in self._state:
            self.restore(tensor, 0, {key: torch.zeros_like(tensor) for key in MOMENTS})
        return self._state[tensor]


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None, "a step without a gradient"
    return tensor.grad

"""AdamW over master parameters: schedule, clipping by global norm, state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from realrl.config.schema import OptimizerConfig
from realrl.engine.precision import MasterParameters
from realrl.engine.schedule import learning_rate


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019); weight decay on matrices only, not on norms and biases.

    `n_taken` counts the minibatches that the schedule has seen, skipped ones included: a run whose steps are sometimes
    skipped still reaches the end of its schedule.

    Args:
        masters: float32 parameters and their gradients.
        config: rates, decay, clipping, schedule.
        n_total: optimizer steps of the whole run; may be set later, before the first step.
    """

    def __init__(self, masters: MasterParameters, config: OptimizerConfig, n_total: int) -> None:
        self._masters = masters
        self._config = config
        self.n_total = n_total
        self.n_taken = 0
        matrices = [t for t in masters.tensors if t.dim() >= 2]
        vectors = [t for t in masters.tensors if t.dim() < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """The rate that the next step uses."""
        return learning_rate(self._config, self.n_taken, self.n_total)

    def gradients(self) -> dict[str, torch.Tensor]:
        """float32 gradients by parameter name, to be completed in place before a step."""
        return dict(zip(self._masters.names, self._masters.gradients(), strict=True))

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """Clip, update the masters and publish them; the gradients are forgotten.

        Args:
            grad_norm: over all ranks of the layout, so that all clip alike.
        """
        coefficient = self._config.clip_grad_norm / (grad_norm + 1e-6)
        if coefficient < 1.0:
            torch._foreach_mul_(self._masters.gradients(), coefficient)
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self._masters.publish()
        self.skip()

    def skip(self) -> None:
        """Forget the gradients and advance the schedule; moments and parameters stay."""
        self.n_taken += 1
        self._masters.clear_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Moments, counters and the masters' own state: tensors and numbers only."""
        return {
            "n_taken": self.n_taken,
            "n_total": self.n_total,
            "masters": self._masters.state_dict(),
            "moments": {name: dict(state) for name, state in self._moments()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken.

        Raises:
            KeyError: the state is of another model or precision.
        """
        self.n_taken, self.n_total = int(state["n_taken"]), int(state["n_total"])
        self._masters.load_state_dict(state["masters"])
        for name, tensor in zip(self._masters.names, self._masters.tensors, strict=True):
            stored = state["moments"].get(name)
            if stored is None:
                self._adamw.state.pop(tensor, None)
            else:
                self._adamw.state[tensor] = {key: value.to(tensor.device, copy=True) for key, value in stored.items()}

    def _moments(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        for name, tensor in zip(self._masters.names, self._masters.tensors, strict=True):
            if tensor in self._adamw.state:
                yield name, self._adamw.state[tensor]

"""The engine of a role without weights: its calls run plain Python, such as a reward function."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from realrl.engine.parallel import Parallel
from realrl.errors import CallError


class WeightlessEngine:
    """Knows its device and its place in the layout, and refuses everything that needs weights.

    Args:
        role: for messages.
        device: where the role's calls put their outputs.
        parallel: this rank's place in the role's layout.
    """

    def __init__(self, role: str, device: torch.device, parallel: Parallel | None = None) -> None:
        self.role = role
        self.device = device
        self._parallel = parallel or Parallel()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self._parallel.dp.all_reduce_(tensor.detach().to(self.device, copy=True), op)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CallError(
            f"role {self.role!r} has no weights, so it can neither train, infer nor generate",
            remedy='Declare it with head="lm", "value" or "reward" if it is a model.',
        )

    train_batch = forward = generate = _refuse

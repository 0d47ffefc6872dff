"""Small modules cut into chunks, for runs of pipeline lists, and the same computation without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from realrl.engine.train.pipeline import Chunk
from realrl.plan.pipeline import Step, StepKind

WIDTH = 5


class Toy:
    """A model of `n_chunks` layers whose chunks are numbered from `first`.

    Micro-batch i has i + 1 rows, so no two messages of one stage have the same shape.
    """

    def __init__(self, n_chunks: int, *, first: int = 0, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n_chunks))
        self.first = first
        self.losses: dict[int, float] = {}

    def micro_batch(self, index: int) -> torch.Tensor:
        """The input [index + 1, WIDTH] of a micro-batch."""
        return torch.linspace(-1, 1, (index + 1) * WIDTH).reshape(index + 1, WIDTH) + self.first

    def chunks(self, numbers: Sequence[int]) -> dict[int, Chunk]:
        """Make this model's chunks among the given numbers."""
        mine = [n for n in numbers if self.first <= n < self.first + len(self.layers)]
        return {n: Chunk(self._forward, lambda step: ((step.micro_batch + 1, WIDTH), torch.float32)) for n in mine}

    def _forward(self, step: Step, received: torch.Tensor | None) -> torch.Tensor:
        depth = step.chunk - self.first
        x = self.micro_batch(step.micro_batch) if received is None else received
        y = torch.tanh(self.layers[depth](x))
        if depth + 1 < len(self.layers):
            return y
        loss = y.square().sum()
        self.losses[step.micro_batch] = float(loss.detach())
        return loss

    def train_plain(self, n_micro_batches: int) -> None:
        """Train without a pipeline, as all lists together must."""
        for i in range(n_micro_batches):
            x = None
            for depth in range(len(self.layers)):
                x = self._forward(Step(StepKind.FORWARD, i, self.first + depth), x)
            assert x is not None
            x.backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by name, of the parameters that have one."""
        return {name: p.grad.clone() for name, p in self.layers.named_parameters() if p.grad is not None}

"""Two decoders that train at the same time on one rank: their calls take turns, their pipelines are one list.

interface ─► train_batch ─► Duet ◄─ train_batch ◄─ interface        one micro-batch after the other, as the plan says
                             └──► run_stage: chunks of both
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.train.duet import Duet, PipelineJob
from realrl.engine.train.pipeline import Chunk, run_stage
from realrl.plan.fused_calls import FusedModels
from realrl.plan.pipeline import Step


class FusedEngines:
    """The engines of two roles that share their devices stage by stage, the second in reversed order.

    Args:
        engines: the first and the second one. Devices have the numbers of the first one's stages.
        models: decides the order of computations.
    """

    def __init__(self, engines: tuple[DecoderEngine, DecoderEngine], models: FusedModels) -> None:
        self._engines = engines
        self._stages = engines[0].stages
        self._models = models

    def run(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """Run two calls, one of each engine, and return their results; what one of them raises passes through."""
        duet = Duet(self._together, lambda number, job: self._engines[number].run_alone(job))
        one, other = self._engines
        one.submit, other.submit = duet.submit_first, duet.submit_second
        try:
            return duet.run(first, second)
        finally:
            one.submit = other.submit = None

    def _together(self, first: PipelineJob, second: PipelineJob) -> None:
        n_stages = self._stages.n_ranks
        lists = self._models.lists(first.n_micro_batches, second.n_micro_batches)
        moved = {n_stages + number: _shifted(chunk, n_stages) for number, chunk in second.chunks.items()}
        run_stage(
            lists[self._stages.rank],
            {**first.chunks, **moved},
            self._stages,
            device=self._engines[0].device,
            batched=False,
        )


def _shifted(chunk: Chunk, n_before: int) -> Chunk:
    """Return a chunk whose number in the list is higher than that which its callbacks know."""

    def own(step: Step) -> Step:
        return replace(step, chunk=step.chunk - n_before)

    def forward(step: Step, x: torch.Tensor | None) -> torch.Tensor | None:
        return chunk.forward(own(step), x)

    return Chunk(forward, lambda step: chunk.received(own(step)), chunk.backward)

"""Pipeline lists on one stage: chunks hand over to each other, and nothing is kept that nobody needs."""

from __future__ import annotations

import torch

from realrl.algo.phases import Phases
from realrl.engine.groups import ALONE
from realrl.engine.train.pipeline import Chunk, _Run, run_stage
from realrl.plan.pipeline import Step, generation, inference, interleaved
from tests.helpers.toy_pipeline import Toy

CPU = torch.device("cpu")


def test_chunks_of_one_stage_feed_each_other() -> None:
    plain, piped = Toy(3), Toy(3)
    plain.train_plain(4)
    run_stage(interleaved(1, 4, 3)[0], piped.chunks(range(3)), ALONE, device=CPU)
    assert piped.losses == plain.losses
    for name, gradient in plain.gradients().items():
        torch.testing.assert_close(piped.gradients()[name], gradient)


def test_a_loss_without_gradient_trains_nothing() -> None:
    toy = Toy(2)
    chunks = toy.chunks([0, 1])
    chunks[1] = Chunk(lambda step, x: torch.tensor(0.0), chunks[1].received)
    run_stage(interleaved(1, 2, 2)[0], chunks, ALONE, device=CPU)
    assert all(not g.any() for g in toy.gradients().values())
    chunks[1] = Chunk(lambda step, x: None, chunks[1].received)
    run_stage(interleaved(1, 2, 2)[0], chunks, ALONE, device=CPU)
    assert all(not g.any() for g in toy.gradients().values())


def test_inference_keeps_nothing() -> None:
    toy = Toy(2)
    run = _Run(inference(1, 3, 2)[0], toy.chunks([0, 1]), ALONE, CPU, phases=Phases())
    with torch.no_grad():
        for step in inference(1, 3, 2)[0]:
            run.compute(step)
    assert not run._saved
    assert not run._outbox
    assert not run._inbox


def test_tokens_of_a_round_feed_the_next() -> None:
    seen: list[tuple[int, int, list[int] | None]] = []

    def forward(step: Step, tokens: torch.Tensor | None) -> torch.Tensor:
        seen.append((step.round, step.micro_batch, None if tokens is None else tokens.tolist()))
        return torch.tensor([step.round * 10 + step.micro_batch])

    run_stage(generation(1, 2, 3)[0], {0: Chunk(forward, lambda step: ((1,), torch.int64))}, ALONE, device=CPU)
    assert seen == [(0, 0, None), (0, 1, None), (1, 0, [0]), (1, 1, [1]), (2, 0, [10]), (2, 1, [11])]

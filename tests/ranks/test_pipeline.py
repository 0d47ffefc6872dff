"""Pipeline lists over gloo: any list that the simulator accepts computes what one process computes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from realrl.engine.groups import ALONE, Communicator
from realrl.engine.train.pipeline import Chunk, run_stage
from realrl.plan.pipeline import Schedule, Step, generation, inference, interleaved, one_f_one_b, place_messages
from tests.helpers.ranks import run_ranks
from tests.helpers.toy_pipeline import Toy
from tests.plan.schedules import random_orders

CPU = torch.device("cpu")
N_MICRO_BATCHES = (5, 3)


def pipeline(rank: int, world_size: int) -> Communicator:
    return Communicator(dist.group.WORLD, world_size, rank) if world_size > 1 else ALONE


def schedules(n_stages: int) -> dict[str, Schedule]:
    """Training lists of one model with N_MICRO_BATCHES[0] micro-batches."""
    n = N_MICRO_BATCHES[0]
    return {
        "1f1b": one_f_one_b(n_stages, n),
        "interleaved": interleaved(n_stages, n, 2),
        "short": one_f_one_b(n_stages, 1),
    }


def _train(rank: int, world_size: int) -> dict[str, Any]:
    stages = pipeline(rank, world_size)
    out: dict[str, Any] = {}
    for name, schedule in schedules(world_size).items():
        steps = schedule[rank]
        chunks = sorted({step.chunk for step in steps})
        toy = Toy(1 + max(step.chunk for s in schedule for step in s))
        run_stage(steps, toy.chunks(chunks), stages, device=CPU)
        out[name] = (toy.losses, {k: v.numpy() for k, v in toy.gradients().items()})
    for seed in range(3):  # two models in opposite directions on the same stages
        orders = random_orders(world_size, N_MICRO_BATCHES, random.Random(seed))
        steps = place_messages(orders)[rank]
        models = [Toy(world_size), Toy(world_size, first=world_size, seed=1)]
        chunks_of = {k: c for toy in models for k, c in toy.chunks([s.chunk for s in steps]).items()}
        run_stage(steps, chunks_of, stages, device=CPU)
        for i, toy in enumerate(models):
            out[f"two {seed} {i}"] = (toy.losses, {k: v.numpy() for k, v in toy.gradients().items()})
    return out


@pytest.mark.parametrize("n_stages", [2, 4])
def test_training_lists(n_stages: int) -> None:
    results = run_ranks(n_stages, _train)
    for name in results[0]:
        is_second = name.endswith(" 1")
        n_chunks = 2 * n_stages if name == "interleaved" else n_stages
        plain = Toy(n_chunks, first=n_stages if is_second else 0, seed=int(is_second))
        plain.train_plain(1 if name == "short" else N_MICRO_BATCHES[is_second])
        losses = {k: v for result in results for k, v in result[name][0].items()}
        assert losses == pytest.approx(plain.losses)
        gradients = {k: v for result in results for k, v in result[name][1].items()}
        assert sum(len(result[name][1]) for result in results) == len(gradients)
        for key, gradient in plain.gradients().items():
            assert gradients[key] == pytest.approx(gradient.numpy(), rel=1e-5, abs=1e-7)


def _infer(rank: int, world_size: int, n_micro_batches: int) -> list[list[float]]:
    made: dict[int, list[float]] = {}

    def forward(step: Step, x: torch.Tensor | None) -> torch.Tensor:
        y = torch.full((step.micro_batch % 3,), 1.0) if x is None else x * 2 + step.chunk  # some have no rows at all
        if step.chunk == world_size - 1:
            made[step.micro_batch] = y.tolist()
        return y

    chunk = Chunk(forward, lambda step: ((step.micro_batch % 3,), torch.float32))
    run_stage(inference(world_size, n_micro_batches)[rank], {rank: chunk}, pipeline(rank, world_size), device=CPU)
    return [made[i] for i in sorted(made)]


def test_inference_with_many_micro_batches_and_empty_ones() -> None:
    results = run_ranks(3, _infer, 40)
    assert results[:2] == [[], []]
    assert results[2] == [[(1.0 * 2 + 1) * 2 + 2] * (i % 3) for i in range(40)]


def _decode(rank: int, world_size: int, n_rounds: int) -> list[dict[int, list[int]]]:
    """Each stage adds its number; the last one's result is the token that the first reads in the next round."""
    out = []
    for n_micro_batches in (1, 2, 5):
        tokens: dict[int, list[int]] = {i: [] for i in range(n_micro_batches)}

        def forward(step: Step, x: torch.Tensor | None, tokens: dict[int, list[int]] = tokens) -> torch.Tensor:
            y = (torch.tensor([step.micro_batch]) if x is None else x) + rank + 1
            if rank == world_size - 1:
                tokens[step.micro_batch].append(int(y))
            return y

        steps = generation(world_size, n_micro_batches, n_rounds)[rank]
        run_stage(steps, {rank: Chunk(forward, lambda _: ((1,), torch.int64))}, pipeline(rank, world_size), device=CPU)
        out.append(tokens)
    return out


def test_generation_feeds_tokens_back() -> None:
    *_, last = run_ranks(3, _decode, 7)
    assert last == [{i: [i + 6 * (turn + 1) for turn in range(7)] for i in range(n)} for n in (1, 2, 5)]

"""Pipeline schedules that no builder makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from realrl.plan.pipeline import Schedule, Step, StepKind, alternate, backward_step, forward_step, place_messages


def random_orders(n_stages: int, n_micro_batches: tuple[int, int], random: Random) -> list[list[Step]]:
    """Two models on the same stages, flowing against each other, trained in any order that is possible at all."""
    n = n_stages
    stage_of = {**{chunk: chunk for chunk in range(n)}, **{n + i: n - 1 - i for i in range(n)}}
    todo = {forward_step(i, chunk) for chunk in range(n) for i in range(n_micro_batches[0])}
    todo |= {backward_step(i, chunk, n) for chunk in range(n) for i in range(n_micro_batches[0])}
    for i in range(n_micro_batches[1]):
        todo |= {replace(forward_step(i, n + chunk), other=n + chunk - 1 if chunk else None) for chunk in range(n)}
        todo |= {backward_step(i, n + chunk, 2 * n) for chunk in range(n)}
    orders: list[list[Step]] = [[] for _ in range(n)]
    done: set[object] = {None}
    while todo:
        possible = [
            step
            for step in sorted(todo, key=str)
            if step.source in done
            and (step.kind is StepKind.FORWARD or (StepKind.FORWARD, *step.computation[1:]) in done)
        ]
        step = random.choice(possible)
        orders[stage_of[step.chunk]].append(step)
        todo.remove(step)
        done.add(step.computation)
    return orders


def interleaved(n_stages: int, n_micro_batches: int, n_chunks_per_stage: int) -> Schedule:
    """Stage s has the chunks s, s + n_stages, ...: smaller bubbles, more messages (Narayanan et al. 2021, "Efficient
    large-scale language model training on GPU clusters"); any number of micro-batches.

    Micro-batches go through a stage's chunks in groups of n_stages. The last group is filled up for ordering, and the
    fillers are left out again: with a smaller group the order of forwards and backwards would close a circle.
    """
    n_chunks = n_stages * n_chunks_per_stage
    n_filled = -(-n_micro_batches // n_stages) * n_stages
    orders = []
    for stage in range(n_stages):
        chunks = range(stage, n_chunks, n_stages)
        forwards = [forward_step(i, chunk) for i, chunk in _in_groups(n_filled, chunks, n_stages)]
        backwards = [backward_step(i, chunk, n_chunks) for i, chunk in _in_groups(n_filled, chunks[::-1], n_stages)]
        n_warm_up = n_stages - 1 - stage
        if n_chunks_per_stage > 1:
            n_warm_up = 2 * n_warm_up + (n_chunks_per_stage - 1) * n_stages
        order = alternate(forwards, backwards, n_warm_up=n_warm_up)
        orders.append([step for step in order if step.micro_batch < n_micro_batches])
    return place_messages(orders)


def inference_of_chunks(n_stages: int, n_micro_batches: int, n_chunks_per_stage: int) -> Schedule:
    """Forward only, with the chunks of `interleaved`."""
    chunks = [range(stage, n_stages * n_chunks_per_stage, n_stages) for stage in range(n_stages)]
    return place_messages(
        [[forward_step(i, c) for i, c in _in_groups(n_micro_batches, own, n_stages)] for own in chunks]
    )


def _in_groups(n_micro_batches: int, chunks: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield (micro_batch, chunk): groups of micro-batches, each through all chunks before the next group."""
    for first in range(0, n_micro_batches, size):
        for chunk in chunks:
            for micro_batch in range(first, min(first + size, n_micro_batches)):
                yield micro_batch, chunk

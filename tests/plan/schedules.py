"""Pipeline schedules that no builder makes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from realrl.plan.pipeline import Step, StepKind, backward_step, forward_step


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

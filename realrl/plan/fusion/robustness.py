"""Robustness of a schedule: how much longer it takes, in the planned order, when tasks take other times."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from realrl.plan.fusion.schedule import FusedSchedule, Task, feeds


@dataclass(frozen=True)
class SlowDown:
    """Latencies under jitter, in latencies of the schedule."""

    mean: float
    worst: float


def slow_down(schedule: FusedSchedule, *, jitter: float = 0.2, n_draws: int = 20, seed: int = 0) -> SlowDown:
    """Return how the latency grows if each task takes between 1 - jitter and 1 + jitter of its time, evenly drawn."""
    random, instance = Random(seed), schedule.instance
    order = sorted(schedule.starts, key=schedule.starts.__getitem__)
    needs = {task: feeds(instance, task) for task in order}
    devices = {task: instance.pipelines[task.pipeline].stages[task.stage].devices for task in order}
    nominal = {task: schedule.duration(task) for task in order}
    found = []
    for _ in range(n_draws):
        free, ends = [0.0] * instance.n_devices, dict[Task, float]()
        for task in order:  # by its planned start, a task comes after all that it waits for
            start = max([*(free[d] for d in devices[task]), *(ends[need] for need in needs[task])])
            ends[task] = start + nominal[task] * random.uniform(1 - jitter, 1 + jitter)
            for d in devices[task]:
                free[d] = ends[task]
        found.append(max(free) / schedule.latency)
    return SlowDown(sum(found) / n_draws, max(found))

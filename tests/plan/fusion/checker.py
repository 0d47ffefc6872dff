"""Check of fused schedules that shares no code with the search: times by the longest path in a graph of tasks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import networkx as nx

from realrl.plan.fusion.instance import Instance
from realrl.plan.fusion.schedule import FusedSchedule, Task


def check(schedule: FusedSchedule) -> tuple[float, list[float]]:
    """Return latency and the peak of each device, after a check of everything that a schedule has to be."""
    return check_orders(schedule.instance, schedule.orders)


def check_orders(instance: Instance, orders: Sequence[Sequence[Task]]) -> tuple[float, list[float]]:
    """As `check`, of orders."""
    seconds: dict[Task, float] = {}
    needs = nx.DiGraph()
    places: dict[Task, tuple[int, ...]] = {}
    for p, pipeline in enumerate(instance.pipelines):
        n_stages = len(pipeline.stages)
        for m in range(pipeline.n_micro_batches):
            way = [Task(p, m, s, False) for s in range(n_stages)] + [
                Task(p, m, s, True) for s in reversed(range(n_stages))
            ]
            nx.add_path(needs, way)  # forward through all stages and back again
            for task in way:
                stage = pipeline.stages[task.stage]
                seconds[task] = stage.backward if task.is_backward else stage.forward
                places[task] = stage.devices
    wanted: dict[int, Counter[Task]] = defaultdict(Counter)
    for task, devices in places.items():
        for device in devices:
            wanted[device][task] += 1
    assert len(orders) == instance.n_devices
    for device, order in enumerate(orders):
        assert Counter(order) == wanted[device], f"device {device} does other tasks than its own"
        nx.add_path(needs, order)
    assert nx.is_directed_acyclic_graph(needs)
    ends: dict[Task, float] = {}
    starts: dict[Task, float] = {}
    for task in nx.topological_sort(needs):
        starts[task] = max((ends[before] for before in needs.predecessors(task)), default=0.0)
        ends[task] = starts[task] + seconds[task]
    peaks = []
    for device, order in enumerate(orders):
        for before, after in pairwise(order):
            assert ends[before] <= starts[after], f"device {device} does two tasks at a time"
        peak, held = 0.0, Counter[tuple[int, int]]()
        for task in order:
            held[task.pipeline, task.stage] += -1 if task.is_backward else 1
            assert held[task.pipeline, task.stage] >= 0
            now = sum(n * instance.pipelines[p].stages[s].activation for (p, s), n in held.items())
            peak = max(peak, now)
        peaks.append(peak)
        if instance.memory_caps is not None:
            assert peak <= instance.memory_caps[device] * (1 + 1e-9) + 1e-9, f"device {device} holds too much"
    return max(ends.values()), peaks

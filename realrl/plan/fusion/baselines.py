"""Schedules to compare fused ones with: the models one after the other, and fused without search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from realrl.plan.fusion.instance import Instance, Pipeline, Stage
from realrl.plan.fusion.listing import greedy_words, serial_words
from realrl.plan.fusion.problem import problem_of
from realrl.plan.fusion.schedule import FusedSchedule, Letter


@dataclass(frozen=True)
class Baseline:
    """Figures of a way to train the models.

    Attributes:
        schedule: None where it is no fused schedule.
    """

    name: str
    latency: float
    peak: float
    schedule: FusedSchedule | None = None

    def bubble_share(self, instance: Instance) -> float:
        """Return the share of the devices' time in which they do not compute."""
        busy = sum(p.n_micro_batches * s.work * len(s.devices) for p in instance.pipelines for s in p.stages)
        return 1 - busy / (self.latency * instance.n_devices)


def serial(instance: Instance) -> Baseline:
    """Return 1F1B of one model after the other; copies of a model, on devices of their own, run at the same time."""
    alone = (_alone(instance, (pipeline,)) for pipeline in instance.pipelines)
    schedules = [FusedSchedule.of_words(i, (p := problem_of(i)).letters_of(serial_words(p))) for i in alone]
    return _in_rounds("1F1B in series", instance, schedules)


def interleaved(instance: Instance, n_chunks: int = 2) -> Baseline | None:
    """Return interleaved 1F1B of one model after the other (Narayanan et al. 2021, "Efficient large-scale language
    model training on GPU clusters"): each device has `n_chunks` pieces of a model, with their share of time and memory.

    Returns None where a stage lies on several devices, or two stages on one.
    """
    schedules = []
    for pipeline in instance.pipelines:
        devices = [stage.devices for stage in pipeline.stages]
        if any(len(d) > 1 for d in devices) or len(set(devices)) < len(devices):
            return None
        pieces = tuple(
            Stage(s.devices, s.forward / n_chunks, s.backward / n_chunks, s.activation / n_chunks)
            for s in pipeline.stages
        )
        cut = _alone(instance, (replace(pipeline, stages=pieces * n_chunks),))
        words: list[list[Letter]] = [[] for _ in range(instance.n_devices)]
        for stage, (device,) in enumerate(devices):
            words[device] = list(_interleaved_word(stage, len(devices), pipeline.n_micro_batches, n_chunks))
        schedules.append(FusedSchedule.of_words(cut, words))
    return _in_rounds(f"interleaved 1F1B in series, {n_chunks} chunks", instance, schedules)


def greedy(instance: Instance) -> Baseline | None:
    """Return greedy fusion, as Chimera would: a device that can compute does; None where the caps stop it."""
    problem = problem_of(instance)
    words = greedy_words(problem)
    if words is None:
        return None
    schedule = FusedSchedule.of_words(instance, problem.letters_of(words))
    return Baseline("greedy, as Chimera", schedule.latency, schedule.peak, schedule)


def _alone(instance: Instance, pipelines: tuple[Pipeline, ...]) -> Instance:
    return replace(instance, pipelines=pipelines)


def _in_rounds(name: str, instance: Instance, schedules: Sequence[FusedSchedule]) -> Baseline:
    """Return figures of pipelines in turn; neighbours that share no device have a round together."""
    latency, longest, taken = 0.0, 0.0, set[int]()
    for pipeline, schedule in zip(instance.pipelines, schedules, strict=True):
        own = {device for stage in pipeline.stages for device in stage.devices}
        if own & taken:
            latency, longest, taken = latency + longest, 0.0, set()
        longest, taken = max(longest, schedule.latency), taken | own
    return Baseline(name, latency + longest, max(schedule.peak for schedule in schedules))


def _interleaved_word(stage: int, n_stages: int, n_micro_batches: int, n_chunks: int) -> Iterator[Letter]:
    """Yield a device's letters: micro-batches go through its chunks in groups of `n_stages`.

    The last group is filled up for ordering, and the fillers are left out again: with a smaller group the order would
    be cyclic.
    """
    n_filled = -(-n_micro_batches // n_stages) * n_stages
    forwards = [
        (m, chunk * n_stages + stage)
        for first in range(0, n_filled, n_stages)
        for chunk in range(n_chunks)
        for m in range(first, first + n_stages)
    ]
    backwards = [
        (m, chunk * n_stages + stage)
        for first in range(0, n_filled, n_stages)
        for chunk in reversed(range(n_chunks))
        for m in range(first, first + n_stages)
    ]
    n_ahead = n_stages - 1 - stage if n_chunks == 1 else 2 * (n_stages - 1 - stage) + (n_chunks - 1) * n_stages
    n_ahead = min(n_ahead, len(forwards))
    tasks = [(*each, False) for each in forwards[:n_ahead]]
    for forward, backward in zip(forwards[n_ahead:], backwards, strict=False):
        tasks += [(*forward, False), (*backward, True)]
    tasks += [(*each, True) for each in backwards[len(forwards) - n_ahead :]]
    for m, chunk, is_backward in tasks:
        if m < n_micro_batches:
            yield Letter(0, chunk, is_backward)

"""An instance in whole numbers, as the search computes with it: sums are exact, in any order and language.

Letters are numbered: 2 s is the forward and 2 s + 1 the backward of stage s, where stages of all pipelines are counted
through. Task m of letter l is number `base[l] + m`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from realrl.plan.fusion.instance import Instance
from realrl.plan.fusion.schedule import FusedSchedule, Letter

UNLIMITED = 1 << 62
_TOTAL = 1 << 40  # ticks of the sum of all numbers, where they are not whole at any decimal place that is tried
_MAX_DECIMALS = 6
_SLACK = 1e-9  # of a cap
_MASK = (1 << 64) - 1

Words = tuple[tuple[int, ...], ...]  # for each device the numbers of its letters


@dataclass(frozen=True)
class Problem:
    """The numbers of an instance.

    Attributes:
        n_micro_batches, pipeline, position: of each stage; the position is that in its pipeline.
        last: of each stage, whether it is its pipeline's last one.
        devices: of each stage.
        duration: ticks of each letter.
        activation: units of memory of each stage.
        caps: units of memory of each device.
        tick, unit: time and memory that one stands for.
    """

    n_devices: int
    n_micro_batches: tuple[int, ...]
    pipeline: tuple[int, ...]
    position: tuple[int, ...]
    last: tuple[bool, ...]
    devices: tuple[tuple[int, ...], ...]
    duration: tuple[int, ...]
    activation: tuple[int, ...]
    caps: tuple[int, ...]
    tick: Fraction
    unit: Fraction

    @property
    def n_stages(self) -> int:
        """Stages of all pipelines."""
        return len(self.pipeline)

    @property
    def n_pipelines(self) -> int:
        """Pipelines, copies counted one by one."""
        return self.pipeline[-1] + 1

    @cached_property
    def has_gangs(self) -> bool:
        """True if a stage lies on several devices."""
        return any(len(devices) > 1 for devices in self.devices)

    @cached_property
    def base(self) -> tuple[int, ...]:
        """Number of the first task of each letter, and of one more letter."""
        base = [0]
        for n in self.n_micro_batches:
            base += [base[-1] + n, base[-1] + 2 * n]
        return tuple(base)

    @cached_property
    def grows_by(self) -> tuple[int, ...]:
        """Units of memory that each letter takes, less than none for backwards."""
        return tuple(units for activation in self.activation for units in (activation, -activation))

    @cached_property
    def letters_on(self) -> tuple[tuple[int, ...], ...]:
        """Letters of each device, ascending."""
        on: list[list[int]] = [[] for _ in range(self.n_devices)]
        for stage, devices in enumerate(self.devices):
            for device in devices:
                on[device] += [2 * stage, 2 * stage + 1]
        return tuple(map(tuple, on))

    @cached_property
    def path(self) -> tuple[int, ...]:
        """Ticks from the start of a micro-batch's letter to the end of its last backward, if it never waits."""
        path = [0] * (2 * self.n_stages)
        back = 0
        for stage in range(self.n_stages):
            back = self.duration[2 * stage + 1] + (back if self.position[stage] else 0)
            path[2 * stage + 1] = back
        for stage in reversed(range(self.n_stages)):
            onward = path[2 * stage + 1] if self.last[stage] else path[2 * stage + 2]
            path[2 * stage] = self.duration[2 * stage] + onward
        return tuple(path)

    @cached_property
    def work(self) -> int:
        """Ticks of the busiest device."""
        return max(sum(self.duration[x] * self.n_micro_batches[x // 2] for x in own) for own in self.letters_on)

    @cached_property
    def reversed(self) -> Problem:
        """The same problem with time running backwards: forwards and backwards are exchanged."""
        swapped = tuple(self.duration[letter ^ 1] for letter in range(len(self.duration)))
        return _replace(self, duration=swapped)

    def with_caps(self, caps: Iterable[int]) -> Problem:
        """Return the same with other memory caps."""
        return _replace(self, caps=tuple(caps))

    def with_micro_batches(self, counts: tuple[int, ...]) -> Problem:
        """Return the same with other numbers of micro-batches, one for each stage."""
        return _replace(self, n_micro_batches=counts)

    def words_of(self, schedule: FusedSchedule) -> Words:
        """Return the words of a schedule as numbers."""
        first = {p: self.pipeline.index(p) for p in range(self.n_pipelines)}
        return tuple(tuple(2 * (first[x.pipeline] + x.stage) + x.is_backward for x in word) for word in schedule.words)

    def letters_of(self, words: Words) -> tuple[tuple[Letter, ...], ...]:
        """Return words of numbers as letters."""
        letters = [
            Letter(self.pipeline[stage], self.position[stage], is_backward)
            for stage in range(self.n_stages)
            for is_backward in (False, True)
        ]
        return tuple(tuple(letters[x] for x in word) for word in words)

    def ticks(self, time: float) -> int:
        """Return a time in ticks, rounded."""
        return round(Fraction(time) / self.tick)

    def time(self, ticks: int) -> float:
        """Return the time of ticks."""
        return float(ticks * self.tick)

    def memory(self, units: int) -> float:
        """Return the memory of units."""
        return float(units * self.unit)


def _replace(problem: Problem, **changes: object) -> Problem:
    """Return a copy without cached properties; dataclasses.replace would make the same, but mypy checks this less."""
    fields = {name: getattr(problem, name) for name in Problem.__dataclass_fields__}
    return Problem(**{**fields, **changes})


def mixed(seed: int, number: int) -> int:
    """Return the random 64 bits of a number: a step of SplitMix64 (Steele et al. 2014)."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def flipped(words: Words) -> Words:
    """Return the words of the reversed problem's schedule that is these words' in reverse."""
    return tuple(tuple(letter ^ 1 for letter in reversed(word)) for word in words)


@lru_cache(maxsize=64)
def problem_of(instance: Instance) -> Problem:
    """Return an instance in whole numbers; caps are rounded down and activations up, if at all.

    Where activations are rounded, caps are a billionth larger, so that micro-batches which fill one exactly still fit.
    """
    stages = [(p, i, stage) for p, pipeline in enumerate(instance.pipelines) for i, stage in enumerate(pipeline.stages)]
    n_micro_batches = [instance.pipelines[p].n_micro_batches for p, _, _ in stages]
    times = [time for _, _, stage in stages for time in (stage.forward, stage.backward)]
    activations = [stage.activation for _, _, stage in stages]
    tick = _quantum(times, [n for n in n_micro_batches for _ in (0, 1)])
    unit = _quantum(activations, n_micro_batches)
    caps = [UNLIMITED] * instance.n_devices
    if instance.memory_caps is not None:
        is_rounded = any(_up(activation, unit) != _down(activation, unit) for activation in activations)
        slack = 1 + _SLACK * is_rounded
        caps = [min(UNLIMITED, _down(cap * slack, unit)) for cap in instance.memory_caps]
        least = [0] * instance.n_devices  # in units; rounding shall not forbid what is possible
        for p in range(len(instance.pipelines)):
            for device in range(instance.n_devices):
                own = sum(_up(s.activation, unit) for q, _, s in stages if q == p and device in s.devices)
                least[device] = max(least[device], own)
        caps = [max(pair) for pair in zip(caps, least, strict=True)]
    return Problem(
        n_devices=instance.n_devices,
        n_micro_batches=tuple(n_micro_batches),
        pipeline=tuple(p for p, _, _ in stages),
        position=tuple(i for _, i, _ in stages),
        last=tuple(i + 1 == len(instance.pipelines[p].stages) for p, i, _ in stages),
        devices=tuple(stage.devices for _, _, stage in stages),
        duration=tuple(max(1, round(Fraction(time) / tick)) for time in times),
        activation=tuple(_up(activation, unit) for activation in activations),
        caps=tuple(caps),
        tick=tick,
        unit=unit,
    )


def _quantum(numbers: Sequence[float], counts: Sequence[int]) -> Fraction:
    """Return what numbers are multiples of: a decimal place, or a small fraction of their sum."""
    total = sum(Fraction(x) * n for x, n in zip(numbers, counts, strict=True))
    for decimals in range(_MAX_DECIMALS + 1):
        scale: int = 10**decimals
        if total * scale > _TOTAL:
            break
        if all(abs(x * scale - round(x * scale)) <= 1e-9 * max(1.0, abs(x * scale)) for x in numbers):
            return Fraction(1, scale)
    return total / _TOTAL if total else Fraction(1)


def _up(number: float, unit: Fraction) -> int:
    ratio = Fraction(number) / unit
    near = round(ratio)
    return near if abs(ratio - near) <= Fraction(1, 10**6) else -(-ratio.numerator // ratio.denominator)


def _down(number: float, unit: Fraction) -> int:
    if number == float("inf"):
        return UNLIMITED
    ratio = Fraction(number) / unit
    near = round(ratio)
    return near if abs(ratio - near) <= Fraction(1, 10**6) else ratio.numerator // ratio.denominator

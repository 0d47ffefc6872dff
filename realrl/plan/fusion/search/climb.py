"""Hill-climbing over the rules of list scheduling, forwards and backwards in time.

Invariants:
    - what is found keeps the memory caps, and is never worse than what the climb starts with;
    - the n-th evaluation is a function of problem, seed and the outcomes before it, so a search with a number of
      evaluations always finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from realrl.plan.fusion.listing import (
    N_PIECES,
    Rule,
    backward_first,
    evaluate,
    greedy_words,
    list_words,
    peaks_of,
    quotas_of,
    serial_words,
)
from realrl.plan.fusion.problem import Problem, Words, flipped
from realrl.plan.fusion.search.annealing import Annealed, Settings, anneal
from realrl.plan.fusion.search.islands import crossed
from realrl.plan.fusion.search.shifting import Shifted, shift

_RESTART_AFTER = 60  # evaluations without a better latency, times the number of pipelines
_SEEDS = 1 << 62
_PACED_PATIENCE = 5  # times as many of paced rules
_PATIENCE = (None, 0.0, 0.5, 2.0)


@dataclass(frozen=True)
class Found:
    """A schedule of a problem: its words, latency in ticks, and the highest of the devices' peaks in units."""

    words: Words
    latency: int
    peak: int

    @property
    def cost(self) -> tuple[int, int]:
        """Pair that the climb makes small."""
        return self.latency, self.peak

    @classmethod
    def of(cls, problem: Problem, words: Words) -> Found:
        """Return words that are not cyclic with their latency and peak."""
        latency = evaluate(problem, words)
        assert latency is not None
        return cls(words, latency, max(peaks_of(problem, words)))


class Listed(NamedTuple):
    """Latency, peak and, when they are asked for, words of a list schedule."""

    latency: int
    peak: int
    words: Callable[[], Words]


class Kernels:
    """The inner loops of the search, in Python; a compiled twin does the same, only faster."""

    def listed(self, problem: Problem, rule: Rule) -> Listed | None:
        """Return the list schedule of a rule; None where memory lets nothing go on."""
        found = list_words(problem, rule)
        return None if found is None else Listed(found[0], max(peaks_of(problem, found[1])), lambda: found[1])

    def evaluated(self, problem: Problem, words: Words) -> int | None:
        """Return the latency in ticks of words; None if they are cyclic."""
        return evaluate(problem, words)

    def annealed(self, problem: Problem, words: Words, settings: Settings) -> Annealed:
        """Return where an annealing ends."""
        return anneal(problem, words, settings)

    def crossed(
        self, problem: Problem, first: Words, second: Words, times: Sequence[int], settings: Settings
    ) -> Words | None:
        """Return the cheapest words that `crossed` yields and that are neither parent; None if there are none."""
        children = [words for words in crossed(problem, first, second, times) if words not in (first, second)]
        without = replace(settings, temperatures=())
        ends = [self.annealed(problem, words, without) for words in children]
        return min(ends, key=settings.cost_of).words if ends else None

    def shifted(self, problem: Problem, words: Words, *, enough: int, n_steps: int, seed: int) -> Shifted:
        """Return words after some steps of listing them again."""
        return shift(problem, words, enough=enough, n_steps=n_steps, seed=seed)


def starts_of(problem: Problem) -> list[Found]:
    """Return the schedules that need no search: 1F1B in series, and greedy fusion where the caps let it end."""
    words = [serial_words(problem), greedy_words(problem)]
    return [Found.of(problem, each) for each in words if each is not None]


@dataclass
class _Point:
    """Point of the climb: a rule, the direction of time, and the cost of what they gave."""

    rule: Rule
    is_reversed: bool
    cost: tuple[float, float] = field(default=(float("inf"), float("inf")))


class Climb:
    """A climb that can go on for as long as there is time.

    Attributes:
        best: what was found so far, the starts included; None if that is nothing.
        n_done: rules that were tried.
    """

    def __init__(
        self, problem: Problem, kernels: Kernels, *, seed: int, starts: Sequence[Found] = (), is_paced: bool = False
    ) -> None:
        self._problem, self._kernels, self._is_paced = problem, kernels, is_paced
        self._random = Random(seed)
        self._point = _Point(Rule(backward_first(problem)), is_reversed=True)
        self._n_idle = 0
        self.n_done = 0
        self.best = min(starts, key=lambda found: found.cost, default=None)

    def run(self, n_evaluations: int, *, enough: int = 0) -> Found | None:
        """Go on for some evaluations, or until the latency is low enough; return the best so far."""
        for _ in range(n_evaluations):
            if self.best is not None and self.best.latency <= enough:
                break
            self._step()
        return self.best

    def _step(self) -> None:
        if self._n_idle > _RESTART_AFTER * self._problem.n_pipelines * (_PACED_PATIENCE if self._is_paced else 1):
            self._point, self._n_idle = self._restart(), 0
        point = self._changed(self._point) if self.n_done else self._point
        self.n_done += 1
        cost = self._evaluate(point)
        self._n_idle = 0 if cost < self._point.cost else self._n_idle + 1
        if cost <= self._point.cost:
            self._point = replace(point, cost=cost)

    def _evaluate(self, point: _Point) -> tuple[float, float]:
        problem = self._problem.reversed if point.is_reversed else self._problem
        listed = self._kernels.listed(problem, point.rule)
        if listed is None:
            return float("inf"), float("inf")
        cost = listed.latency, listed.peak
        if self.best is None or cost < self.best.cost:
            words = listed.words()
            self.best = Found(flipped(words) if point.is_reversed else words, *cost)
        return cost

    def _restart(self) -> _Point:
        draw = self._random
        size = draw.choice((0.3, 1.0))
        weights = [w + _bell(draw, size) for w in backward_first(self._problem)]
        noise = draw.choice((0.0, 0.0, 0.02, 0.1, 0.3))
        if self._is_paced:
            rule = Rule(tuple(weights), noise, draw.randrange(_SEEDS), draw.choice(_PATIENCE), paces=self._paces())
            return _Point(rule, draw.random() < 0.5)
        rule = Rule(tuple(weights), noise, draw.randrange(_SEEDS), draw.choice(_PATIENCE), self._quotas())
        return _Point(rule, draw.random() < 0.7)

    def _paces(self) -> tuple[float, ...]:
        """Draw paces: even ones, and none for some pipelines."""
        paces: list[float] = []
        for _ in range(self._problem.n_pipelines):
            is_free, whole, sooner = (
                self._random.random() < 0.4,
                0.9 * self._random.random(),
                0.4 * self._random.random(),
            )
            paces += [-1.0 if is_free else whole * (k / N_PIECES) - sooner for k in range(N_PIECES + 1)]
        return tuple(paces)

    def _changed_paces(self, paces: Sequence[float]) -> tuple[float, ...]:
        """Move one end of a piece, or all before or behind it, too."""
        draw, changed = self._random, list(paces)
        pipeline, k = draw.randrange(self._problem.n_pipelines), draw.randrange(N_PIECES + 1)
        by, which, first = _bell(draw, draw.choice((0.01, 0.03, 0.1, 0.3))), draw.random(), pipeline * (N_PIECES + 1)
        moved = range(k, k + 1) if which < 0.4 else range(k, N_PIECES + 1) if which < 0.7 else range(k + 1)
        for i in moved:
            changed[first + i] += by
        for i in range(first + 1, first + N_PIECES + 1):
            changed[i] = max(changed[i], changed[i - 1])
        return tuple(changed)

    def _quotas(self) -> tuple[int, ...] | None:
        """Draw limits of micro-batches in flight, most often none."""
        if self._random.random() < 0.7:
            return None
        more = [self._random.randrange(0, 4) for _ in range(self._problem.n_pipelines)]
        own = [quotas_of(self._problem, p) for p in range(self._problem.n_pipelines)]
        return tuple(max(of_stage) + more[p] for p, of_stage in zip(self._problem.pipeline, zip(*own), strict=True))

    def _changed(self, point: _Point) -> _Point:
        draw, weights = self._random, list(point.rule.weights)
        if point.rule.paces is not None and draw.random() < 0.5:
            return _Point(replace(point.rule, paces=self._changed_paces(point.rule.paces)), point.is_reversed)
        kind = draw.random()
        if kind < 0.15:
            rule = replace(point.rule, seed=draw.randrange(_SEEDS), noise=draw.choice((0.0, 0.02, 0.1, 0.3)))
            return _Point(rule, point.is_reversed)
        if kind < 0.25:
            return _Point(replace(point.rule, patience=draw.choice(_PATIENCE)), point.is_reversed)
        n_changed = 1 if kind < 0.6 else draw.randrange(1, len(weights) + 1)
        size = draw.choice((0.05, 0.2, 0.6, 1.5))
        for _ in range(n_changed):
            weights[draw.randrange(len(weights))] += _bell(draw, size)
        return _Point(replace(point.rule, weights=tuple(weights)), point.is_reversed)


def _bell(draw: Random, size: float) -> float:
    """Draw from a bell curve around 0 of about this deviation, with sums and products only: equal on every machine."""
    return size * 1.7 * (draw.random() + draw.random() + draw.random() + draw.random() - 2.0)

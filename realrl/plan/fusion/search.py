"""The search for a fused schedule as rounds of probes, which any number of processes may carry out.

    climb: rules of list scheduling under memory caps        descent: lower peaks at that latency
       └──────────────── schedules ─────────────────────────────► pool ◄──┘

First latency counts, then the highest peak. Probes climb under the caps that hold and under looser ones, where low
latencies are easier to find, and descend from what was found to the caps and below.

Invariants:
    - a probe's outcome is a function of the problem and the probe;
    - the probes of a round are a function of problem, seed and the outcomes of the rounds before, so that a number of
      rounds has one outcome, however many processes there are;
    - the best schedule keeps the caps, and no round makes it worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from realrl.plan.fusion.bounds import latency_bound, memory_bound
from realrl.plan.fusion.climb import Climb, Found, Kernels, starts_of
from realrl.plan.fusion.descent import Settings
from realrl.plan.fusion.listing import peaks_of
from realrl.plan.fusion.problem import UNLIMITED, Problem, Words

N_PROBES = 4  # of a round
_CLIMB_TASKS = 400_000  # tasks that a climb schedules, counting each as often as it is
_CLIMB_STEPS = 4_000  # rules that a climb tries at most
_MOVES, _MOVES_PER_TASK = 2_000_000, 5_000  # of a step of a descent, at most
_STEPS, _FAILURES = 32, 2  # of a descent, and those without success after which it ends
_LOOSER = (1.0, 1.0625, 1.25, 1.5, 2.0, 4.0)  # caps to climb under, in peaks of 1F1B in series
_POOL = 4
_LATENCY_ROUNDS = 8  # in which all probes look for the lowest latency alone
_FRONT = 8  # caps that a front is looked for at


@dataclass(frozen=True)
class Probe:
    """A piece of the search.

    Attributes:
        caps: units of memory to climb under.
        targets: units of memory to descend to.
        limit: ticks that end a climb, and that a descent keeps.
        start: words to descend from; None: climb first.
        temperature: of the descent.
        step: from one target to the next, in largest activations.
    """

    caps: tuple[int, ...]
    targets: tuple[int, ...]
    limit: int
    seed: int
    start: Words | None = None
    temperature: int = 0
    step: float = 0.25


@dataclass(frozen=True)
class Outcome:
    """What a probe found.

    Attributes:
        found: schedules, the best of the climb and of the descent.
        last: words at which the descent stood, or None.
    """

    found: tuple[Found, ...]
    last: Words | None = None


def carry_out(problem: Problem, probe: Probe, kernels: Kernels) -> Outcome:
    """Return the outcome of a probe."""
    found: list[Found] = []
    words = probe.start
    if words is None:
        climb = Climb(problem.with_caps(probe.caps), kernels, seed=probe.seed)
        best = climb.run(min(_CLIMB_STEPS, max(8, _CLIMB_TASKS // problem.base[-1])), enough=probe.limit)
        if best is None:
            return Outcome(())
        found.append(best)
        words = best.words
        if best.latency > probe.limit:
            return Outcome(tuple(found))
    lowest = None
    n_failed, n_moves = 0, min(_MOVES, _MOVES_PER_TASK * problem.base[-1])
    for step in range(_STEPS):  # each aims a little below the peaks that it begins with
        pairs = zip(peaks_of(problem, words), probe.targets, strict=True)
        excess = max(peak - target for peak, target in pairs) - max(1, int(max(problem.activation) * probe.step))
        targets = tuple(target + max(0, excess) for target in probe.targets)
        settings = Settings(probe.limit, targets, probe.temperature, n_moves, probe.seed + step)
        energy, words = kernels.descended(problem, words, settings)
        n_failed += energy > 0
        if not energy and (lowest is None or excess <= lowest[0]):
            lowest = excess, words
        if n_failed == _FAILURES or (excess <= 0 and not energy):
            break
    if lowest is not None:
        found.append(Found.of(problem, lowest[1]))
    return Outcome(tuple(found), words)


@dataclass
class _Start:
    """Words to descend from, and the peak that a descent from them last reached."""

    words: Words
    peak: int


class Search:
    """A search that goes on in rounds.

    Attributes:
        best: the best schedule so far.
        bound: ticks that no schedule's latency can go below.
        front: schedules of which none has both the latency and the peak of another, by latency.
    """

    def __init__(self, problem: Problem, *, seed: int = 0, pareto: bool = False) -> None:
        self._problem, self._random, self._pareto = problem, Random(seed), pareto
        self.bound = latency_bound(problem)
        self._starts = starts_of(problem)
        self.best = min(self._starts, key=lambda found: found.cost)
        self.front: list[Found] = []
        self._serial = max(peaks_of(problem, self._starts[0].words))
        self._least = memory_bound(problem, UNLIMITED)
        self._pool: list[_Start] = []
        self._limit = self.best.latency  # of the pool
        self._n_rounds = 0
        for found in self._starts:
            self._note(found)

    @property
    def least_peak(self) -> int:
        """Units that no schedule of the best latency can go below."""
        return memory_bound(self._problem, self.best.latency)

    @property
    def is_done(self) -> bool:
        """True if nothing better is possible."""
        is_best = self.best.latency <= self.bound and self.best.peak <= self.least_peak
        return is_best and (not self._pareto or self.best.peak <= self._least)

    def probes(self) -> tuple[Probe, ...]:
        """Return the probes of the next round."""
        self._n_rounds += 1
        return tuple(self._probe(number) for number in range(N_PROBES))

    def take(self, probes: Sequence[Probe], outcomes: Iterable[Outcome]) -> None:
        """Learn from the outcomes of a round, in the order of its probes."""
        for probe, outcome in zip(probes, outcomes, strict=True):
            for found in outcome.found:
                self._note(found)
            if probe.limit == self._limit and outcome.last is not None:
                self._add(outcome.last, max(peaks_of(self._problem, outcome.last)))

    def _note(self, found: Found) -> None:
        peaks = peaks_of(self._problem, found.words)
        if any(peak > cap for peak, cap in zip(peaks, self._problem.caps, strict=True)):
            return
        if all(found.latency < other.latency or found.peak < other.peak for other in self.front):
            worse = [f for f in self.front if f.latency >= found.latency and f.peak >= found.peak]
            self.front = sorted([f for f in self.front if f not in worse] + [found], key=lambda f: f.cost)
        if found.latency < self.best.latency:
            self._pool, self._limit = [], found.latency
        if found.latency <= self._limit:
            self._add(found.words, found.peak)
        if found.cost < self.best.cost:
            self.best = found

    def _add(self, words: Words, peak: int) -> None:
        self._pool.append(_Start(words, peak))
        self._pool = sorted(self._pool, key=lambda start: start.peak)[:_POOL]

    def _probe(self, number: int) -> Probe:
        draw, is_lowest = self._random, self.best.latency <= self.bound
        seed = draw.randrange(1 << 62)
        if self._pareto and self._n_rounds % 2 == 0:
            return self._front_probe(seed)
        if not is_lowest and (number % 2 == 0 or self._n_rounds <= _LATENCY_ROUNDS):
            return self._probe_for(self._looser(), self.bound, seed)
        if number == 1 or not self._pool:  # a fresh start at the best latency, or just below it where the caps bind
            step = 0 if is_lowest else draw.choice((0, max(1, (self.best.latency - self.bound) // 4)))
            return self._probe_for(self._looser(), self.best.latency - step, seed)
        start = self._pool[min(draw.randrange(len(self._pool)), draw.randrange(len(self._pool)))]
        return self._probe_for(self._problem.caps, self._limit, seed, start.words)

    def _probe_for(self, caps: tuple[int, ...], limit: int, seed: int, start: Words | None = None) -> Probe:
        activation = max(self._problem.activation)
        temperature = int(activation * self._random.choice((0.1, 0.25, 0.5, 1.0)))
        goal = memory_bound(self._problem, limit)
        targets = tuple(min(cap, goal) for cap in self._problem.caps)
        return Probe(caps, targets, limit, seed, start, temperature, self._random.choice((0.1, 0.25, 0.5)))

    def _looser(self) -> tuple[int, ...]:
        """Draw caps to climb under: those that hold or looser ones, and later some around the best peak."""
        factor = self._random.choice(_LOOSER)
        if self.best.latency <= self.bound:
            level = int(self.best.peak * self._random.choice((0.9, 1.0, 1.1)))
            return tuple(max(min(cap, self._serial), min(cap, level)) for cap in self._problem.caps)
        return tuple(int(factor * min(cap, self._serial)) for cap in self._problem.caps)

    def _front_probe(self, seed: int) -> Probe:
        """Look below a peak of the front, or between its best and the least peak at all."""
        share = self._random.randrange(1, _FRONT + 1) / _FRONT
        level = max(self._least, int(self._least + share * (self.best.peak - self._least)))
        caps = tuple(min(cap, level) for cap in self._problem.caps)
        if any(cap < least for cap, least in zip(caps, _least_caps(self._problem), strict=True)):
            caps = tuple(max(pair) for pair in zip(caps, _least_caps(self._problem), strict=True))
        under = [found.latency for found in self.front if found.peak <= level]
        probe = self._probe_for(caps, max(self.bound, min(under, default=self.best.latency) - 1), seed)
        if self._random.random() < 0.5:
            return probe
        at = self._random.choice(self.front)
        return Probe(caps, probe.targets, at.latency, seed, at.words, probe.temperature)


def _least_caps(problem: Problem) -> list[int]:
    """Return the units of each device below which there is no schedule."""
    least = [0] * problem.n_devices
    for p in range(problem.n_pipelines):
        own = [s for s in range(problem.n_stages) if problem.pipeline[s] == p]
        for d in range(problem.n_devices):
            least[d] = max(least[d], sum(problem.activation[s] for s in own if d in problem.devices[s]))
    return least

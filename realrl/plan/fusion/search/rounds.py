"""The search for a fused schedule as rounds of probes, which any number of processes may carry out.

    climb: rules of list scheduling under memory caps         anneal: latency and memory at once
       └── of the problem, or of one with fewer micro-batches, stretched ──► pool ◄──┘

First latency counts, then the highest peak. Probes climb under the caps that hold and under looser ones, where low
latencies are easier to find. Annealing starts from what was found, and aims at a latency and peaks a little below.
Where there are many micro-batches, some probes search a schedule of fewer, and repeat its middle. Others list with
shifted starts under such peaks. Both annealing and listing take longer from round to round.

Invariants:
    - a probe's outcome is a function of the problem and the probe;
    - the probes of a round are a function of problem, seed and the outcomes of the rounds before, so that a number of
      rounds has one outcome, however many processes there are;
    - the best schedule keeps the caps, and no round makes it worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from realrl.plan.fusion.bounds import latency_bound, memory_bound
from realrl.plan.fusion.listing import peaks_of
from realrl.plan.fusion.problem import UNLIMITED, Problem, Words
from realrl.plan.fusion.search.annealing import Annealed, Settings
from realrl.plan.fusion.search.climb import Climb, Found, Kernels, starts_of
from realrl.plan.fusion.search.stretch import shortened, stretched

N_PROBES = 4  # of a round
_CLIMB_TASKS = 400_000  # tasks that a climb schedules, counting each as often as it is
_CLIMB_STEPS = 4_000  # rules that a climb tries at most
_SHIFT_TASKS = 400_000  # tasks that listing with shifted starts schedules in the first round, and twice as many in each
_SHIFT_DOUBLED, _SHIFT_STEPS = 6, 50_000  # of some later ones; and schedules at most
_MOVES, _MOST_MOVES = 500, 16_000  # of an annealing for each task, in the first round and later,
_MOST = 20_000_000  # and at all
_POLISH = 4  # part of these moves that a stretched schedule gets
_HOT, _WARM = (0.7, 1.0, 1.4), (0.2, 0.35, 0.7)  # temperatures to begin with, of a fresh start and of an annealed one,
_COLD = 0.05  # and to end with, in units of the first
_TEMPERATURES = 60
_LATENESS = 5.0  # cost of a delay by the mean time of a task, in largest activations
_LOOSER = (1.0, 1.0625, 1.25, 1.5, 2.0, 4.0)  # caps to climb under, in peaks of 1F1B in series
_LEVELS = (1.0625, 1.0)  # peaks to aim at, in those of 1F1B in series, before ones a little below the best
_POOL = 4
_LATENCY_ROUNDS = 8  # in which all probes look for the lowest latency alone
_FRONT = 8  # caps that a front is looked for at


@dataclass(frozen=True)
class Probe:
    """A piece of the search.

    Attributes:
        caps: units of memory to climb under.
        targets: units of memory to anneal to.
        limit: ticks that end a climb, and that annealing aims at.
        start: words to anneal; None: climb first.
        is_stretched: True climbs and anneals with fewer micro-batches first.
        temperature: to begin with, in largest activations.
        n_moves: of annealing for each task.
        n_shifts: schedules to list with shifted starts, in the place of annealing.
    """

    caps: tuple[int, ...]
    targets: tuple[int, ...]
    limit: int
    seed: int
    start: Words | None = None
    is_stretched: bool = False
    temperature: float = 1.0
    n_moves: int = 0
    n_shifts: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a probe found.

    Attributes:
        found: schedules, of the climb and of annealing.
        last: where annealing ended, or None.
        n_evaluations: list schedules that were made, and changes that were tried.
    """

    found: tuple[Found, ...]
    last: Annealed | None = None
    n_evaluations: int = 0


def carry_out(problem: Problem, probe: Probe, kernels: Kernels) -> Outcome:
    """Return the outcome of a probe."""
    if probe.n_shifts:
        return _shifted(problem.with_caps(probe.caps), probe, kernels)
    if probe.start is not None:
        return _annealed(problem, probe, probe.start, kernels)
    short = shortened(problem) if probe.is_stretched else None
    if short is not None:
        limit = latency_bound(short)
        inner = carry_out(short, replace(probe, is_stretched=False, limit=limit), kernels)
        words = None if inner.last is None else stretched(problem, short, inner.last.words)
        if words is not None:
            polish = replace(probe, temperature=min(_WARM), n_moves=probe.n_moves // _POLISH)
            outer = _annealed(problem, polish, words, kernels)
            n_evaluations = inner.n_evaluations + outer.n_evaluations
            return Outcome((Found.of(problem, words), *outer.found), outer.last, n_evaluations)
    climb = Climb(problem.with_caps(probe.caps), kernels, seed=probe.seed)
    best = climb.run(min(_CLIMB_STEPS, max(8, _CLIMB_TASKS // problem.base[-1])), enough=probe.limit)
    if best is None or not probe.n_moves:
        return Outcome(() if best is None else (best,), None, climb.n_done)
    outcome = _annealed(problem, probe, best.words, kernels)
    return Outcome((best, *outcome.found), outcome.last, climb.n_done + outcome.n_evaluations)


def _shifted(problem: Problem, probe: Probe, kernels: Kernels) -> Outcome:
    """List with shifted starts, from the start of the probe or from a climb over paced rules."""
    n_climbed, start = 0, None if probe.start is None else Found.of(problem, probe.start)
    if start is None:
        climb = Climb(problem, kernels, seed=probe.seed, is_paced=True)
        start = climb.run(probe.n_shifts, enough=probe.limit)
        n_climbed = climb.n_done
    if start is None:
        return Outcome((), None, n_climbed)
    end = kernels.shifted(problem, start.words, enough=probe.limit, n_steps=probe.n_shifts, seed=probe.seed)
    return Outcome((start, Found.of(problem, end.words)), None, n_climbed + end.n_listed)


def _annealed(problem: Problem, probe: Probe, words: Words, kernels: Kernels) -> Outcome:
    """Anneal, and then once more, cold, so that the latency is kept at least."""
    hot = probe.temperature * max(1, *problem.activation)
    settings = Settings(
        limit=probe.limit,
        targets=probe.targets,
        weight=_cost_of_a_tick(problem),
        temperatures=tuple(hot * _COLD ** (i / (_TEMPERATURES - 1)) for i in range(_TEMPERATURES)),
        n_moves=max(1, probe.n_moves * problem.base[-1] // _TEMPERATURES),
        seed=probe.seed,
    )
    last = kernels.annealed(problem, words, settings)
    found, n_tried = [Found.of(problem, last.words)], last.n_tried
    if last.excess or last.latency > probe.limit:
        strict = replace(settings, weight=settings.weight * 100.0, temperatures=(hot * _COLD,) * 2)
        end = kernels.annealed(problem, last.words, strict)
        found.append(Found.of(problem, end.words))
        n_tried += end.n_tried
    return Outcome(tuple(found), last, n_tried)


def _cost_of_a_tick(problem: Problem) -> float:
    mean = sum(problem.duration) / len(problem.duration)
    return _LATENESS * max(1, *problem.activation) / mean


@dataclass
class _Start:
    """Words to anneal, and how far from its aims the annealing ended that gave them."""

    words: Words
    cost: float


class Search:
    """A search that goes on in rounds.

    Attributes:
        best: the best schedule so far.
        bound: ticks that no schedule's latency can go below.
        n_evaluations: list schedules that were made, and changes that annealing tried.
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
        self._shift_caps: tuple[int, ...] = ()
        self._shifted: list[Found] = []  # under these caps
        self._is_best_shifted = False
        self._aims: tuple[int, tuple[int, ...]] | None = None  # of the pool
        self._is_long = shortened(problem) is not None
        self._n_rounds = self._n_annealed = self.n_evaluations = 0
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
        probes = tuple(self._probe(number) for number in range(N_PROBES))
        self._n_annealed += any(probe.n_moves for probe in probes)
        return probes

    def take(self, probes: Sequence[Probe], outcomes: Iterable[Outcome]) -> None:
        """Learn from the outcomes of a round, in the order of its probes."""
        for probe, outcome in zip(probes, outcomes, strict=True):
            best = self.best
            for found in outcome.found:
                self._note(found)
            if self.best is not best:
                self._is_best_shifted = probe.n_shifts > 0
            self.n_evaluations += outcome.n_evaluations
            if probe.n_shifts and probe.caps == self._shift_caps:
                shifted = (*self._shifted, *outcome.found[1:])
                self._shifted = sorted(shifted, key=lambda found: found.cost)[:_POOL]
            if outcome.last is not None and self._aims == (probe.limit, probe.targets):
                late = max(0, outcome.last.latency - probe.limit)
                cost = outcome.last.excess + _cost_of_a_tick(self._problem) * late
                pool = [*self._pool, _Start(outcome.last.words, cost)]
                self._pool = sorted(pool, key=lambda start: start.cost)[:_POOL]

    def _note(self, found: Found) -> None:
        peaks = peaks_of(self._problem, found.words)
        if any(peak > cap for peak, cap in zip(peaks, self._problem.caps, strict=True)):
            return
        if all(found.latency < other.latency or found.peak < other.peak for other in self.front):
            worse = [f for f in self.front if f.latency >= found.latency and f.peak >= found.peak]
            self.front = sorted([f for f in self.front if f not in worse] + [found], key=lambda f: f.cost)
        if found.cost < self.best.cost:
            self.best = found

    def _probe(self, number: int) -> Probe:
        draw, is_lowest = self._random, self.best.latency <= self.bound
        seed = draw.randrange(1 << 62)
        if self._pareto and self._n_rounds % 2 == 0:
            return self._front_probe(seed)
        if not is_lowest and (number % 2 == 0 or self._n_rounds <= _LATENCY_ROUNDS):
            return Probe(self._looser(), self._problem.caps, self.bound, seed)
        if number < self._n_shift_probes:
            return self._shift_probe(number, seed)
        aims = self._next_aims()
        if aims != self._aims:
            self._pool, self._aims = [_Start(self.best.words, float("inf"))], aims
        limit, targets = aims
        probe = Probe(self._looser(), targets, limit, seed, n_moves=self._n_moves)
        if number % 2 or len(self._pool) < _POOL:
            is_stretched = self._is_long and draw.random() < 0.7
            return replace(probe, is_stretched=is_stretched, temperature=draw.choice(_HOT))
        start = self._pool[min(draw.randrange(len(self._pool)), draw.randrange(len(self._pool)))]
        return replace(probe, start=start.words, temperature=draw.choice(_WARM))

    def _shift_probe(self, number: int, seed: int) -> Probe:
        """List under the caps of a level below the best peak: from a new climb, or on from what this has led to."""
        is_lowest = self.best.latency <= self.bound
        level = self._level_below() if is_lowest else UNLIMITED
        caps = self._caps_below(level)
        if caps != self._shift_caps:
            self._shift_caps, self._shifted = caps, []
        n_tasks = _SHIFT_TASKS << min(_SHIFT_DOUBLED, self._n_annealed)
        n_shifts = max(8, min(_SHIFT_STEPS, n_tasks // self._problem.base[-1]))
        probe = Probe(caps, caps, self.bound, seed, n_shifts=n_shifts)
        if len(self._shifted) < _POOL or (number + self._n_rounds) % 2:
            return probe
        start = self._shifted[min(self._random.randrange(len(self._shifted)) for _ in range(2))]
        return replace(probe, start=start.words)

    @property
    def _n_shift_probes(self) -> int:
        """Probes of a round that list with shifted starts: fewer where annealing has led to a low peak."""
        is_low = self.best.peak <= _LEVELS[0] * self._serial
        return N_PROBES // (4 if is_low and not self._is_best_shifted else 2)

    @property
    def _n_moves(self) -> int:
        """Changes for each task: twice as many after every other round."""
        most = min(_MOST_MOVES, max(_MOVES, _MOST // self._problem.base[-1]))
        return min(most, _MOVES << min(16, self._n_annealed // 2))

    def _next_aims(self) -> tuple[int, tuple[int, ...]]:
        """Return ticks and units to anneal to: a lower latency, or a lower peak once that is the bound."""
        best, caps = self.best, self._problem.caps
        if best.latency > self.bound:
            return self.bound + (best.latency - self.bound) // 2, caps
        return best.latency, tuple(min(cap, self._level_below()) for cap in caps)

    def _level_below(self) -> int:
        """Return units of a peak to aim at: a round part of that of 1F1B in series, or a little below the best."""
        best, goal = self.best, self.least_peak
        levels = [int(factor * self._serial) for factor in _LEVELS]
        return next((each for each in levels if goal <= each < best.peak), best.peak - max(1, (best.peak - goal) // 4))

    def _caps_below(self, level: int) -> tuple[int, ...]:
        """Return caps of at most a level, but for devices on which there is no schedule then."""
        pairs = zip(self._problem.caps, _least_caps(self._problem), strict=True)
        return tuple(max(min(cap, level), least) for cap, least in pairs)

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
        caps = self._caps_below(level)
        under = [found.latency for found in self.front if found.peak <= level]
        limit = max(self.bound, min(under, default=self.best.latency) - 1)
        probe = Probe(caps, caps, limit, seed, temperature=self._random.choice(_WARM), n_moves=self._n_moves)
        if self._random.random() < 0.5:
            return probe
        return replace(probe, start=self._random.choice(self.front).words)


@lru_cache(maxsize=16)
def _least_caps(problem: Problem) -> list[int]:
    """Return the units of each device below which there is no schedule."""
    least = [0] * problem.n_devices
    for p in range(problem.n_pipelines):
        own = [s for s in range(problem.n_stages) if problem.pipeline[s] == p]
        for d in range(problem.n_devices):
            least[d] = max(least[d], sum(problem.activation[s] for s in own if d in problem.devices[s]))
    return least

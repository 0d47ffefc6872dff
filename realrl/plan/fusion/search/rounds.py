"""The search for a fused schedule as rounds of probes, which any number of processes may carry out.

    climb: rules of list scheduling ──► anneal: latency and memory at once ──► ladder, islands ──► best schedule
    a search with fewer micro-batches ──► its best schedules ──► stretch ────────────────────────────┘

First latency counts, then the highest peak. Probes climb under the caps that hold and under looser ones, where low
latencies are easier to find. Annealing starts from what was found, and aims at a latency and peaks a little below.
Schedules that it ends with are crossed, see `islands`. Where there are many micro-batches, some rounds are those of a
search with fewer, whose schedules are stretched; until the peak is not far from that of 1F1B in series, annealing goes
on from the best for longer and longer, see `ladder`, and some probes list with shifted starts under such peaks.

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
from realrl.plan.fusion.search.islands import Island, crossed
from realrl.plan.fusion.search.ladder import Ladder, cost_of_a_tick
from realrl.plan.fusion.search.stretch import n_evaluated, shortened, stretched

N_PROBES, _CROSSING_PROBES = 4, 8  # of a round, at least, and of one that crosses schedules
_MOST_PROBES = 64
_SPREAD = 2  # a round has as much work as so many of its longest probes
_CLIMB_TASKS = 400_000  # tasks that a climb schedules, counting each as often as it is
_CLIMB_STEPS = 4_000  # rules that a climb tries at most
_SHIFT_ROUNDS = 3  # of so many, one has a probe that only lists with shifted starts:
_SHIFT_TASKS = 400_000  # tasks in the first round, and twice as many in each
_SHIFT_DOUBLED, _SHIFT_STEPS = 6, 50_000  # of some later ones; and schedules at most
_POOL = 4
_FRESH_TASKS = 50_000  # tasks that a climb schedules before annealing, and listing with shifted starts as many
_MOVES = 500  # of an annealing for each task, on the lowest rung
_RUNGS = 6  # above the lowest, at most
_ON, _CROSSED = 1_000, (500, 1_000, 2_000)  # of an annealing on from a fresh start of an island, and of what is crossed
_CUTS = 40  # times at which two schedules are crossed, of which annealing goes on from the best
_MOST = 32_000_000  # changes of an annealing: higher rungs are left out
# of four rounds, those with fewer micro-batches: at first, where they lead or are level, and where they trail
_INNER, _INNER_LEADS, _INNER_TRAILS = 2, 3, 1
_MOST_EFFORT, _NEARLY = 16, 4  # of stretching, doubled if this ends late by so many mean tasks at most, else halved
# temperatures to begin with, of a fresh start, of one that was annealed and of the best, and to end with, in largest
# activations
_HOT, _WARM, _FINE, _COLD = (0.7, 1.0, 1.4), (0.2, 0.35, 0.5, 0.7, 1.0), (0.1, 0.2, 0.3), 0.06
_FINE_RUNG, _FINE_SHARE = 3, 0.5  # from which on the best are touched up, and instead of how many fresh starts
_AFTER = (0.1, 0.2, 0.3, 0.5)  # of what is crossed
_TEMPERATURES = 60
_LOOSER = (1.0, 1.0625, 1.25, 1.5, 2.0, 4.0)  # caps to climb under, in peaks of 1F1B in series
_LEVELS = (1.25, 1.125, 1.0625, 1.0)  # peaks to aim at, in those of 1F1B in series, before ones a little below the best
_NEAR = _LEVELS[1]  # from which on schedules are crossed
_SHIFT_LEVELS = _LEVELS[-2:]  # of listing with shifted starts, which begins anew at each
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
        other: words that the start is crossed with before.
        island: number of the island that gets what it ends with; or None.
        known: a schedule with fewer micro-batches that is stretched if it finds none.
        is_short: True for a probe of the search with fewer micro-batches, of which all else is meant.
        effort: of stretching what it finds, if that has its lowest latency and a peak below `enough`.
        is_aimed: True if what it ends with belongs on the ladder.
        is_fine: True if that takes the place of the start.
        is_paced: True climbs over rules with a pace for each pipeline.
        temperature: to begin with, in largest activations.
        rung: of the ladder.
        n_moves: of annealing for each task.
        n_shifts: schedules to list with shifted starts, before annealing or in the place of it.
    """

    caps: tuple[int, ...]
    targets: tuple[int, ...]
    limit: int
    seed: int
    start: Words | None = None
    other: Words | None = None
    island: int | None = None
    known: Words | None = None
    is_short: bool = False
    effort: int = 0
    enough: int = 0
    is_paced: bool = False
    is_aimed: bool = False
    is_fine: bool = False
    temperature: float = 1.0
    rung: int = 0
    n_moves: int = 0
    n_shifts: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a probe found.

    Attributes:
        found: schedules, of the climb and of annealing.
        last: where annealing ended, or its start if that was better; or None.
        stretched: a schedule of the problem, if the probe was one with fewer micro-batches; or None.
        n_evaluations: list schedules that were made, and changes that were tried.
    """

    found: tuple[Found, ...]
    last: Annealed | None = None
    n_evaluations: int = 0
    stretched: Found | None = None


def carry_out(problem: Problem, probe: Probe, kernels: Kernels) -> Outcome:
    """Return the outcome of a probe."""
    if probe.is_short:
        return _stretched(problem, probe, kernels)
    if probe.n_shifts and not probe.n_moves:
        return _shifted(problem.with_caps(probe.caps), probe, kernels)
    if probe.start is not None:
        words = probe.start if probe.other is None else _crossed(problem, probe, probe.start, probe.other, kernels)
        return _annealed(problem, probe, words, kernels)
    capped = problem.with_caps(probe.caps)
    climb = Climb(capped, kernels, seed=probe.seed, is_paced=probe.is_paced)
    n_tasks = _FRESH_TASKS if probe.n_moves else _CLIMB_TASKS
    best = climb.run(min(_CLIMB_STEPS, max(8, n_tasks // problem.base[-1])), enough=probe.limit)
    if best is None or not probe.n_moves:
        return Outcome(() if best is None else (best,), None, climb.n_done)
    n_done, words = climb.n_done, best.words
    if probe.n_shifts:
        shifted = kernels.shifted(capped, words, enough=probe.limit, n_steps=probe.n_shifts, seed=probe.seed)
        n_done, words = n_done + shifted.n_listed, shifted.words
    outcome = _annealed(problem, probe, words, kernels)
    return replace(outcome, found=(best, *outcome.found), n_evaluations=n_done + outcome.n_evaluations)


def _stretched(problem: Problem, probe: Probe, kernels: Kernels) -> Outcome:
    """Carry out a probe with fewer micro-batches, and stretch the best of what it finds."""
    short = shortened(problem)
    assert short is not None
    outcome = carry_out(short, replace(probe, is_short=False), kernels)
    best = min(outcome.found, key=lambda found: found.cost, default=None)
    is_good = best is not None and best.latency == latency_bound(short) and best.peak < probe.enough
    own = best.words if best is not None and is_good else probe.known
    if own is None:
        return outcome
    words = stretched(problem, short, own, kernels.evaluated, effort=probe.effort, seed=probe.seed)
    longer = None if words is None else Found.of(problem, words)
    n_evaluations = outcome.n_evaluations + n_evaluated(probe.effort)
    return replace(outcome, n_evaluations=n_evaluations, stretched=longer)


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


def _crossed(problem: Problem, probe: Probe, first: Words, second: Words, kernels: Kernels) -> Words:
    """Return the best of some schedules that begin like one and end like another, and that are neither."""
    settings = _settings(problem, probe)
    latency = kernels.annealed(problem, first, settings).latency
    draw = Random(probe.seed)
    times = {draw.randrange(1, latency) for _ in range(_CUTS)} if latency > 1 else ()
    children = [words for words in crossed(problem, first, second, sorted(times)) if words not in (first, second)]
    ends = [kernels.annealed(problem, words, settings) for words in children]
    return min(ends, key=lambda end: _cost(end, settings)).words if ends else first


def _annealed(problem: Problem, probe: Probe, words: Words, kernels: Kernels) -> Outcome:
    """Anneal, and then once more, cold, so that the latency is kept at least."""
    unit, ratio = float(max(1, *problem.activation)), min(1.0, _COLD / probe.temperature)
    hot, steps = unit * probe.temperature, range(_TEMPERATURES)
    without = _settings(problem, probe)
    settings = replace(
        without,
        temperatures=tuple(hot * ratio ** (i / (_TEMPERATURES - 1)) for i in steps),
        n_moves=max(1, _n_changes(problem, probe.n_moves) // _TEMPERATURES),
    )
    before = kernels.annealed(problem, words, without)
    after = kernels.annealed(problem, words, settings)
    found, n_tried = [_found(problem, after)], after.n_tried
    if after.excess or after.latency > probe.limit:
        strict = replace(settings, weight=settings.weight * 100.0, temperatures=(hot * ratio,) * 2)
        end = kernels.annealed(problem, after.words, strict)
        found.append(_found(problem, end))
        n_tried += end.n_tried
    return Outcome(tuple(found), min(after, before, key=lambda end: _cost(end, settings)), n_tried)


def _settings(problem: Problem, probe: Probe) -> Settings:
    """Return the aims of a probe, for an annealing without changes."""
    return Settings(
        limit=probe.limit,
        targets=probe.targets,
        weight=cost_of_a_tick(problem),
        temperatures=(),
        n_moves=0,
        seed=probe.seed,
    )


def _found(problem: Problem, end: Annealed) -> Found:
    return Found(end.words, end.latency, max(peaks_of(problem, end.words)))


def _cost(end: Annealed, settings: Settings) -> float:
    return end.excess + settings.weight * max(0, end.latency - settings.limit)


def _n_changes(problem: Problem, n_moves: int) -> int:
    """Return the changes of an annealing with so many for each task."""
    return min(_MOST, n_moves * problem.base[-1])


class Search:
    """A search that goes on in rounds.

    Attributes:
        best: the best schedule so far.
        bound: ticks that no schedule's latency can go below.
        peak: units of memory below which peaks are looked for, even if the best schedule has less.
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
        self._shift_caps: tuple[int, ...] = ()
        self._shifted: list[Found] = []  # under these caps
        short = shortened(problem)
        self._inner = None if short is None else Search(short, seed=seed)
        self._n_inner, self._effort, self.peak = _INNER, 1, 0
        self._ends_far = False  # what was stretched last, so that better schedules to stretch are of little use
        self._shifts_lead = short is not None  # half of the probes list with shifted starts
        self._ladder = Ladder(problem, self.bound, problem.caps)
        self._island = Island(problem, self.bound, problem.caps)
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
        if self._inner is not None and self._is_inner_round(self._inner):
            return self._short_probes(self._inner)
        probes: list[Probe] = []
        work: list[int] = []
        least = _CROSSING_PROBES if self._is_near else N_PROBES
        while len(probes) < least or (sum(work) < _SPREAD * max(work) and len(probes) < _MOST_PROBES):
            probes.append(self._probe(len(probes)))
            work.append(self._work(probes[-1]))
        self._n_annealed += any(probe.n_moves for probe in probes)
        longest_first = sorted(zip(work, range(len(probes)), strict=True), key=lambda pair: (-pair[0], pair[1]))
        return tuple(probes[number] for _, number in longest_first)

    def _short_probes(self, inner: Search) -> tuple[Probe, ...]:
        """Return a round of the search with fewer micro-batches, for peaks below that of the best schedule.

        The best that it knows is stretched once more.
        """
        inner.peak = enough = self.best.peak if self.best.latency == self.bound else UNLIMITED
        first, *others = (replace(probe, is_short=True, effort=self._effort, enough=enough) for probe in inner.probes())
        is_ahead = inner.best.latency == inner.bound and inner.best.peak < enough
        return replace(first, known=inner.best.words if is_ahead else None), *others

    def _is_inner_round(self, inner: Search) -> bool:
        is_late = self.best.latency > self.bound and self._n_rounds <= _LATENCY_ROUNDS
        is_level = inner.best.latency == inner.bound and inner.best.peak <= self.best.peak and not self._ends_far
        return not inner.is_done and not is_late and self._n_rounds % 4 < (_INNER_LEADS if is_level else self._n_inner)

    def take(self, probes: Sequence[Probe], outcomes: Iterable[Outcome]) -> None:
        """Learn from the outcomes of a round, in the order of its probes."""
        if self._inner is not None and probes[0].is_short:
            self._take_short(self._inner, probes, [*outcomes])
            return
        for probe, outcome in zip(probes, outcomes, strict=True):
            before = self.best
            for found in outcome.found:
                self._note(found)
            if self.best is not before and self._inner is not None:  # what has lowered the peak gets more time
                self._shifts_lead = probe.n_shifts > 0 and not probe.n_moves
                self._n_inner = _INNER if before.latency > self.bound else _INNER_TRAILS
            self.n_evaluations += outcome.n_evaluations
            if probe.n_shifts and not probe.n_moves and probe.caps == self._shift_caps:
                shifted = (*self._shifted, *outcome.found[1:])
                self._shifted = sorted(shifted, key=lambda found: found.cost)[:_POOL]
            self._climb_up(probe, outcome)

    def _climb_up(self, probe: Probe, outcome: Outcome) -> None:
        """Put on the ladder or the island where annealing has ended, if it had their aims."""
        ladder, island, last = self._ladder, self._island, outcome.last
        if (probe.island, probe.limit, probe.targets) == (
            island.number,
            island.limit,
            island.targets,
        ) and last is not None:
            island.add(last.words, last.latency)
        if not probe.is_aimed or (probe.limit, probe.targets) != (ladder.limit, ladder.targets):
            return
        if outcome.last is not None:
            instead_of = probe.start if probe.is_fine else None
            ladder.add(probe.rung, outcome.last.words, outcome.last.latency, instead_of=instead_of)

    def _take_short(self, inner: Search, probes: Sequence[Probe], outcomes: Sequence[Outcome]) -> None:
        """Learn from a round of the search with fewer micro-batches."""
        inner.take([replace(probe, is_short=False) for probe in probes], outcomes)
        before = self.best
        for outcome in outcomes:
            self.n_evaluations += outcome.n_evaluations
            if outcome.stretched is not None:
                self._note(outcome.stretched)
        ends = [outcome.stretched.latency for outcome in outcomes if outcome.stretched is not None]
        if self.best is not before:
            self._n_inner = _INNER_LEADS
        elif ends and (min(ends) - self.bound) * len(self._problem.duration) <= _NEARLY * sum(self._problem.duration):
            self._effort, self._ends_far = min(_MOST_EFFORT, 2 * self._effort), False
        elif ends:
            self._effort, self._ends_far = max(1, self._effort // 2), True

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
        if self._is_near:
            return self._island_probe(seed)
        if number % 2 == 0 if self._shifts_lead else number == self._n_rounds % _SHIFT_ROUNDS == 0:
            return self._shift_probe(seed)
        return self._rung_probe(seed)

    @property
    def _is_near(self) -> bool:
        """True if the latency is the lowest and, with an inner search, the peak not far from that of 1F1B in series."""
        is_near = self._inner is None or self.best.peak <= int(_NEAR * self._serial)
        return is_near and self.best.latency == self.bound

    def _island_probe(self, seed: int) -> Probe:
        """Begin with a fresh start, anneal on from one, or cross two schedules."""
        draw, island = self._random, self._island
        island.aim(*self._next_aims())
        parents = island.parents(draw)
        probe = Probe(self._looser(), island.targets, island.limit, seed, island=island.number)
        if not parents:
            return self._fresh(probe)
        if len(parents) == 1:
            return replace(probe, start=parents[0], n_moves=_ON, temperature=draw.choice(_WARM))
        n_moves, temperature = draw.choice(_CROSSED), draw.choice(_AFTER)
        return replace(probe, start=parents[0], other=parents[1], n_moves=n_moves, temperature=temperature)

    def _fresh(self, probe: Probe) -> Probe:
        """Return a probe as one that climbs before it anneals."""
        draw = self._random
        n_shifts = draw.choice((0, max(8, min(_CLIMB_STEPS, _FRESH_TASKS // self._problem.base[-1]))))
        is_paced = draw.random() < 0.5
        temperature = draw.choice(_HOT)
        return replace(probe, n_moves=_MOVES, n_shifts=n_shifts, is_paced=is_paced, temperature=temperature)

    def _rung_probe(self, seed: int) -> Probe:
        """Anneal on from the better half of a rung, touch one of the best up, or begin with a fresh start."""
        draw, ladder = self._random, self._ladder
        ladder.aim(*self._next_aims())
        n_tasks = self._problem.base[-1]
        top = max(rung for rung in range(_RUNGS + 1) if rung <= _FINE_RUNG or _MOVES * n_tasks << rung <= _MOST)
        promoted = ladder.promoted(below=top)
        probe = Probe(self._looser(), ladder.targets, ladder.limit, seed, is_aimed=True)
        touched_up = [entry for entry in ladder.best() if entry[0] >= _FINE_RUNG]
        if promoted is None and touched_up and draw.random() < _FINE_SHARE:
            rung, words = draw.choice(touched_up)
            n_moves, temperature = _MOVES << _FINE_RUNG, draw.choice(_FINE)
            return replace(probe, start=words, is_fine=True, rung=rung, n_moves=n_moves, temperature=temperature)
        if promoted is None:
            return self._fresh(probe)
        rung, words = promoted[0] + 1, promoted[1]
        n_moves, temperature = _MOVES << rung, draw.choice(_WARM)
        return replace(probe, start=words, rung=rung, n_moves=n_moves, temperature=temperature)

    def _work(self, probe: Probe) -> int:
        """Return about how many changes of an annealing take as long as a probe."""
        n_moves, n_tasks = _n_changes(self._problem, probe.n_moves), self._problem.base[-1]
        if probe.start is None:  # a task takes about as long to list
            n_climbed = _FRESH_TASKS if probe.n_moves else _CLIMB_TASKS
            n_moves += min(_CLIMB_STEPS * n_tasks, n_climbed) + probe.n_shifts * n_tasks
        return n_moves

    def _shift_probe(self, seed: int) -> Probe:
        """List under the caps of a level below the best peak: from a new climb, or on from what this has led to."""
        is_lowest = self.best.latency <= self.bound
        level = self._level_below(_SHIFT_LEVELS) if is_lowest else UNLIMITED
        caps = self._caps_below(level)
        if caps != self._shift_caps:
            self._shift_caps, self._shifted = caps, []
        n_tasks = _SHIFT_TASKS << min(_SHIFT_DOUBLED, self._n_annealed)
        n_shifts = max(8, min(_SHIFT_STEPS, n_tasks // self._problem.base[-1]))
        probe = Probe(caps, caps, self.bound, seed, n_shifts=n_shifts)
        if len(self._shifted) < _POOL or self._n_rounds % 2:
            return probe
        start = self._shifted[min(self._random.randrange(len(self._shifted)) for _ in range(2))]
        return replace(probe, start=start.words)

    @property
    def _n_moves(self) -> int:
        """Changes for each task where a front is looked for: twice as many after every other round."""
        return _MOVES << min(_RUNGS, self._n_annealed // 2)

    def _next_aims(self) -> tuple[int, tuple[int, ...]]:
        """Return ticks and units to anneal to: a lower latency, or a lower peak once that is the bound."""
        best, caps = self.best, self._problem.caps
        if best.latency > self.bound:
            return self.bound + (best.latency - self.bound) // 2, caps
        return best.latency, tuple(min(cap, self._level_below()) for cap in caps)

    def _level_below(self, factors: Sequence[float] = _LEVELS) -> int:
        """Return units of a peak to aim at: a round part of that of 1F1B in series, or a little below the best."""
        peak, goal = max(self.best.peak, self.peak), self.least_peak
        levels = [int(factor * self._serial) for factor in factors]
        return next((each for each in levels if goal <= each < peak), peak - max(1, (peak - goal) // 4))

    def _caps_below(self, level: int) -> tuple[int, ...]:
        """Return caps of at most a level, but for devices on which there is no schedule then."""
        pairs = zip(self._problem.caps, _least_caps(self._problem), strict=True)
        return tuple(max(min(cap, level), least) for cap, least in pairs)

    def _looser(self) -> tuple[int, ...]:
        """Draw caps to climb under: those that hold or looser ones."""
        factor = self._random.choice(_LOOSER)
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

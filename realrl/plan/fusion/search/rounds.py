"""The search for a fused schedule as rounds of probes, which any number of processes may carry out.

    climb: rules of list scheduling ──► anneal: latency and memory at once ──► ladder, islands ──► best schedule
    a search with fewer micro-batches ──► its best schedules ──► stretch ────────────────────────────┘

First latency counts, then the highest peak. Probes climb under the caps that hold and under looser ones, where low
latencies are easier to find. Annealing starts from what was found, and aims at a latency and peaks a little below.
Schedules that it ends with are crossed, see `islands`. Where there are many micro-batches, some rounds are those of a
search with fewer, whose schedules are stretched; until the peak is not far from that of 1F1B in series, annealing goes
on from the best for longer and longer, see `ladder`, and some probes list with shifted starts under such peaks.

Invariants:
    - the probes of a round are a function of problem, seed, the schedules to begin with and the outcomes of the rounds
      before, so that a number of rounds has one outcome, however many processes there are;
    - the best schedule keeps the caps, and no round makes it worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random

from realrl.plan.fusion.bounds import latency_bound, memory_bound
from realrl.plan.fusion.listing import peaks_of
from realrl.plan.fusion.problem import UNLIMITED, Problem, Words
from realrl.plan.fusion.search.climb import Found, starts_of
from realrl.plan.fusion.search.islands import Island
from realrl.plan.fusion.search.ladder import Ladder
from realrl.plan.fusion.search.probes import CLIMB_STEPS, FRESH_TASKS, MOST_CHANGES, Outcome, Probe, work_of
from realrl.plan.fusion.search.stretch import Evaluate, n_evaluated, shortened, stretched

N_PROBES, _CROSSING_PROBES = 4, 8  # of a round, at least, and of one that crosses schedules
_MOST_PROBES = 64
_SPREAD = 2  # a round has as much work as so many of its longest probes
_SHIFT_ROUNDS = 3  # of so many, one has a probe that only lists with shifted starts:
_SHIFT_TASKS = 400_000  # tasks in the first round, and twice as many in each
_SHIFT_DOUBLED, _SHIFT_STEPS = 6, 50_000  # of some later ones; and schedules at most
_POOL = 4
_MOVES = 500  # of an annealing for each task, on the lowest rung
_RUNGS = 6  # above the lowest, at most
_ON = 1_000  # of an annealing on from a fresh start of an island
# of what is crossed, and temperatures, for so many tasks: with more tasks longer, and closer to the coolest
_CROSSED, _AFTER, _CROSSED_TASKS = (500, 1_000, 2_000), (0.1, 0.2, 0.3, 0.5), 512
_SHARE = 1 / 32  # of all changes so far: the most that annealing what is crossed has
# of four rounds, those with fewer micro-batches: at first, where they lead or are level, and where they trail
_INNER, _INNER_LEADS, _INNER_TRAILS = 2, 3, 1
_MOST_EFFORT, _NEARLY = 4, 4  # of stretching, doubled if this ends late by so many mean tasks at most, else halved
# temperatures to begin with, of a fresh start, of one that was annealed and of the best, in largest activations
_HOT, _WARM, _FINE = (0.7, 1.0, 1.4), (0.2, 0.35, 0.5, 0.7, 1.0), (0.1, 0.2, 0.3)
_FINE_RUNG, _FINE_SHARE = 3, 0.5  # from which on the best are touched up, and instead of how many fresh starts
_LOOSER = (1.0, 1.0625, 1.25, 1.5, 2.0, 4.0)  # caps to climb under, in peaks of 1F1B in series
_LEVELS = (1.25, 1.125, 1.0625, 1.0)  # peaks to aim at, in those of 1F1B in series, before ones a little below the best
_NEAR = _LEVELS[1]  # from which on schedules are crossed
_SHIFT_LEVELS = _LEVELS[-2:]  # of listing with shifted starts, which begins anew at each
_LATENCY_ROUNDS = 8  # in which all probes look for the lowest latency alone
_FRONT = 8  # caps that a front is looked for at


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
            work.append(work_of(self._problem, probes[-1]))
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

    def begin_with(self, problem: Problem, words: Words, evaluate: Evaluate) -> None:
        """Take a schedule of the problem, or one of the same with fewer micro-batches, which is stretched."""
        if problem.n_micro_batches != self._problem.n_micro_batches:
            if self._inner is not None and problem.n_micro_batches == self._inner._problem.n_micro_batches:
                self._inner.begin_with(problem, words, evaluate)
            longer = stretched(self._problem, problem, words, evaluate, effort=_MOST_EFFORT, seed=0)
            self.n_evaluations += n_evaluated(_MOST_EFFORT)
            if longer is None:
                return
            words = longer
        found = Found.of(self._problem, words)
        self._note(found)
        self._island.add(words, found.latency)

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

    def note_early(self, probe: Probe, outcome: Outcome) -> None:
        """Take what a probe has found before all of its round are done; the round can still be taken later."""
        longer = () if outcome.stretched is None else (outcome.stretched,)
        for found in longer if probe.is_short else outcome.found:
            self._note(found)

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
        longer = max(1.0, (self._problem.base[-1] / _CROSSED_TASKS) ** 2)
        most = int(_SHARE * self.n_evaluations / self._problem.base[-1])
        n_moves = max(n_moves, min(int(longer * n_moves), most))
        temperature = _AFTER[0] + (temperature - _AFTER[0]) / longer
        return replace(probe, start=parents[0], other=parents[1], n_moves=n_moves, temperature=temperature)

    def _fresh(self, probe: Probe) -> Probe:
        """Return a probe as one that climbs before it anneals."""
        draw = self._random
        n_shifts = draw.choice((0, max(8, min(CLIMB_STEPS, FRESH_TASKS // self._problem.base[-1]))))
        is_paced = draw.random() < 0.5
        temperature = draw.choice(_HOT)
        return replace(probe, n_moves=_MOVES, n_shifts=n_shifts, is_paced=is_paced, temperature=temperature)

    def _rung_probe(self, seed: int) -> Probe:
        """Anneal on from the better half of a rung, touch one of the best up, or begin with a fresh start."""
        draw, ladder = self._random, self._ladder
        ladder.aim(*self._next_aims())
        n_tasks = self._problem.base[-1]
        top = max(rung for rung in range(_RUNGS + 1) if rung <= _FINE_RUNG or _MOVES * n_tasks << rung <= MOST_CHANGES)
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

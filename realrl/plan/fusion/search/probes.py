"""Probes, the pieces of the search for a fused schedule, of which each is a task of one process.

A probe lists schedules by rules (`climb`) or with shifted starts (`shifting`), anneals what that gives or what it was
given, or crosses two schedules and anneals the result. One with fewer micro-batches stretches what it finds.

Invariants:
    - a probe's outcome is a function of the problem and the probe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from realrl.plan.fusion.bounds import latency_bound
from realrl.plan.fusion.listing import peaks_of
from realrl.plan.fusion.problem import Problem, Words
from realrl.plan.fusion.search.annealing import Annealed, Settings
from realrl.plan.fusion.search.climb import Climb, Found, Kernels
from realrl.plan.fusion.search.ladder import cost_of_a_tick
from realrl.plan.fusion.search.stretch import n_evaluated, shortened, stretched

CLIMB_STEPS = 4_000  # rules that a climb tries at most
FRESH_TASKS = 50_000  # tasks that a climb schedules before annealing, and listing with shifted starts as many
MOST_CHANGES = 32_000_000  # of an annealing
_CLIMB_TASKS = 400_000  # tasks that a climb without annealing schedules, counting each as often as it is
_CUTS = 40  # times at which two schedules are crossed, of which annealing goes on from the best
_COLD = 0.06  # temperature to end with, in largest activations
_TEMPERATURES = 60


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
    """Schedules that a probe found.

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
    n_tasks = FRESH_TASKS if probe.n_moves else _CLIMB_TASKS
    best = climb.run(min(CLIMB_STEPS, max(8, n_tasks // problem.base[-1])), enough=probe.limit)
    if best is None or not probe.n_moves:
        return Outcome(() if best is None else (best,), None, climb.n_done)
    n_done, words = climb.n_done, best.words
    if probe.n_shifts:
        shifted = kernels.shifted(capped, words, enough=probe.limit, n_steps=probe.n_shifts, seed=probe.seed)
        n_done, words = n_done + shifted.n_listed, shifted.words
    outcome = _annealed(problem, probe, words, kernels)
    return replace(outcome, found=(best, *outcome.found), n_evaluations=n_done + outcome.n_evaluations)


def work_of(problem: Problem, probe: Probe) -> int:
    """Return about how many changes of an annealing take as long as a probe."""
    n_moves, n_tasks = _n_changes(problem, probe.n_moves), problem.base[-1]
    if probe.start is None:  # a task takes about as long to list
        n_climbed = FRESH_TASKS if probe.n_moves else _CLIMB_TASKS
        n_moves += min(CLIMB_STEPS * n_tasks, n_climbed) + probe.n_shifts * n_tasks
    return n_moves


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
    settings, draw = _settings(problem, probe), Random(probe.seed)
    latency = kernels.evaluated(problem, first)
    assert latency is not None, "the words are cyclic"
    times = {draw.randrange(1, latency) for _ in range(_CUTS)} if latency > 1 else ()
    return kernels.crossed(problem, first, second, sorted(times), settings) or first


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
    return Outcome(tuple(found), min(after, before, key=settings.cost_of), n_tried)


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


def _n_changes(problem: Problem, n_moves: int) -> int:
    """Return the changes of an annealing with so many for each task."""
    return min(MOST_CHANGES, n_moves * problem.base[-1])

"""The best plan for a run: comparators, the search, then the real scheduler, which decides among the best of them.

    prices of choices ──► methods: plans of other systems ──► search, which starts from them ──┐
                                                                                               ▼
                  the plan with the shortest period ◄── every plan under the real scheduler, the best first

The fast model ranks; the real scheduler has the last word. So no feasible comparator is better than the answer. Before
most prices are known, there is a plan already, with all calls on all devices.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, zip_longest

from realrl.errors import AllocationError, UsageError
from realrl.planner.crew import Asked, Crew
from realrl.planner.evaluate import Evaluated, confirmed
from realrl.planner.request import Request
from realrl.planner.settings import PlanSettings
from realrl.planner.shortage import least_plan
from realrl.planner.study import Alike, Study
from realrl.search.branch import Found, search
from realrl.search.fast import Price
from realrl.search.local.chains import Chain
from realrl.search.local.neighbours import neighbours
from realrl.search.local.walk import State
from realrl.search.methods import METHODS
from realrl.search.runners import Plan
from realrl.sim.report import Figures

SEARCH, ON_ALL_DEVICES, LEAST = "search", "all calls on all devices", "least memory"
_DEVICES_TIMES_EXPANDED, _LEAST_EXPANDED = (20_000, 14_000), 64  # on few devices and on more
_FEW_DEVICES = 32  # whose plans are simulated quickly
_WORTH_SIMULATING = 1.1, 1.3  # times the best period by the fast model, at first and at most
_SLOWEST = "hybridflow"  # of the methods, as a rule
_FURTHER = 8, 4  # plans of a round after the first few, which has twice as many, on few devices and on more,
_MOST_ROUNDS, _IMPROVED = 4, 0.999  # such rounds at most, and the share of a period that is worth another one
_TIMES_THE_ERROR, _LEAST_ERROR = 5.0, 0.01  # by which the fast model may exceed the real scheduler


@dataclass(frozen=True)
class Effort:
    """Limits of planning.

    Attributes:
        n_expanded: partial plans that the search completes by one call, as long as there is time, before it anneals;
            None for a number that falls with the size of the cluster.
        n_confirmed: plans of the search that are told about, besides those of methods. The real scheduler sees more, if
            these may be better.
        seconds: after which the search ends, whatever it has found; the plans found are confirmed after it.
        n_processes: that share the work; what is found does not depend on their number. A program that asks for
            several must do so below ``if __name__ == "__main__"``, as new processes import it.
    """

    n_expanded: int | None = None
    n_confirmed: int = 4
    seconds: float = 240.0
    n_processes: int = 1


@dataclass(frozen=True)
class Progress:
    """The state of planning.

    Attributes:
        phase: "prices", "methods", "search" or "scheduler".
        period_s: of the best plan so far by the fast model, or in the last phase by the real scheduler.
        bound_s: no plan has a shorter period by the fast model.
    """

    phase: str
    period_s: float = math.inf
    bound_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Planned:
    """The result of planning.

    Attributes:
        candidates: plans that fit, the one with the shortest period by the real scheduler first. Methods with one plan
            have one candidate, which has all of their names.
        refused: method -> why its plan is not among them.
        bound_s: no plan has a shorter period by the fast model.
        is_done: True if the search has looked at all plans.
    """

    request: Request
    candidates: tuple[Evaluated, ...]
    refused: Mapping[str, str]
    bound_s: float
    is_done: bool

    @property
    def best(self) -> Evaluated:
        return self.candidates[0]

    def named(self, name: str) -> Evaluated | None:
        """Return the plan of a method, which may be another one's as well; None if it does not fit."""
        return next((one for one in self.candidates if name in one.name.split(", ")), None)

    @property
    def gap(self) -> float:
        """Share by which the best plan's period may exceed the best possible one, both by the fast model."""
        return self.best.fast_s / self.bound_s - 1.0 if self.bound_s else math.inf

    @cached_property
    def rank_correlation(self) -> float | None:
        """Spearman's correlation of both models' periods over the candidates; None for fewer than three."""
        if len(self.candidates) < 3:
            return None
        return spearman([one.fast_s for one in self.candidates], [one.period_s for one in self.candidates])


class Planning:
    """A search that can be ended at any time.

    Args:
        request: what is asked for.
        seed: decides from which plans the search starts.
    """

    def __init__(self, request: Request, *, seed: int = 1, effort: Effort | None = None) -> None:
        self._request, self._seed, self._effort = request, seed, effort or Effort()
        self._study = Study(request, seed)
        self._first: Plan | None = None  # on all devices
        self._is_priced = False
        self._asked: dict[str, Asked] = {}  # settings -> what the real scheduler makes of them
        self._found: Found | None = None
        self._methods: dict[str, Plan] = {}
        self._refused: dict[str, str] = {}
        self._confirmed: dict[str, Evaluated] = {}
        self._began_s = time.monotonic()

    def run(self) -> Generator[Progress]:
        """Search, then let the real scheduler confirm; `result` may be asked for at any time.

        Raises:
            AllocationError: nothing fits the devices.
        """
        yield Progress("prices")
        crew = Crew(self._study, self._effort.n_processes)
        try:
            yield from self._search_and_confirm(crew)
        except AllocationError:
            if not self._take_least():
                raise
        finally:
            crew.close()

    def _search_and_confirm(self, crew: Crew) -> Iterator[Progress]:
        yield from self._price(crew)
        yield from self._place(crew)
        self._judge_methods(crew)
        n_devices = self._request.cluster.n_devices
        most = self._effort.n_expanded or max(
            _LEAST_EXPANDED, _DEVICES_TIMES_EXPANDED[self._study.problem.has_many_devices] // n_devices
        )
        starts = tuple(self._methods.values())
        anneal = partial(self._study.chains.annealed, chains=partial(self._chains, crew) if crew.has_helpers else None)
        for found in search(self._study.problem, seed=self._seed, starts=starts, n_expanded=most, anneal=anneal):
            self._found = found
            crew.go_on()
            yield self._progress("search")
            if self._seconds() > self._effort.seconds:
                break
        yield from self._confirm(crew)
        if not self._confirmed:
            self._take_least()

    def _chains(self, crew: Crew, chains: Sequence[Chain]) -> Iterator[Iterable[State]]:
        """Yield the states of chains: helpers make all but the first."""
        first, *others = chains
        asked = [crew.ask("anneal", chain) for chain in others]
        yield self._study.chains.states(first)
        yield from crew.answers(asked)

    def result(self, *, quickly: bool = False) -> Planned | None:
        """Return the best plan so far; None if there is none.

        Args:
            quickly: True to confirm one plan alone, where none was confirmed yet: the best one by the fast model.
        """
        if not self._confirmed and quickly:
            self._confirm_quickly()
        if not self._confirmed:
            return None
        ranked = sorted(self._confirmed.values(), key=lambda one: (one.period_s, one.fast_s, one.name))
        ranked = [*_numbered(ranked, self._effort.n_confirmed)]
        found = self._found
        bound_s, is_done = (0.0, False) if found is None else (found.bound, found.is_done)
        return Planned(self._request, tuple(ranked), dict(self._refused), bound_s, is_done)

    def _price(self, crew: Crew) -> Iterator[Progress]:
        """Price all choices, those of a plan on all devices first."""
        known = dict[Alike, list[list[Price]]]()
        questions = self._study.prices_to_ask
        asked = [crew.ask("price", question) for question in questions]
        self._first = self._study.on_all_devices()
        yield self._progress("prices")
        for question, prices in zip(questions, crew.answers(asked), strict=True):
            known[question] = prices
            yield self._progress("prices")
        self._study.learn(known)
        crew.tell("learn", known)
        self._is_priced = True

    def _take_least(self) -> bool:
        """Take the plan that needs the least memory, where the search has found none; return True if it fits.

        It has settings that the search leaves out, such as a micro-batch for each sample.
        """
        try:
            settings = least_plan(self._request)
            self._take(LEAST, settings, self._study.judge(settings))
        except UsageError as error:
            self._refused[LEAST] = error.message
        return bool(self._confirmed)

    def _place(self, crew: Crew) -> Iterator[Progress]:
        """Make the plans of all methods."""
        slowest_first = sorted(METHODS, key=lambda name: name != _SLOWEST)
        asked = {name: crew.ask("place", name) for name in slowest_first}
        for name, plan in zip(METHODS, crew.answers([asked[name] for name in METHODS]), strict=True):
            if isinstance(plan, str):
                self._refused[name] = plan
            else:
                self._methods[name] = plan
            yield self._progress("methods")

    def _judge_methods(self, crew: Crew) -> None:
        """Let helpers simulate plans of methods during the search, without those that will not be worth it."""
        periods = {name: self._study.draft.model.period(plan) for name, plan in self._methods.items()}
        for name in sorted(periods, key=lambda name: periods[name]):
            if periods[name] <= _WORTH_SIMULATING[0] * min(periods.values()):
                self._judge(crew, self._methods[name])

    def _judge(self, crew: Crew, plan: Plan) -> Asked:
        settings = self._request.settings_of(plan)
        key = _key(settings)
        if key not in self._asked:
            self._asked[key] = crew.ask("judge", settings)
        return self._asked[key]

    def _confirm(self, crew: Crew) -> Iterator[Progress]:
        """Let the real scheduler simulate the plans of the search and of methods, those with equal settings once."""
        found, request = self._found, self._request
        assert found is not None, "a search yields at least once"
        runners = [] if found.plan is None else [found.plan, *(plan for plan, _ in found.others)]
        possible = filter(self._study.draft.model.accepts, runners)
        named = {_name(i): plan for i, plan in enumerate(islice(possible, self._effort.n_confirmed))}
        plans, names = dict[str, Plan](), dict[str, list[str]]()
        for name, plan in {**named, **self._methods}.items():
            key = _key(request.settings_of(plan))
            plans[key] = plan
            names.setdefault(key, []).append(name)
        periods = {", ".join(names[key]): request.model.period(plan) for key, plan in plans.items()}
        is_small, left = request.cluster.n_devices <= _FEW_DEVICES, dict(zip(periods, plans.values(), strict=True))
        for most in [math.inf] if is_small else _WORTH_SIMULATING:
            limit = most * found.period
            if self._confirmed:  # plans that are not the best one, whatever the fast model errs by more than so far
                best = min(one.period_s for one in self._confirmed.values())
                error = max(1.0 - one.period_s / one.fast_s for one in self._confirmed.values())
                limit = min(limit, best / (1.0 - min(0.5, _TIMES_THE_ERROR * max(error, _LEAST_ERROR))))
            worth = {name: left.pop(name) for name in [*left] if periods[name] <= limit}
            asked = {name: self._judge(crew, plan) for name, plan in worth.items()}
            for (name, question), figures in zip(asked.items(), crew.answers([*asked.values()]), strict=True):
                self._take(name, question.about, figures)
                yield self._progress("scheduler")
        for name in left:
            self._refused[name] = f"{periods[name]:.4g} s by the fast model: too slow to be simulated"
        if found.plan is not None and self._confirmed:
            yield from self._confirm_further(crew, possible, plans)

    def _confirm_further(self, crew: Crew, waiting: Iterator[Plan], plans: dict[str, Plan]) -> Iterator[Progress]:
        """Let the real scheduler simulate more plans, while the fast model may be wrong about the best.

        Those are the best ones with other meshes, of which it may err by another share, and the search's next ones;
        then neighbours of the best plan and of the best by the fast model, as long as one is notably better. Plans that
        are equal by the fast model, of which a search has one alone, may differ by percents.

        Args:
            waiting: the search's next plans, best first.
            plans: simulated ones, by their keys.
        """
        request, model = self._request, self._study.draft.model
        best_s, n_rounds = math.inf, 0
        number = self._effort.n_confirmed
        n_plans = _FURTHER[request.cluster.n_devices > _FEW_DEVICES]
        assert self._found is not None, "what it has found was confirmed"
        likely = (plan for plan in self._found.apart if model.period(plan) < self._limit())
        waiting = chain(islice(filter(model.accepts, likely), n_plans), waiting)
        while n_rounds < _MOST_ROUNDS:
            limit = self._limit()
            worth, most = dict[str, Plan](), n_plans if n_rounds else 2 * n_plans
            for plan in waiting:
                key = _key(request.settings_of(plan))
                if request.model.period(plan) >= limit or len(worth) == most:
                    break
                if key not in plans:
                    worth[key] = plan
            plans.update(worth)
            asked = [self._judge(crew, plan) for plan in worth.values()]
            for question, figures in zip(asked, crew.answers(asked), strict=True):
                self._take(_name(number), question.about, figures)
                number += 1
                yield self._progress("scheduler")
            best = min(self._confirmed.values(), key=lambda one: one.period_s)
            if best.period_s >= best_s * _IMPROVED:
                return
            best_s, n_rounds = best.period_s, n_rounds + 1
            quickest = min(self._confirmed.values(), key=lambda one: (one.fast_s, one.period_s))
            ends = dict.fromkeys([_key(best.settings), _key(quickest.settings)])
            near = [neighbours(self._study.problem, plans[key], limit=self._limit()) for key in ends]
            in_turn = filter(None, chain.from_iterable(zip_longest(*near)))
            waiting = (plan for _, plan in in_turn if model.accepts(plan))

    def _limit(self) -> float:
        """Return the period by the fast model below which a plan may be the best by the real scheduler.

        The fast model exceeds the real scheduler by no more than for a plan that both know.
        """
        confirmed = self._confirmed.values()
        least = min(one.period_s / one.fast_s for one in confirmed)
        return min(one.period_s for one in confirmed) / least

    def _confirm_quickly(self) -> None:
        """Confirm the best plan so far; find one on all devices, if there is none."""
        plans = dict(self._methods)
        first = self._first if self._is_priced else self._first or self._study.on_all_devices()
        if not plans and first is not None:
            plans[ON_ALL_DEVICES] = first
        if self._found is None and self._is_priced:  # what is missing is a bound
            states = search(self._study.problem, seed=self._seed, starts=tuple(plans.values()))
            *_, self._found = islice(states, len(plans) or 1)
        if self._found is not None and self._found.plan is not None:
            plans = {SEARCH: self._found.plan, **plans}
        model = self._study.draft.model
        for name in sorted(plans, key=lambda name: model.period(plans[name])):
            settings = self._request.settings_of(plans[name])
            self._take(name, settings, self._study.judge(settings))
            if self._confirmed:
                return

    def _take(self, name: str, settings: PlanSettings, figures: Figures | str) -> None:
        """Note what the real scheduler makes of a plan."""
        if isinstance(figures, str):
            self._refused[name] = figures
        else:
            self._confirmed[name] = confirmed(self._request, settings, figures, name=name)

    def _progress(self, phase: str) -> Progress:
        found = self._found
        if found is None:
            return Progress(phase)
        period_s = min([one.period_s for one in self._confirmed.values()], default=found.period)
        return Progress(phase, period_s, found.bound)

    def _seconds(self) -> float:
        return time.monotonic() - self._began_s


def _name(number: int) -> str:
    """Return the name of a plan of the search."""
    return f"{SEARCH} {number + 1}" if number else SEARCH


def _numbered(ranked: Iterable[Evaluated], n_searched: int) -> Iterator[Evaluated]:
    """Yield plans with those of the search numbered in this order, without the last ones that no method has as well."""
    number = 0
    for one in ranked:
        searched, *methods = one.name.split(", ")
        if not searched.startswith(SEARCH):
            yield one
        elif number < n_searched or methods:
            yield replace(one, name=", ".join((_name(number), *methods)))
            number += 1


def _key(settings: PlanSettings) -> str:
    return json.dumps(settings.overrides(), sort_keys=True)


def spearman(first: list[float], second: list[float]) -> float:
    """Return the correlation of ranks of two lists of equal length; equal values share their mean rank."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) - 1) / 2
    spread = [sum((x - mean) ** 2 for x in ranks) for ranks in (a, b)]
    if not all(spread):
        return 1.0 if spread[0] == spread[1] else 0.0
    return sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True)) / math.sqrt(spread[0] * spread[1])


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]

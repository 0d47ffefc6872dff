"""The best plan for a run: comparators, the search, then the real scheduler, which decides among the best of them.

    pose: choices and prices ──► methods: plans of other systems ──► search, which starts from them ──┐
                                                                                                      ▼
                        the plan with the shortest period ◄── every plan under the real scheduler, the best first

The fast model ranks; the real scheduler has the last word. So no feasible comparator is better than the answer.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from realrl.errors import AllocationError, UsageError
from realrl.plan.memory.connections import CUDA_CONTEXT
from realrl.planner.evaluate import Evaluated, evaluate, is_possible, why_not
from realrl.planner.request import Request
from realrl.planner.settings import PlanSettings
from realrl.planner.shortage import least_plan
from realrl.search.branch import Found, search
from realrl.search.fast import Placed
from realrl.search.methods import METHODS
from realrl.search.problem import Problem, pose

SEARCH, LEAST = "search", "least memory"
_DEVICES_TIMES_EXPANDED, _LEAST_EXPANDED = 20_000, 64
_FEW_DEVICES = 32  # whose plans are simulated quickly
_WORTH_SIMULATING = 1.3  # times the best period by the fast model: no plan beyond it can be the best one


@dataclass(frozen=True)
class Effort:
    """Limits of planning.

    Attributes:
        n_expanded: partial plans that the search completes by one call, as long as there is time; None for a number
            that falls with the size of the cluster.
        n_confirmed: plans of the search that the real scheduler sees, besides those of methods.
        seconds: after which the search ends, whatever it has found; the plans found are confirmed after it.
    """

    n_expanded: int | None = None
    n_confirmed: int = 4
    seconds: float = 240.0


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
        self._found: Found | None = None
        self._methods: dict[str, tuple[Placed, ...]] = {}
        self._refused: dict[str, str] = {}
        self._confirmed: dict[str, Evaluated] = {}
        self._began_s = time.monotonic()

    def run(self) -> Iterator[Progress]:
        """Search, then let the real scheduler confirm; `result` may be asked for at any time.

        Raises:
            AllocationError: nothing fits the devices.
        """
        yield Progress("prices")
        try:
            yield from self._search_and_confirm()
        except AllocationError:
            if not self._take_least():
                raise

    def _search_and_confirm(self) -> Iterator[Progress]:
        problem = problem_of(self._request)
        most = self._effort.n_expanded or max(
            _LEAST_EXPANDED, _DEVICES_TIMES_EXPANDED // self._request.cluster.n_devices
        )
        for name in METHODS:
            self._place(name, problem)
            yield self._progress("methods")
        for found in search(problem, seed=self._seed, starts=tuple(self._methods.values())):
            self._found = found
            yield self._progress("search")
            if found.n_expanded >= most or self._seconds() > self._effort.seconds:
                break
        yield from self._confirm()
        if not self._confirmed:
            self._take_least()

    def result(self, *, quickly: bool = False) -> Planned | None:
        """Return the best plan so far; None if there is none.

        Args:
            quickly: True to confirm one plan alone, where none was confirmed yet.
        """
        if not self._confirmed and quickly and self._found is not None and self._found.plan is not None:
            self._evaluate(SEARCH, self._request.settings_of(self._found.plan))
        if not self._confirmed:
            return None
        ranked = sorted(self._confirmed.values(), key=lambda one: (one.period_s, one.fast_s, one.name))
        found = self._found
        bound_s, is_done = (0.0, False) if found is None else (found.bound, found.is_done)
        return Planned(self._request, tuple(ranked), dict(self._refused), bound_s, is_done)

    def _take_least(self) -> bool:
        """Take the plan that needs the least memory, where the search has found none; return True if it fits.

        It has settings that the search leaves out, such as a micro-batch for each sample.
        """
        try:
            self._evaluate(LEAST, least_plan(self._request))
        except UsageError as error:
            self._refused[LEAST] = error.message
        return bool(self._confirmed)

    def _place(self, name: str, problem: Problem) -> None:
        try:
            self._methods[name] = METHODS[name].place(problem, self._seed)
        except AllocationError as error:
            self._refused[name] = error.message

    def _confirm(self) -> Iterator[Progress]:
        """Let the real scheduler simulate the plans of the search and of methods, those with equal settings once."""
        found, request = self._found, self._request
        assert found is not None, "a search yields at least once"
        runners = [] if found.plan is None else [found.plan, *(plan for plan, _ in found.others)]
        possible = islice((plan for plan in runners if is_possible(request, plan)), self._effort.n_confirmed)
        named = {SEARCH if not i else f"{SEARCH} {i + 1}": plan for i, plan in enumerate(possible)}
        plans, names = dict[str, tuple[Placed, ...]](), dict[str, list[str]]()
        for name, plan in {**named, **self._methods}.items():
            key = json.dumps(request.settings_of(plan).overrides(), sort_keys=True)
            plans[key] = plan
            names.setdefault(key, []).append(name)
        for key, plan in plans.items():
            name, fast_s = ", ".join(names[key]), request.model.period(plan)
            if request.cluster.n_devices > _FEW_DEVICES and fast_s > _WORTH_SIMULATING * found.period:
                self._refused[name] = f"{fast_s:.4g} s by the fast model: too slow to be simulated"
                continue
            self._evaluate(name, request.settings_of(plan))
            yield self._progress("scheduler")

    def _evaluate(self, name: str, settings: PlanSettings) -> None:
        try:
            reason = why_not(self._request, settings)  # in a hundredth of the time that its simulation takes
            if not reason:
                self._confirmed[name] = evaluate(self._request, settings, name=name)
        except UsageError as error:
            reason = error.message
        if reason:
            self._refused[name] = reason

    def _progress(self, phase: str) -> Progress:
        found = self._found
        if found is None:
            return Progress(phase)
        period_s = min([one.period_s for one in self._confirmed.values()], default=found.period)
        return Progress(phase, period_s, found.bound)

    def _seconds(self) -> float:
        return time.monotonic() - self._began_s


def problem_of(request: Request) -> Problem:
    """Return the search for the best plan.

    Raises:
        AllocationError: a call fits no mesh, or a pin is impossible.
    """
    always = 0 if request.on_cpu else request.config.cluster.device_rows_bytes + CUDA_CONTEXT
    return pose(
        request.workload,
        request.hardware,
        capacity=request.capacity - always,
        roles=request.spaces,
        pins=request.pins,
        kernels=request.kernels_alone,
        accepts=lambda placed: is_possible(request, placed),
    )


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

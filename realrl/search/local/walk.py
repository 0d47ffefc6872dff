"""Local search: from a plan to the best one that differs in a call, else in several calls that go together; and again.

    all calls on one mesh, on two, ... ──► one call: every choice, where other meshes begin or end ◄───────────┐
                                             │ none is better                     ▲ better              better │
                                             ▼                                    │                            │
                                           calls of a role, calls that share a mesh: all on another one        │
                                             │ none is better                                                  │
                                             ▼                                                                 │
                                           calls of a mesh side by side (`Parting`) ──► one call that frees memory

It proves nothing. Its plans let branches be left out early.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from heapq import merge
from operator import itemgetter

import numpy as np

from realrl.search.bound import Bounds
from realrl.search.local.fills import Fills, Values, alike
from realrl.search.local.parting import Parting
from realrl.search.local.scores import Scores
from realrl.search.local.spans import covered_by, is_legal, most_kept
from realrl.search.problem import Problem
from realrl.search.runners import Plan
from realrl.search.space import Choice, Placed, Span, mesh_sizes

Score = tuple[float, float]  # bytes that are lacking, seconds of a step
State = tuple[Plan | None, float]  # a plan that may fit and its period; None and infinity in between

_N_STARTS = 3  # given plans from which to walk
_N_MEASURES = 3
_MOST_TRIED = 60  # places and choices of one call that are evaluated, the most promising ones
_MOST_ASKED = 3  # plans of a step that are asked about, if better ones are not accepted
_MOST_HALVES = 64  # ways to divide the roles among two meshes
_MOST_SHAKEN = 3
_WORTH_PARTING = 1.03  # times the best period: of plans whose calls are parted
_MOST_PARTED = 5  # such plans from which a walk goes on
_MOST_LEAVING = 20_000  # evaluations in that; on many devices none, as chains find as much in less time
_LACKING = 1.0  # periods that a plan is worse by, if it lacks a whole device's memory
_TICK = 50  # evaluations between two reports


class Walk:
    """Local searches of one problem.

    Args:
        bounds: of the problem's choices.
        scores: of the problem's plans.
        seed: decides from which plans to start, after the first.

    Attributes:
        best: the best plan at which a walk has ended, and its period.
    """

    def __init__(self, problem: Problem, bounds: Bounds, scores: Scores, *, seed: int) -> None:
        self.n_evaluated = 0
        self.best: tuple[float, Plan | None] = math.inf, None
        self._model, self._fixed, homes = problem.model, problem.fixed, problem.model.flow.homes
        self._random, self._scores = random.Random(seed), scores
        self._calls, self._values = range(len(problem.choices)), Values(problem)
        self._choices = self._values.choices
        self._roles = problem.model.flow.roles
        ones = np.ones((len(homes), 1))  # of the work of a device, which is like a cycle that each call is between
        self._on, self._between = np.hstack([bounds.on, 0.0 * ones]), np.hstack([bounds.between, ones])
        self._fills = Fills(problem, self._values, float(bounds.weights[-1]))
        self._parting = Parting(problem, self._values, self._fills, self._random)
        self._plan: Plan = ()  # where a walk is
        self._score: Score = (math.inf, math.inf)
        self._least = math.inf  # period of plans that are accepted
        self._parted_before: set[Plan] = set()
        self._n_left = 0 if problem.has_many_devices else _MOST_LEAVING
        self._capacity = problem.model.capacity

    def run(self, n_walks: int, starts: Iterable[Plan] = ()) -> Iterator[State]:
        """Yield plans with their periods, and (None, inf) in between; those that no earlier one beats are accepted.

        Args:
            n_walks: beside those from `starts`.
        """
        known: list[tuple[float, Plan]] = []
        for plan in starts:
            lacking, period = self._score_of(plan)
            if not lacking and self._is_accepted(plan, period):
                known.append((period, plan))
                yield plan, period
        known = sorted(known, key=lambda one: one[0])[:_N_STARTS]
        for _, plan in reversed(known):
            yield from self._walk(plan)
        for number in range(n_walks):
            yield from self._walk(self._start(number))

    def again(self, best: Plan | None) -> Iterator[State]:
        """Yield what one more walk finds: from the best plan that is known, or from one like it where walks ended."""
        yield from self._walk(self._shaken(best) if best is None or best == self.best[1] else best)

    def _walk(self, start: Plan | None) -> Iterator[State]:
        """Go on from a plan until no step leads to a better one."""
        if start is None:
            return
        yield from self._begin(start)
        yield from self._descend()
        while self._is_worth_parting() and (yield from self._leave()):
            pass
        if not self._score[0] and self._score[1] < self.best[0]:
            self.best = self._score[1], self._plan

    def _begin(self, plan: Plan) -> Iterator[State]:
        """Go to a plan, whose neighbours are all better if it is not accepted."""
        self._plan, self._score = plan, self._score_of(plan)
        if not self._score[0]:
            if self._may_be(plan, self._score):
                yield plan, self._score[1]
            else:
                self._score = self._score_of(plan)  # by what is known now
                if not self._score[0]:
                    self._score = 0.0, math.inf

    def _descend(self) -> Iterator[State]:
        is_moving = True
        while is_moving:
            is_moving = False
            for call in self._random.sample(self._calls, len(self._calls)):
                is_moving |= yield from self._step(self._changed(call))
            if not is_moving:
                is_moving = yield from self._step(self._regrouped())

    def _is_worth_parting(self) -> bool:
        """Return True, once for a plan, if it is about as good as the best one."""
        is_good = (
            self._n_left > 0
            and not self._score[0]
            and self._score[1] <= _WORTH_PARTING * min(self.best[0], self._least)
        )
        is_new = is_good and self._plan not in self._parted_before
        self._parted_before.add(self._plan)
        return is_new

    def _leave(self) -> Generator[State, None, bool]:
        """Go on from the best plans in which calls of a mesh are apart; return False, and stay, if none is better."""
        plan, score, begun = self._plan, self._score, self.n_evaluated
        for _, other in self._best_parted():
            if self.n_evaluated - begun > self._n_left:
                break
            yield from self._begin(other)
            if self._score[0]:
                yield from self._step(self._repaired())
            yield from self._descend()
            if self._score < score:
                break
        self._n_left -= self.n_evaluated - begun
        if self._score < score:
            return True
        self._plan, self._score = plan, score
        return False

    def _best_parted(self) -> list[tuple[float, Plan]]:
        """Return plans with parted calls that would be better if they had the memory, the most promising ones first."""
        found: dict[Plan, float] = {}
        limit = self._score[1]
        for plan in self._parting.plans(self._plan):
            if plan not in found:
                self.n_evaluated += 1
                period = self._scores.period(plan, limit=limit)
                if period < limit:
                    lacking = max(0.0, self._scores.likely(plan) / self._capacity - 1.0)
                    found[plan] = period * (1.0 + _LACKING * lacking)
        return sorted(((period, plan) for plan, period in found.items()), key=lambda one: one[0])[:_MOST_PARTED]

    def _repaired(self) -> Iterator[tuple[Score, Plan]]:
        """Yield plans that differ in one call, whichever it is, as `_changed` does."""
        return merge(*map(self._changed, self._calls), key=itemgetter(0))

    def _step(self, plans: Iterable[tuple[Score, Plan]]) -> Generator[State, None, bool]:
        """Go to the best of some plans, given with scores that they cannot beat; return False if none is better.

        Plans end with the first one whose score cannot be good enough.
        """
        better: list[tuple[Score, int, Plan]] = []
        for number, (least, plan) in enumerate(plans):
            limit = better[0][0] if len(better) == _MOST_ASKED else self._score
            if least >= limit:
                break
            score = self._score_of(plan, limit)
            if score < limit:
                better = sorted([*better, (score, number, plan)], reverse=True)[-_MOST_ASKED:]
            if self.n_evaluated % _TICK == 0:
                yield None, math.inf
        while better and not (better[-1][0][0] or self._may_be(better[-1][2], better[-1][0])):
            better.pop()
        if better:
            self._score, _, self._plan = better[-1]
            if not self._score[0]:
                yield self._plan, self._score[1]
        return bool(better)

    def _may_be(self, plan: Plan, score: Score) -> bool:
        """Return True if a plan is accepted, or was not asked about, since a better one is known."""
        return score[1] > self._least or self._is_accepted(plan, score[1])

    def _is_accepted(self, plan: Plan, period: float) -> bool:
        is_accepted = self._scores.is_accepted(plan)
        if is_accepted:
            self._least = min(self._least, period)
        return is_accepted

    def _score_of(self, plan: Plan, against: Score = (math.inf, math.inf)) -> Score:
        """Return the score of a plan, or one that it cannot beat and that is not below `against`."""
        self.n_evaluated += 1
        lacking = self._scores.likely(plan, self._capacity + against[0]) - self._capacity
        if lacking > 0:
            return lacking, 0.0
        return 0.0, self._scores.period(plan, limit=math.inf if against[0] else against[1])

    # ------------------------------------------------------------ one call

    def _changed(self, call: int) -> Iterator[tuple[Score, Plan]]:
        """Yield plans that differ in one call with scores that they cannot beat, the most promising ones first."""
        plan, choices = self._plan, self._choices[call]
        for lacking, period, number, span in sorted(self._promising(call))[:_MOST_TRIED]:
            yield (lacking, period), (*plan[:call], Placed(span, choices[number]), *plan[call + 1 :])

    def _promising(self, call: int) -> list[tuple[float, float, int, Span]]:
        """Return the least score, choice and place of a call where it may be better; without moves."""
        values, others = self._values, [other for other in self._calls if other != call]
        spans = [self._plan[other].span for other in others]
        seconds, kept, used = values.of(self._plan, others)
        around, between = seconds @ self._on[others], self._between[others]
        own_on, own_between, capacity = self._on[call], self._between[call], self._capacity - self._uncounted()
        found: list[tuple[float, float, int, Span]] = []
        for size, numbers in values.of_size[call].items():
            own_s, own_kept, own_used = (x[call][numbers] for x in (values.seconds, values.kept, values.used))
            for span in self._places(spans, call, size):
                covers, inside = covered_by(spans, span)
                work = (covers * seconds) @ between  # [segments, cycles]
                beside = np.vstack([work[: inside.start], work[inside.stop :]]).max(axis=0, initial=0.0)
                most = np.maximum(beside, work[inside].max(axis=0) + own_s[:, None] * own_between)
                period = (around + own_s[:, None] * own_on + most).max(axis=1)
                level = covers @ kept
                needs = np.where(covers, level[:, None] + used, 0.0)  # [segments, others]
                need = level[inside].max() + own_kept + own_used
                need = np.maximum(need, needs[inside].max(initial=0.0) + own_kept * covers[inside].any())
                lacking = np.maximum(0.0, np.maximum(need, needs.max(initial=0.0)) - capacity)
                period[lacking > 0.0] = 0.0
                scores = zip(lacking.tolist(), period.tolist(), numbers, strict=True)
                found += [(*score, number, span) for *score, number in scores if tuple(score) < self._score]
        return found

    def _uncounted(self) -> float:
        """Return the bytes of the plan that `_promising` does not count, if it lacks memory."""
        if not self._score[0]:
            return 0.0
        spans = [one.span for one in self._plan]
        _, kept, used = self._values.of(self._plan, self._calls)
        covers, _ = covered_by(spans, spans[0])
        counted = (covers @ kept + np.where(covers, used, 0.0).max(axis=1)).max()
        return max(0.0, self._capacity + self._score[0] - float(counted))

    # ------------------------------------------------------------ several calls

    def _regrouped(self) -> Iterator[tuple[Score, Plan]]:
        """Yield plans in which the calls of a role, or those that share a mesh, are together on another one."""
        plan = self._plan
        groups = {*self._roles, *map(tuple, alike([one.span for one in plan]).values())}
        for group in sorted(groups):
            others = [call for call in self._calls if call not in group]
            if len(group) == 1 or not others or self._is_pinned(group):
                continue
            spans, kept = [plan[call].span for call in others], self._values.of(self._plan, others)[1]
            for size in mesh_sizes(self._model.cluster):
                for span in self._places(spans, group[0], size):
                    found = self._fills.placed(group, span, self._capacity - most_kept(spans, kept, span))
                    if found is not None and all(self._is_legal(one.span, spans) for one in found.values()):
                        yield (0.0, 0.0), tuple([found.get(call, plan[call]) for call in self._calls])

    # ------------------------------------------------------------ places

    def _places(self, others: Sequence[Span], call: int, size: int) -> list[Span]:
        """Return places of a mesh that begin or end where another one does, or with the cluster."""
        if call in self._fixed:
            starts = {self._fixed[call]}
        else:
            bounds = {0, self._model.cluster.n_devices, *(bound for span in others for bound in span)}
            starts = {start for bound in bounds for start in (bound, bound - size)}
        return [span for start in sorted(starts) if self._is_legal(span := (start, start + size), others)]

    def _is_legal(self, span: Span, others: Sequence[Span]) -> bool:
        return is_legal(span, others, self._model.cluster)

    def _is_pinned(self, calls: Iterable[int]) -> bool:
        return any(call in self._fixed for call in calls)

    # ------------------------------------------------------------ starts

    def _start(self, number: int) -> Plan | None:
        """Return the plan from which a walk starts; None if there is none."""
        if number < 2 and not self._is_pinned(self._calls):
            return self._on_two_meshes() if number else self._on_one_mesh()
        return self._spread(number) if number < _N_MEASURES else self._shaken(self.best[1])

    def _on_one_mesh(self) -> Plan | None:
        found = self._fills.placed(self._calls, (0, self._model.cluster.n_devices), self._capacity)
        return self._spread(0) if found is None else tuple([found[call] for call in self._calls])

    def _on_two_meshes(self) -> Plan | None:
        """Return the best plan with some roles on one mesh, and all others beside it."""
        n_devices, sizes = self._model.cluster.n_devices, mesh_sizes(self._model.cluster)
        halves: Sequence[int] = range(1, 2 ** (len(self._roles) - 1))
        if len(halves) > _MOST_HALVES:
            halves = self._random.sample(halves, _MOST_HALVES)
        plans: list[tuple[float, int, int, Plan]] = []
        for half in halves:
            first = [c for bit, role in enumerate(self._roles) if half >> bit & 1 for c in role]
            rest = [call for call in self._calls if call not in first]
            for size in sizes[:-1]:
                end = max((other for other in sizes if other <= n_devices - size), default=0)
                meshes = [(first, (n_devices - size, n_devices)), (rest, (0, end))]
                found = [self._fills.placed(calls, span, self._capacity) for calls, span in meshes if span[0] < span[1]]
                if len(found) < 2 or found[0] is None or found[1] is None or not self._is_legal(meshes[0][1], ()):
                    continue
                places = {**found[0], **found[1]}
                plan = tuple([places[call] for call in self._calls])
                slowest = max(
                    sum(self._model.least(c, one.choice) for c, one in some.items()) for some in found if some
                )
                plans.append((slowest, half, size, plan))
        best: tuple[Score, Plan | None] = (math.inf, math.inf), None
        for least, _, _, plan in sorted(plans, key=lambda one: one[:3]):
            if (0.0, least) >= best[0]:
                break
            best = min(best, (self._score_of(plan, best[0]), plan), key=lambda one: one[0])
        return best[1]

    def _spread(self, number: int) -> Plan | None:
        """Return a plan of the best choices by one of three measures: bytes, seconds, device-seconds."""

        def measure(call: int, choice: Choice) -> float:
            price = self._model.price(call, choice)
            return (price.kept + price.used, price.seconds, price.seconds * choice.n_devices)[number]

        plan: list[Placed] = []
        for call in self._calls:
            best_first = sorted(self._choices[call], key=lambda c: (measure(call, c), c.order))
            placed = self._first([one.span for one in plan], call, best_first)
            if placed is None:
                return None
            plan.append(placed)
        return tuple(plan)

    def _shaken(self, best: Plan | None) -> Plan | None:
        """Return the best plan with the calls of a role, or a few, elsewhere; a random plan if there is none."""
        changed: Sequence[int] = self._calls
        if best is not None:
            few = self._random.sample(self._calls, self._random.randint(1, min(_MOST_SHAKEN, len(self._calls))))
            changed = self._random.choice([few, self._random.choice(self._roles)])
        plan = {} if best is None else {call: best[call] for call in self._calls if call not in changed}
        for call in changed:
            choices = self._random.sample(self._choices[call], len(self._choices[call]))
            placed = self._first([one.span for one in plan.values()], call, choices)
            if placed is None:
                return None
            plan[call] = placed
        return tuple([plan[call] for call in self._calls])

    def _first(self, others: Sequence[Span], call: int, choices: Sequence[Choice]) -> Placed | None:
        """Return the first choice that has a place beside other meshes, at a random one of its places."""
        for choice in choices:
            places = self._places(others, call, choice.n_devices)
            if places:
                return Placed(self._random.choice(places), choice)
        return None

"""Islands of annealed schedules, which are crossed in time for as long as better ones come.

    fresh starts ──► the better half, annealed on ──► two of all ──► crossed ──► annealed ──┐
                                                         ▲                                  │
                                                         └──── instead of those alike ◄─────┘
    the best of each island ──► an island of these ──► two of all ──► ...

A schedule that annealing ends with is late or too full in a few places, and good elsewhere. These places differ, so the
beginning of one schedule and the end of another are often both good, and annealing mends the middle: path relinking
and hybrid evolution do so in job shops (Peng, Lü and Cheng 2015, "A tabu search/path relinking algorithm to solve the
job shop scheduling problem"). Members that are alike would soon be all that there is, so the better one takes the
other one's place. An island ends when no better schedule has come for a while. Its best ones are crossed with those of
the islands before it, and then a new one begins from nothing.

Invariants:
    - of any two members, tasks are `_ALIKE` places apart on average, at least;
    - what is next is a function of what was added before, and of the random numbers drawn.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import numpy.typing as npt

from realrl.plan.fusion.listing import ends_of
from realrl.plan.fusion.problem import Problem, Words
from realrl.plan.fusion.search.ladder import cost_of

_LEAST_MEMBERS, _BY_TASKS = 16, 0.5  # of an island: at least, and in square roots of the number of tasks
_FRESH, _PATIENCE = 2, 2  # in members: fresh starts, and crossings without a better schedule that end an island
_CHAMPIONS = 3  # schedules that are left of an island
_ALIKE = 0.5  # places that a task is apart, on average


@dataclass(frozen=True, eq=False)
class Member:
    """Words with their latency in ticks, their cost under the aims of the island, and each task's place in its word."""

    words: Words
    latency: int
    cost: float
    places: npt.NDArray[np.int64]


class Island:
    """Schedules, and the aims that they are compared by.

    Attributes:
        limit: ticks that the latency shall have at most.
        targets: units of memory that each device shall hold at most.
        number: of islands that have ended.
        n_members: the best schedules that stay, at most.
        n_fresh: fresh starts.
        patience: crossings without a better schedule, after which an island ends.
    """

    def __init__(self, problem: Problem, limit: int, targets: Sequence[int]) -> None:
        self._problem, self.limit, self.targets = problem, limit, tuple(targets)
        self.n_members = max(_LEAST_MEMBERS, round(_BY_TASKS * math.sqrt(problem.base[-1])))
        self.n_fresh, self.patience = _FRESH * self.n_members, _PATIENCE * self.n_members
        self._members: list[Member] = []
        self._champions: list[Member] = []  # of islands before
        self.number = self._n_started = self._n_idle = 0
        self._is_of_champions = False
        self._to_anneal: list[Words] | None = None

    def _begin(self) -> None:
        """End the island, and begin one of the best schedules so far or from nothing, in turn."""
        is_first = not self.number
        self.number += 1
        self._champions = sorted(self._champions + self._members[:_CHAMPIONS], key=lambda member: member.cost)
        del self._champions[self.n_members :]
        self._is_of_champions = not self._is_of_champions and not is_first
        self._members = []
        self._n_idle, self._n_started, self._to_anneal = 0, 0, None
        if self._is_of_champions:
            self._n_started, self._to_anneal = self.n_fresh, []
            for member in self._champions:
                self._take(member)

    def parents(self, draw: Random) -> tuple[Words, ...]:
        """Return what to go on from: nothing for a fresh start, words to anneal, or two to be crossed."""
        if self._n_idle > self.patience:
            self._begin()
        if self._n_started < self.n_fresh:
            self._n_started += 1
            return ()
        if self._to_anneal is None:
            self._to_anneal = [member.words for member in self._members[: len(self._members) // 2]][::-1]
        if self._to_anneal:
            return (self._to_anneal.pop(),)
        self._n_idle += 1
        if len(self._members) < 2:
            return ()
        first, second = draw.sample(self._members, 2)
        return first.words, second.words

    def add(self, words: Words, latency: int) -> None:
        """Take what an annealing has ended with, unless a member is alike and better."""
        cost = cost_of(self._problem, words, latency, self.limit, self.targets)
        self._take(Member(words, latency, cost, _places(words)))

    def _take(self, new: Member) -> None:
        most = _ALIKE * len(new.places)
        is_alike = [int(np.abs(new.places - member.places).sum()) < most for member in self._members]
        pairs = [*zip(self._members, is_alike, strict=True)]
        if any(alike and member.cost < new.cost for member, alike in pairs):
            return
        if not self._members or new.cost < self._members[0].cost:
            self._n_idle = 0
        self._members = [member for member, alike in pairs if not alike]
        insort(self._members, new, key=lambda member: member.cost)
        del self._members[self.n_members :]

    def aim(self, limit: int, targets: Sequence[int]) -> None:
        """Change the aims: members stay, and crossings are counted anew."""
        if (limit, tuple(targets)) == (self.limit, self.targets):
            return
        self.limit, self.targets = limit, tuple(targets)
        self._champions = [self._aimed(member) for member in self._champions]
        members, self._members = self._members, []
        for member in members:
            self._take(self._aimed(member))
        self._n_idle = 0

    def _aimed(self, member: Member) -> Member:
        """Return a member with its cost under the aims that hold."""
        return replace(member, cost=cost_of(self._problem, member.words, member.latency, self.limit, self.targets))


def crossed(problem: Problem, first: Words, second: Words, times: Iterable[int]) -> Iterator[Words]:
    """Yield for each time the tasks that start before it in the first words, and then all others as in the second.

    Such words are acyclic if both are: nothing that starts before a time waits for what starts later.
    """
    ends = ends_of(problem, first)
    assert ends is not None, "the words are cyclic"
    starts = [[end - duration for end in own] for own, duration in zip(ends, problem.duration, strict=True)]
    for time in times:
        n_begun = [bisect_left(own, time) for own in starts]
        yield tuple([_joined(word, other, n_begun) for word, other in zip(first, second, strict=True)])


def _joined(word: Sequence[int], other: Sequence[int], n_begun: Sequence[int]) -> tuple[int, ...]:
    """Return a word whose first letters, so many of each, are those of one word, and whose others are another one's."""
    left, rest = list(n_begun), []
    for letter in other:
        if left[letter]:
            left[letter] -= 1
        else:
            rest.append(letter)
    return (*word[: len(word) - len(rest)], *rest)


def _places(words: Words) -> npt.NDArray[np.int64]:
    """Return each task's place in the word of each of its devices."""
    return np.concatenate([np.argsort(word, kind="stable") for word in words])

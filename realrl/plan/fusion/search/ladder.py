"""A ladder of annealings: many short ones, and longer and longer ones from the best of those.

    rung 0: fresh starts ──► the better half ──► rung 1: twice as many changes ──► the better half ──► rung 2 ...

The end of an annealing depends on its start: which model computes when is settled early, and no later change of
neighbours undoes it. So each rung gets about as much time as any other, and the one above goes on from the better
half of what it found, as in asynchronous successive halving (Li et al., MLSys 2020, "A system for massively parallel
hyperparameter tuning"). No rung waits until it is full: the ladder goes on for as long as there is time.

Invariants:
    - nothing is promoted twice under the same aims, and only what is in the better half of its rung;
    - what is next is a function of what was added before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realrl.plan.fusion.problem import Problem, Words
from realrl.plan.fusion.search.annealing import counted_excess, least_excess

_KEPT = 4  # of each rung, when aims change; and that are touched up


@dataclass
class Candidate:
    """Words with their latency in ticks, their cost under the aims of the ladder, and whether a rung above has them."""

    words: Words
    latency: int
    cost: float
    is_promoted: bool = False


class Ladder:
    """Candidates of each rung, and the aims that they are compared by.

    Attributes:
        limit: ticks that the latency shall have at most.
        targets: units of memory that each device shall hold at most.
    """

    def __init__(self, problem: Problem, limit: int, targets: Sequence[int]) -> None:
        self._problem, self.limit, self.targets = problem, limit, tuple(targets)
        self._rungs: list[list[Candidate]] = []

    def promoted(self, *, below: int) -> tuple[int, Words] | None:
        """Return words to go on from and their rung, the highest below one that has any; None: a fresh start is due."""
        for rung in reversed(range(min(below, len(self._rungs)))):
            own = self._rungs[rung]
            for candidate in own[: len(own) // 2]:
                if not candidate.is_promoted:
                    candidate.is_promoted = True
                    return rung, candidate.words
        return None

    def best(self) -> list[tuple[int, Words]]:
        """Return the best few candidates of all rungs with their rungs, no words twice."""
        found: list[tuple[int, Words]] = []
        by_cost = sorted(
            ((candidate.cost, -rung, candidate.words) for rung, own in enumerate(self._rungs) for candidate in own),
            key=lambda entry: entry[:2],
        )
        for _, rung, words in by_cost:
            if len(found) < _KEPT and all(words != other for _, other in found):
                found.append((-rung, words))
        return found

    def add(self, rung: int, words: Words, latency: int, *, instead_of: Words | None = None) -> None:
        """Take what an annealing of a rung has ended with, in the place of other words if they are still there."""
        while len(self._rungs) <= rung:
            self._rungs.append([])
        replaced = next((candidate for candidate in self._rungs[rung] if candidate.words == instead_of), None)
        if replaced is not None:
            self._rungs[rung].remove(replaced)
        self._rungs[rung].append(
            Candidate(words, latency, cost_of(self._problem, words, latency, self.limit, self.targets))
        )
        self._rungs[rung].sort(key=lambda candidate: candidate.cost)

    def aim(self, limit: int, targets: Sequence[int]) -> None:
        """Change the aims: the best few of each rung stay, and may be promoted once more."""
        if (limit, tuple(targets)) == (self.limit, self.targets):
            return
        self.limit, self.targets = limit, tuple(targets)
        kept = [own[:_KEPT] for own in self._rungs]
        self._rungs = []
        for rung, own in enumerate(kept):
            for candidate in own:
                self.add(rung, candidate.words, candidate.latency)


_LATENESS = 5.0  # cost of a delay by the mean time of a task, in largest activations


def cost_of(problem: Problem, words: Words, latency: int, limit: int, targets: Sequence[int]) -> float:
    """Return the cost of words under the aims of an annealing: their excess, and what ticks beyond the limit add."""
    return excess_of(problem, words, targets) + cost_of_a_tick(problem) * max(0, latency - limit)


def cost_of_a_tick(problem: Problem) -> float:
    """Return the units of memory that a tick beyond the limit costs as much as."""
    mean = sum(problem.duration) / len(problem.duration)
    return _LATENESS * max(1, *problem.activation) / mean


def excess_of(problem: Problem, words: Words, targets: Sequence[int]) -> int:
    """Return the excess of memory in units, as annealing counts it, over all places of all orders."""
    total, least = 0, least_excess(problem)
    for word, target in zip(words, targets, strict=True):
        held = 0
        for letter in word:
            held += problem.grows_by[letter]
            total += counted_excess(held, target, least)
    return total

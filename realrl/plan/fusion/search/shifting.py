"""Shorter schedules by listing again and again: tasks are as urgent as they were early, but for some that are shifted.

Listed forwards and backwards in turn, a schedule's tasks move together wherever a device is free, as forward-backward
improvement does in project scheduling (Tormos and Lova 2001, "A competitive heuristic solution technique for
resource-constrained project scheduling"). The starts of the tasks in a part of the schedule are shifted before, by one
number, at random, or both. What does not end later is kept, so many small changes add up.

Numbers are whole, and keys count half ticks, so that the compiled twin (`fusion.cpp`) does the same steps.

Invariants:
    - what is returned keeps the caps if the words given do, and does not end later.
"""

from __future__ import annotations

from typing import NamedTuple

from realrl.plan.fusion.listing import Rule, list_starts
from realrl.plan.fusion.problem import UNLIMITED, Problem, Words, flipped, mixed
from realrl.plan.fusion.search.annealing import Settings, State

_DRAWS = 12  # of a step


class Shifted(NamedTuple):
    """Result of a search: words, their latency, and the schedules that were listed."""

    words: Words
    latency: int
    n_listed: int


def shift(problem: Problem, words: Words, *, enough: int, n_steps: int, seed: int) -> Shifted:
    """Return the words after some steps, or after those in which the latency became low enough."""
    run = _Shifting(problem, words, seed)
    n_done = 0
    while n_done < n_steps and run.latency > enough:
        run.step(n_done)
        n_done += 1
    return Shifted(run.words, run.latency, n_done)


class _Shifting:
    def __init__(self, problem: Problem, words: Words, seed: int) -> None:
        settings = Settings(limit=0, targets=problem.caps, weight=0.0, temperatures=(), n_moves=0, seed=0)
        state = State(problem, words, settings)
        self._problem, self._seed = problem, seed
        self._letter, self._starts = state.letter, state.head
        self.words, self.latency = words, state.latency
        self._unit = max(1, sum(problem.duration) // len(problem.duration))

    def step(self, number: int) -> None:
        """List once, with the changes of a number."""
        choice, is_backwards = mixed(self._seed ^ 1, number), self._draw(number, 0, 2) == 1
        keys = self._keys(number)
        if is_backwards:
            keys = [2 * self.latency - keys[self._mirror(task)] for task in range(len(keys))]
        rule = Rule(
            weights=(),
            patience=(None, 0.0, float(self._unit), 4.0 * float(self._unit))[choice & 3],
            keys=tuple(keys),
            window=UNLIMITED if choice & 4 else self._unit << (2 + (choice >> 3) % 5),
            limit=self.latency,
        )
        problem = self._problem.reversed if is_backwards else self._problem
        listed = list_starts(problem, rule)
        if listed is None:
            return
        self.latency, words, starts = listed
        self.words = flipped(words) if is_backwards else words
        if is_backwards:
            ends = [start + problem.duration[letter] for start, letter in zip(starts, self._letter, strict=True)]
            starts = [self.latency - ends[self._mirror(task)] for task in range(len(ends))]
        self._starts = starts

    def _keys(self, number: int) -> list[int]:
        """Return twice the middle of each task, shifted where the changes of a number say so."""
        problem, unit = self._problem, self._unit
        first = self._draw(number, 1, 2 * self.latency + 1)
        last = first + (unit << (self._draw(number, 2, 7) + 2))
        pipeline, kind = self._draw(number, 3, problem.n_pipelines + 1), self._draw(number, 4, 3)
        place, start = self._draw(number, 5, 4), self._draw(number, 6, problem.n_devices)
        to = start + self._draw(number, 7, problem.n_devices)
        most = (unit << self._draw(number, 8, 7)) // 4
        by = self._draw(number, 9, 2 * most + 1) - most if place else 0
        noise = 0 if self._draw(number, 10, 2) else (unit << self._draw(number, 11, 5)) // 2
        grain, keys = mixed(self._seed ^ 2, number), []
        for task, letter in enumerate(self._letter):
            key, stage = 2 * self._starts[task] + problem.duration[letter], letter // 2
            is_chosen = pipeline in (problem.pipeline[stage], problem.n_pipelines) and kind in (2, letter % 2)
            if first <= key < last and is_chosen and (place == 1 or start <= problem.devices[stage][0] <= to):
                key += by
                if noise:
                    key += mixed(grain, task) % (2 * noise + 1) - noise
            keys.append(key)
        return keys

    def _draw(self, number: int, which: int, n: int) -> int:
        return mixed(self._seed, _DRAWS * number + which) % n

    def _mirror(self, task: int) -> int:
        """Return the task's number in the reversed problem."""
        letter, base = self._letter[task], self._problem.base
        return base[letter ^ 1] + base[letter + 1] - 1 - task

"""Annealing of latency and memory at once: neighbours of a device's order change places.

The head of a task is the length of the longest way to its start, its tail that of the longest way from its end. When x
and its next neighbour y change places, every way through them is as long as one of

    head'(y) + y + tail'(y),    head'(x) + x + tail'(x)

with heads and tails that follow from those of the tasks around them (Balas and Vazacopoulos 1998, "Guided local search
with shifting bottleneck for job shop scheduling"), so a few comparisons tell how late the change makes them. There can
be a second way from x to y, which the change would close to a circle, only if y cannot start before one of the other
tasks after x has ended; such changes are left out. Neighbours of one letter, or of which one feeds the other, are never
drawn.

A change has a cost: by how much more activations exceed each device's target, added up over all places of all orders
(see `least_excess`), and `weight` times the ticks by which the longest way through x and y exceeds the latency limit,
more than it did. Both may be exceeded on the way to a schedule that keeps both. A change that costs c is made with a
probability of about 2^-(c / temperature).

Floating point is computed in a fixed order, so that the compiled twin (`fusion.cpp`) does the same steps.

Invariants: the words stay those of an acyclic schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from realrl.plan.fusion.problem import Problem, Words, mixed

NONE = -1
_LUCK_BITS = 31


@dataclass(frozen=True)
class Settings:
    """Aims of an annealing.

    Attributes:
        limit: ticks that the latency shall have at most.
        targets: units of memory that each device shall hold at most.
        weight: units of cost of a tick.
        temperatures: in units of cost, one after the other.
        n_moves: changes that are tried at each temperature.
        seed: of the random choices.
    """

    limit: int
    targets: tuple[int, ...]
    weight: float
    temperatures: tuple[float, ...]
    n_moves: int
    seed: int

    def cost_of(self, end: Annealed) -> float:
        """Return units of cost of where an annealing has ended."""
        return end.excess + self.weight * max(0, end.latency - self.limit)


class Annealed(NamedTuple):
    """Result of an annealing: words, their latency, the excess of memory in units, and the changes tried."""

    words: Words
    latency: int
    excess: int
    n_tried: int


def least_excess(problem: Problem) -> int:
    """Return the units that any excess counts as at least: half of the largest activation.

    Where activations of models are almost alike, one in the place of another exceeds a target by next to nothing, and
    would stay there.
    """
    return max(problem.activation, default=0) // 2


def counted_excess(held: int, target: int, least: int) -> int:
    """Return what the units that a device holds count as above its target."""
    return max(held - target, least) if held > target else 0


def anneal(problem: Problem, words: Words, settings: Settings) -> Annealed:
    """Return where an annealing from an acyclic schedule ends; it ends early when limit and targets are kept."""
    state = State(problem, words, settings)
    n_tried = 0
    for temperature in settings.temperatures:
        for _ in range(settings.n_moves):
            if state.is_done:
                break
            state.move(n_tried, temperature)
            n_tried += 1
    return Annealed(state.words(), state.latency, state.energy, n_tried)


class State:
    """Orders as linked lists, with heads, tails and memory.

    Task m of letter l is number `base[l] + m`. A slot is a task on one of its devices.
    """

    def __init__(self, problem: Problem, words: Words, settings: Settings) -> None:
        self.problem, self.settings, self._least = problem, settings, least_excess(problem)
        n_tasks = problem.base[-1]
        self.letter = [0] * n_tasks
        self.first = [0] * (n_tasks + 1)  # slot of each task
        for letter in range(2 * problem.n_stages):
            for task in range(problem.base[letter], problem.base[letter + 1]):
                self.letter[task] = letter
                self.first[task + 1] = self.first[task] + len(problem.devices[letter // 2])
        n_slots = self.first[-1]
        self.task = [0] * n_slots
        self.device = [0] * n_slots
        for task in range(n_tasks):
            for k, device in enumerate(problem.devices[self.letter[task] // 2]):
                self.task[self.first[task] + k], self.device[self.first[task] + k] = task, device
        self.before, self.after = [NONE] * n_slots, [NONE] * n_slots
        self.held = [0] * n_slots
        self.start = [NONE] * problem.n_devices
        self._link(words)
        self.over: list[int] = []  # slots above their target
        self.over_at = [NONE] * n_slots
        self.open: list[int] = []  # slots whose task may change places with the next one
        self.open_at = [NONE] * n_slots
        self.energy = 0
        for slot in range(n_slots):
            self._set_held(slot, self.held[slot], is_new=True)
            self._set_open(slot)
        self.head, self.tail = [0] * n_tasks, [0] * n_tasks
        self._set_heads_and_tails()

    # ------------------------------------------------------------ one change

    def move(self, number: int, temperature: float) -> bool:
        """Try the change of a number; return True if it was made."""
        z = mixed(self.settings.seed, number)
        slots = self.over if z & 1 and self.over else self.open
        if not slots:
            return False
        slot = slots[((z >> 32) * len(slots)) >> 32]
        if self.after[slot] == NONE:
            return False
        x, y = self.task[slot], self.task[self.after[slot]]
        way = self._way_if_swapped(x, y)
        if way is None:
            return False
        before, limit = max(self._way(x), self._way(y)), self.settings.limit
        later = max(0, way - limit) - max(0, before - limit)
        cost = float(self._more_excess(x, y)) + self.settings.weight * float(later)
        if cost > 0 and cost > temperature * _luck(z):
            return False
        self._swap(x, y)
        return True

    @property
    def latency(self) -> int:
        """Ticks until the last task is done."""
        return max(head + self._duration(task) for task, head in enumerate(self.head))

    @property
    def is_done(self) -> bool:
        """True if latency and memory are what they shall be."""
        return not self.energy and self.latency <= self.settings.limit

    def _way(self, task: int) -> int:
        return self.head[task] + self._duration(task) + self.tail[task]

    def _way_if_swapped(self, x: int, y: int) -> int | None:
        """Return the longest way through neighbours after they have changed places; None if they cannot."""
        if self.letter[x] == self.letter[y] or x in self._feeds(y):
            return None
        shared = self._shared(x, y)
        if any(self.after[a] != b for a, b in shared):
            return None
        end = self.head[y]
        after_x = [task for task in (*self._fed(x), *self._neighbours(x, self.after)) if task != y]
        if any(end >= self.head[u] + self._duration(u) for u in after_x):
            return None
        own_x, own_y = [a for a, _ in shared], [b for _, b in shared]
        head_y = max(
            self._latest_end(self._feeds(y)),
            self._latest_end(self._neighbours(y, self.before, without=own_y)),
            self._latest_end(self._tasks(self.before[a] for a in own_x)),
        )
        head_x = max(
            head_y + self._duration(y),
            self._latest_end(self._feeds(x)),
            self._latest_end(self._neighbours(x, self.before, without=own_x)),
        )
        tail_x = max(
            self._longest_tail(self._fed(x)),
            self._longest_tail(self._neighbours(x, self.after, without=own_x)),
            self._longest_tail(self._tasks(self.after[b] for b in own_y)),
        )
        tail_y = max(
            tail_x + self._duration(x),
            self._longest_tail(self._fed(y)),
            self._longest_tail(self._neighbours(y, self.after, without=own_y)),
        )
        return max(head_y + self._duration(y) + tail_y, head_x + self._duration(x) + tail_x)

    def _more_excess(self, x: int, y: int) -> int:
        change = 0
        for a, b in self._shared(x, y):
            device = self.device[a]
            change += self._excess(device, self.held[b] - self._delta(x)) - self._excess(device, self.held[a])
        return change

    def _swap(self, x: int, y: int) -> None:
        heads, tails = [y, x], [x, y]  # and those around them, whose neighbours are others now
        for a, b in self._shared(x, y):
            p, n = self.before[a], self.after[b]
            heads += self._tasks((n,))
            tails += self._tasks((p,))
            self.before[b], self.after[b], self.before[a], self.after[a] = p, a, b, n
            if p == NONE:
                self.start[self.device[a]] = b
            else:
                self.after[p] = b
            if n != NONE:
                self.before[n] = a
            if p != NONE:
                self._set_open(p)
            self._set_open(a)
            self._set_open(b)
            total = self.held[b]
            self._set_held(b, total - self._delta(x))
            self._set_held(a, total)
        self._spread(heads, self.head, is_head=True)
        self._spread(tails, self.tail, is_head=False)

    # ------------------------------------------------------------ heads and tails

    def _spread(self, queue: list[int], values: list[int], *, is_head: bool) -> None:
        """Recompute heads or tails from some tasks on, in the order in which they are reached."""
        at = 0
        while at < len(queue):
            task = queue[at]
            at += 1
            if is_head:
                value = max(self._latest_end(self._feeds(task)), self._latest_end(self._neighbours(task, self.before)))
                onward = (*self._fed(task), *self._neighbours(task, self.after))
            else:
                value = max(self._longest_tail(self._fed(task)), self._longest_tail(self._neighbours(task, self.after)))
                onward = (*self._feeds(task), *self._neighbours(task, self.before))
            if value != values[task]:
                values[task] = value
                queue.extend(onward)

    def _set_heads_and_tails(self) -> None:
        everything = range(len(self.letter))
        n_open = [len(self._feeds(t)) + len(self._neighbours(t, self.before)) for t in everything]
        order = [task for task in everything if not n_open[task]]
        for task in order:
            self.head[task] = max(
                self._latest_end(self._feeds(task)), self._latest_end(self._neighbours(task, self.before))
            )
            for onward in (*self._fed(task), *self._neighbours(task, self.after)):
                n_open[onward] -= 1
                if not n_open[onward]:
                    order.append(onward)
        assert len(order) == len(self.letter), "the words are cyclic"
        for task in reversed(order):
            self.tail[task] = max(
                self._longest_tail(self._fed(task)), self._longest_tail(self._neighbours(task, self.after))
            )

    def _feeds(self, task: int) -> tuple[int, ...]:
        """Tasks of the pipeline that a task waits for."""
        problem, letter = self.problem, self.letter[task]
        m, stage = task - problem.base[letter], letter // 2
        if letter % 2:
            own = problem.base[letter - 1] + m
            return (own,) if problem.last[stage] else (own, problem.base[letter + 2] + m)
        return (problem.base[letter - 2] + m,) if problem.position[stage] else ()

    def _fed(self, task: int) -> tuple[int, ...]:
        """Tasks of the pipeline that wait for a task."""
        problem, letter = self.problem, self.letter[task]
        m, stage = task - problem.base[letter], letter // 2
        if letter % 2:
            return (problem.base[letter - 2] + m,) if problem.position[stage] else ()
        own = problem.base[letter + 1] + m
        return (own,) if problem.last[stage] else (own, problem.base[letter + 2] + m)

    def _neighbours(self, task: int, links: Sequence[int], without: Sequence[int] = ()) -> list[int]:
        slots = range(self.first[task], self.first[task + 1])
        return self._tasks(links[slot] for slot in slots if slot not in without)

    def _tasks(self, slots: Iterable[int]) -> list[int]:
        return [self.task[slot] for slot in slots if slot != NONE]

    def _latest_end(self, tasks: Sequence[int]) -> int:
        return max((self.head[task] + self._duration(task) for task in tasks), default=0)

    def _longest_tail(self, tasks: Sequence[int]) -> int:
        return max((self.tail[task] + self._duration(task) for task in tasks), default=0)

    def _duration(self, task: int) -> int:
        return self.problem.duration[self.letter[task]]

    # ------------------------------------------------------------ memory

    def _delta(self, task: int) -> int:
        return self.problem.grows_by[self.letter[task]]

    def _excess(self, device: int, held: int) -> int:
        return counted_excess(held, self.settings.targets[device], self._least)

    def _set_held(self, slot: int, held: int, *, is_new: bool = False) -> None:
        device = self.device[slot]
        if not is_new:
            self.energy -= self._excess(device, self.held[slot])
        self.held[slot] = held
        excess = self._excess(device, held)
        self.energy += excess
        _enter(slot, self.over, self.over_at, belongs=excess > 0)

    def _set_open(self, slot: int) -> None:
        """Enter a slot among those whose task may change places with the next one, or take it out."""
        after, x = self.after[slot], self.task[slot]
        is_open = False
        if after != NONE:
            y = self.task[after]
            is_open = self.letter[x] != self.letter[y] and x not in self._feeds(y)
        _enter(slot, self.open, self.open_at, belongs=is_open)

    # ------------------------------------------------------------ words

    def _shared(self, x: int, y: int) -> list[tuple[int, int]]:
        """Slots of two tasks on the devices that they share."""
        return [
            (a, b)
            for a in range(self.first[x], self.first[x + 1])
            for b in range(self.first[y], self.first[y + 1])
            if self.device[a] == self.device[b]
        ]

    def _link(self, words: Words) -> None:
        for device, word in enumerate(words):
            done = [0] * (2 * self.problem.n_stages)
            last, held = NONE, 0
            for letter in word:
                task = self.problem.base[letter] + done[letter]
                done[letter] += 1
                slot = self.first[task] + self.problem.devices[letter // 2].index(device)
                self.before[slot] = last
                if last == NONE:
                    self.start[device] = slot
                else:
                    self.after[last] = slot
                held += self._delta(task)
                self.held[slot] = held
                last = slot

    def words(self) -> Words:
        """Return the orders as words."""
        words = []
        for slot in self.start:
            word = []
            while slot != NONE:
                word.append(self.letter[self.task[slot]])
                slot = self.after[slot]
            words.append(tuple(word))
        return tuple(words)


def _enter(slot: int, slots: list[int], at_of: list[int], *, belongs: bool) -> None:
    """Put a slot at the end of a list if it belongs there, or let the last one take its place."""
    at = at_of[slot]
    if belongs and at == NONE:
        at_of[slot] = len(slots)
        slots.append(slot)
    elif not belongs and at != NONE:
        last = slots.pop()
        if last != slot:
            slots[at], at_of[last] = last, at
        at_of[slot] = NONE


def _luck(z: int) -> float:
    """Return about -log2 of a random number between 0 and 1, by straight lines between powers of 2."""
    bits = ((z >> 1) & ((1 << _LUCK_BITS) - 1)) | 1
    n_zeros = _LUCK_BITS - bits.bit_length()
    return float(n_zeros + 2) - float(bits << n_zeros) * 2.0 ** -(_LUCK_BITS - 1)

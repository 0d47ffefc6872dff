"""List scheduling: whenever a device is free, it starts the most urgent of its tasks that can start.

The urgency of a task of letter l and micro-batch m at time t is

    w0 + w1 path(l) + w2 m / M + w3 t / T + w4 in flight / stages + noise

with weights of its pipeline and kind, path(l) the time from l to the micro-batch's end, T the work of the busiest
device. Times are whole numbers; the rest is computed in double precision in a fixed order, so that the compiled twin
(`fusion.cpp`) decides equally, to the last bit.

A device also looks ahead at tasks whose last feed is being computed. It stays idle where one of them, at te, would come
before the chosen task's end, and is more urgent by more than patience (te - t) / duration of the chosen one.

A rule can also have a pace for each pipeline: its micro-batches enter the first stage no sooner than a piecewise linear
function of their numbers says. And it can have keys, one for each task, in the place of weights: the smaller a task's
key, the more urgent it is, and no device starts one whose key is far above those that it still has to start.

A device whose most urgent task waits for the other devices of its stage stays free for it; so some device always goes
on while tasks can start.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from realrl.plan.fusion.problem import UNLIMITED, Problem, Words, mixed

N_WEIGHTS = 5  # of a pipeline and kind
N_PIECES = 6  # of a pipeline's pace
NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Rule:
    """Rule that a list scheduler decides by.

    Attributes:
        weights: w0 to w4 of the first pipeline's forwards, of its backwards, of the second one's forwards, ...
        noise: size of the random part of the urgency.
        seed: of the random part.
        patience: see above; None: a device never waits while it can compute.
        quotas: of each stage, the most micro-batches in flight; one with 0 is left out. None: only memory limits them.
        paces: of each pipeline, when its micro-batches may enter, at the ends of all pieces, in the work of the busiest
            device; None: at once.
        keys: of each task; None: weights decide.
        window: how far above the smallest key of a device's other tasks that of a task may be when it starts.
        limit: ticks after which the schedule is given up.
    """

    weights: tuple[float, ...]
    noise: float = 0.0
    seed: int = 0
    patience: float | None = None
    quotas: tuple[int, ...] | None = None
    paces: tuple[float, ...] | None = None
    keys: tuple[int, ...] | None = None
    window: int = UNLIMITED
    limit: int = UNLIMITED


def noise_of(seed: int, task: int) -> float:
    """Return a number between 0 and 1 for a task."""
    return float(mixed(seed, task) >> 11) * 2.0**-53


def list_words(problem: Problem, rule: Rule) -> tuple[int, Words] | None:
    """Return latency in ticks and words of the list schedule of a rule; None where memory lets nothing go on."""
    listed = list_starts(problem, rule)
    return None if listed is None else listed[:2]


def list_starts(problem: Problem, rule: Rule) -> tuple[int, Words, list[int]] | None:
    """Return the same, and the ticks at which each task starts."""
    run = _Run(problem, rule)
    return None if run.latency is None else (run.latency, tuple(map(tuple, run.words)), run.starts)


class _Run:
    def __init__(self, problem: Problem, rule: Rule) -> None:
        self._problem, self._rule = problem, rule
        self.words: list[list[int]] = [[] for _ in range(problem.n_devices)]
        self._quotas = rule.quotas or (NO_LIMIT,) * problem.n_stages
        self._started = [0] * (2 * problem.n_stages)
        self._done = [0] * (2 * problem.n_stages)
        self._held = [0] * problem.n_devices
        self._is_free = [True] * problem.n_devices
        self._by_path = 1.0 / float(max(problem.path))
        self._by_work = 1.0 / float(problem.work)
        self._ends: list[tuple[int, int]] = []  # heap of (time, letter), or (time, -1 - stage) where one may enter
        self._ending = [0] * (2 * problem.n_stages)  # of the latest task of each letter
        self._entries = self._paced()  # ticks from which a stage may begin each micro-batch
        self.starts = [0] * problem.base[-1]
        self.latency = self._run()

    def _run(self) -> int | None:
        problem, time = self._problem, 0
        n_left = sum(
            2 * n * len(devices)
            for n, devices, quota in zip(problem.n_micro_batches, problem.devices, self._quotas, strict=True)
            if quota
        )
        dirty = set(range(problem.n_devices))
        while True:
            for device in sorted(dirty):
                n_left -= self._start_on(device, time)
            if not self._ends:
                return None if n_left else time
            time = self._ends[0][0]
            if time > self._rule.limit:
                return None
            dirty = set()
            while self._ends and self._ends[0][0] == time:
                letter = heapq.heappop(self._ends)[1]
                if letter < 0:
                    dirty.update(problem.devices[-1 - letter])
                    continue
                stage = letter // 2
                self._done[letter] += 1
                for device in problem.devices[stage]:
                    self._is_free[device] = True
                    if letter % 2:
                        self._held[device] -= problem.activation[stage]
                dirty.update(problem.devices[stage])
                if letter % 2 and problem.position[stage]:
                    dirty.update(problem.devices[stage - 1])
                elif not letter % 2 and not problem.last[stage]:
                    dirty.update(problem.devices[stage + 1])
                if problem.has_gangs:  # a stage on several devices may have waited for another one of them
                    dirty.update(range(problem.n_devices))

    def _paced(self) -> dict[int, list[int]]:
        problem, paces = self._problem, self._rule.paces
        if paces is None:
            return {}
        entries: dict[int, list[int]] = {}
        for stage, n in enumerate(problem.n_micro_batches):
            if problem.position[stage] or not self._quotas[stage]:
                continue
            at, entries[stage] = problem.pipeline[stage] * (N_PIECES + 1), []
            for m in range(n):
                x = float(m) / float(n) * float(N_PIECES)
                piece = min(N_PIECES - 1, int(x))
                begin, end = paces[at + piece], paces[at + piece + 1]
                entry = max(0, int((begin + (end - begin) * (x - float(piece))) * float(problem.work)))
                entries[stage].append(entry)
                if entry:
                    heapq.heappush(self._ends, (entry, -1 - stage))
        return entries

    def _start_on(self, device: int, time: int) -> int:
        """Start the most urgent task of a free device; return on how many devices."""
        if not self._is_free[device]:
            return 0
        best, most = -1, 0.0
        coming: list[tuple[int, int]] = []
        for letter in self._problem.letters_on[device]:
            arrival = self._arrival(letter, time)
            if arrival == time:
                urgency = self._urgency(letter, time)
                if best < 0 or urgency > most:
                    best, most = letter, urgency
            elif arrival > time:
                coming.append((letter, arrival))
        if best < 0 or not all(self._is_free[d] for d in self._problem.devices[best // 2]):
            return 0
        if self._ends and self._rule.keys is not None and -most > self._least_key(device) + float(self._rule.window):
            return 0
        patience, duration = self._rule.patience, self._problem.duration[best]
        if patience is not None:
            for letter, arrival in coming:
                if arrival - time < duration:
                    wait = patience * (float(arrival - time) / float(duration))
                    if self._urgency(letter, time) > most + wait:
                        return 0
        self.starts[self._problem.base[best] + self._started[best]] = time
        self._started[best] += 1
        for d in self._problem.devices[best // 2]:
            self._is_free[d] = False
            self.words[d].append(best)
            if not best % 2:
                self._held[d] += self._problem.activation[best // 2]
        self._ending[best] = time + duration
        heapq.heappush(self._ends, (time + duration, best))
        return len(self._problem.devices[best // 2])

    def _arrival(self, letter: int, time: int) -> int:
        """Return when a letter's next task can start: now, when what feeds it ends, or -1 if that is not known."""
        problem, stage, m = self._problem, letter // 2, self._started[letter]
        if m == problem.n_micro_batches[stage]:
            return -1
        if letter % 2:
            arrival = self._fed_at(letter - 1, m, time)
            if arrival < 0 or problem.last[stage]:
                return arrival
            other = self._fed_at(letter + 2, m, time)
            return other if other < 0 else max(arrival, other)
        if m - self._done[letter + 1] >= self._quotas[stage]:
            return -1
        activation = problem.activation[stage]
        if any(self._held[d] + activation > problem.caps[d] for d in problem.devices[stage]):
            return -1
        if problem.position[stage]:
            return self._fed_at(letter - 2, m, time)
        return max(time, self._entries[stage][m]) if self._entries else time

    def _fed_at(self, letter: int, m: int, time: int) -> int:
        if self._done[letter] > m:
            return time
        return self._ending[letter] if self._started[letter] > m else -1

    def _least_key(self, device: int) -> float:
        problem, keys = self._problem, self._rule.keys
        assert keys is not None
        return min(
            float(keys[problem.base[x] + self._started[x]])
            for x in problem.letters_on[device]
            if self._started[x] < problem.n_micro_batches[x // 2]
        )

    def _urgency(self, letter: int, time: int) -> float:
        problem, stage, m = self._problem, letter // 2, self._started[letter]
        if self._rule.keys is not None:
            return -float(self._rule.keys[problem.base[letter] + m])
        at = (2 * problem.pipeline[stage] + letter % 2) * N_WEIGHTS
        w = self._rule.weights
        n_in_flight = self._started[letter & ~1] - self._done[letter | 1]
        urgency = w[at] + w[at + 1] * (float(problem.path[letter]) * self._by_path)
        urgency = urgency + w[at + 2] * (float(m) / float(problem.n_micro_batches[stage]))
        urgency = urgency + w[at + 3] * (float(time) * self._by_work)
        urgency = urgency + w[at + 4] * (float(n_in_flight) / float(problem.n_stages))
        return urgency + self._rule.noise * noise_of(self._rule.seed, problem.base[letter] + m)


# ---------------------------------------------------------------- schedules that need no search


def backward_first(problem: Problem) -> tuple[float, ...]:
    """Return the weights of a rule that prefers backwards, and tasks with a long way to go."""
    return ((0.0, 1.0, -1.0, 0.0, 0.0) + (4.0, 1.0, -1.0, 0.0, 0.0)) * problem.n_pipelines


def greedy_words(problem: Problem) -> Words | None:
    """Return the words of fusing greedily: a device never waits while it can compute (Li and Hoefler, SC 2021,
    "Chimera", for two directions). None where the caps stop it."""
    listed = list_words(problem, Rule(backward_first(problem)))
    return None if listed is None else listed[1]


def serial_words(problem: Problem) -> Words:
    """Return the words of 1F1B, one pipeline after the other on each device.

    At most as many micro-batches are in flight at a stage as there are stages from it to the end, and fewer where the
    caps say so. Each stage keeps room of its own, so that none waits for memory of another.
    """
    words: list[list[int]] = [[] for _ in range(problem.n_devices)]
    for p in range(problem.n_pipelines):
        listed = list_words(problem, Rule(backward_first(problem), quotas=quotas_of(problem, p)))
        assert listed is not None
        for word, own in zip(words, listed[1], strict=True):
            word += [letter for letter in own if problem.pipeline[letter // 2] == p]
    return tuple(map(tuple, words))


def quotas_of(problem: Problem, pipeline: int) -> tuple[int, ...]:
    """Return the most micro-batches in flight of each stage of 1F1B of one pipeline alone; 0 for the other ones'."""
    own = [s for s in range(problem.n_stages) if problem.pipeline[s] == pipeline]
    quotas = [0] * problem.n_stages
    for stage in own:
        fitting = len(own) - problem.position[stage]
        for device in problem.devices[stage]:
            together = sum(problem.activation[s] for s in own if device in problem.devices[s])
            if together and problem.caps[device] < UNLIMITED:
                fitting = min(fitting, problem.caps[device] // together)
        quotas[stage] = max(1, fitting)
    return tuple(quotas)


def evaluate(problem: Problem, words: Words) -> int | None:
    """Return the latency in ticks of words; None if they are cyclic."""
    ends = ends_of(problem, words)
    return None if ends is None else max(own[-1] for own in ends)


def ends_of(problem: Problem, words: Words) -> list[list[int]] | None:
    """Return the ticks at which the tasks of each letter end, in their order; None if the words are cyclic."""
    ends: list[list[int]] = [[] for _ in range(2 * problem.n_stages)]
    at, free = [0] * problem.n_devices, [0] * problem.n_devices
    progress = True
    while progress:
        progress = False
        for device, word in enumerate(words):
            while at[device] < len(word):
                letter = word[at[device]]
                start = _start_of(problem, words, ends, at, letter)
                if start is None:
                    break
                devices = problem.devices[letter // 2]
                end = max(start, *(free[d] for d in devices)) + problem.duration[letter]
                ends[letter].append(end)
                for d in devices:
                    at[d], free[d] = at[d] + 1, end
                progress = True
    return ends if all(a == len(word) for a, word in zip(at, words, strict=True)) else None


def _start_of(
    problem: Problem, words: Words, ends: Sequence[Sequence[int]], at: Sequence[int], letter: int
) -> int | None:
    """Return when what feeds a letter's next task has ended; None while it or one of its devices is not there."""
    stage, m, needs = letter // 2, len(ends[letter]), []
    if letter % 2:
        needs = [letter - 1] if problem.last[stage] else [letter - 1, letter + 2]
    elif problem.position[stage]:
        needs = [letter - 2]
    if any(len(ends[need]) <= m for need in needs):
        return None
    if any(at[d] == len(words[d]) or words[d][at[d]] != letter for d in problem.devices[stage]):
        return None
    return max((ends[need][m] for need in needs), default=0)


def peaks_of(problem: Problem, words: Words) -> tuple[int, ...]:
    """Return the most units of memory of each device."""
    peaks = []
    for word in words:
        held = peak = 0
        for letter in word:
            held += problem.grows_by[letter]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)

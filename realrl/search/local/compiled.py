"""Scores and chains of annealing in C++: `annealing.cpp`, by ctypes, which asks for costs and bytes that it needs."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from realrl import compiler
from realrl.compiler import Library, UnavailableError
from realrl.files import cache_dir
from realrl.plan.memory.connections import CONNECTION, MESSAGE_CHANNELS, RING_CHANNELS
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.search.bound import undominated
from realrl.search.local.anneal import TICK, Kind
from realrl.search.local.scores import Scores
from realrl.search.local.walk import State
from realrl.search.memory.devices import Learned, seen_from, stretches
from realrl.search.memory.links import Links
from realrl.search.problem import Problem
from realrl.search.runners import MOST_APART, Plan
from realrl.search.space import RELATIONS, Choice, Placed

_LIBRARY = Library(
    "annealing",
    (Path(__file__).parent / "annealing.cpp",),
    compiler.AS_PYTHON,
    "the search for plans",
    "with one, it finds better plans",
)
_pointer, _long, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_FUNCTIONS = {
    "annealing_new": (_pointer, (_pointer, _pointer)),
    "annealing_free": (None, (_pointer,)),
    "annealing_begin": (None, (_pointer,) * 4),
    "annealing_go": (_long, (_pointer, _long, _pointer, _pointer)),
    "annealing_answer": (None, (_pointer, _long)),
    "annealing_lacks": (None, (_pointer, _pointer, _long, _long)),
    "annealing_give": (None, (_pointer, _long, _pointer, _pointer, _double)),
    "annealing_apart": (_long, (_pointer, _long, _pointer, _pointer)),
    "annealing_value": (_long, (_pointer, _pointer, _long, _double, _pointer, _pointer)),
}
_UNDER_WAY, _OVER, _BETTER, _ASKS_DEVICES, _ASKS_ARRIVING, _ASKS_MOVE, _ASKS_LINKS, _ASKS_ORDERED = range(8)
_MOST_CALLS = 20
_NONE = np.iinfo(np.int64).min
Longs = npt.NDArray[np.int64]


@cache
def load() -> ctypes.CDLL:
    """Return the library; the first call on a machine compiles it.

    Raises:
        UnavailableError: there is no compiler, or ``REALRL_KERNELS=0``.
    """
    return compiler.load(_LIBRARY, _FUNCTIONS, lambda: cache_dir() / "kernels")


def load_for(n_calls: int) -> ctypes.CDLL:
    """Return the library for plans of so many calls.

    Raises:
        UnavailableError: it takes fewer calls; or as `load`.
    """
    if n_calls > _MOST_CALLS:
        raise UnavailableError(f"it would take at most {_MOST_CALLS} calls, and there are {n_calls}")
    return load()


def why_not_compiled(n_calls: int) -> str:
    """Return the reason why plans of so many calls are searched in Python alone on this machine, or nothing."""
    try:
        load_for(n_calls)
    except UnavailableError as error:
        return str(error)
    return ""


def scores_of(problem: Problem) -> Scores:
    """Return the quickest scores that there are for a problem on this machine."""
    try:
        return CompiledScores(problem)
    except UnavailableError:
        return Scores(problem)


class CompiledScores(Scores):
    """Answers as those in Python, but for rounding; each asks Python for what it needs first.

    Raises:
        UnavailableError: there is no library, or it cannot take so many calls.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._library = load_for(len(problem.choices))
        self._choices: list[list[Choice]] = []
        self._n_proposed: list[int] = []
        for call, found in enumerate(problem.choices):
            own = dict.fromkeys(undominated(problem.model, call, found))
            self._n_proposed.append(len(own))
            self._choices.append([*(own | dict.fromkeys(found))])  # a plan may begin with one that is not proposed
        self._number = [{choice: i for i, choice in enumerate(own)} for own in self._choices]
        strategies = dict.fromkeys(choice.strategy for own in self._choices for choice in own)
        self._strategies, self._number_of = [*strategies], {one: i for i, one in enumerate(strategies)}
        longs, seconds = self._laid_out(problem)
        self._asked, self._found = np.zeros(2 * _MOST_CALLS, dtype=np.int64), np.zeros(1)
        self._own = self._library.annealing_new(longs.ctypes.data, seconds.ctypes.data)

    def __del__(self) -> None:
        if hasattr(self, "_own"):
            self._library.annealing_free(self._own)

    def period(self, plan: Plan, *, limit: float = math.inf) -> float:
        """Return the period of a plan, as `Model.period` does."""
        return self._value(plan, is_bytes=False, limit=limit)

    def likely(self, plan: Plan, limit: float = math.inf) -> int:
        """Return the bytes that the fullest device needs as far as is known, as `DeviceMemory.likely` does."""
        return int(self._value(plan, is_bytes=True, limit=limit))

    def is_accepted(self, plan: Plan) -> bool:
        """Return True if a plan is accepted; else learn why it is not."""
        n_known = len(self.learned.ordered)
        if super().is_accepted(plan):
            return True
        for (call, own, home), ordered in [*self.learned.ordered.items()][n_known:]:
            key = (call, own[0][0], self._number_of[own[1]], home[0][0], self._number_of[home[1]])
            self._give(_ASKS_LINKS, _longs(key), _flat(ordered.links))
        numbers = self._numbers(plan)
        for first, _, here in stretches(plan):
            self._library.annealing_lacks(self._own, numbers.ctypes.data, first, self.learned.lacking.get(here, 0))
        return False

    def _value(self, plan: Plan, *, is_bytes: bool, limit: float) -> float:
        numbers, code = self._numbers(plan), _UNDER_WAY
        while code != _OVER:
            code = self._library.annealing_value(
                self._own, numbers.ctypes.data, is_bytes, limit, self._asked.ctypes.data, self._found.ctypes.data
            )
            if code != _OVER:
                self._tell(code)
        return float(self._found[0])

    def _tell(self, code: int) -> None:
        """Answer what a chain has asked."""
        key = self._asked[:5].copy()
        call, *rest = key.tolist()
        if code == _ASKS_DEVICES:
            own = self._model.memory.on_devices(call, self._choices[call][rest[0]])
            begun = () if own.begun is None else own.begun
            self._give(code, key, np.concatenate([[own.begun is not None], own.kept, own.used, begun]))
        elif code == _ASKS_ARRIVING:
            source, is_gathered, number, first = rest
            target, start = self._choices[call][number], None if first == _NONE else first
            found = self._model.memory.arriving(call, self._strategies[source], bool(is_gathered), target, start)
            self._give(code, key, found)
        elif code == _ASKS_ORDERED:
            self._give(code, key, self._ordered(call, *rest))
        elif code == _ASKS_MOVE:
            target, one, other, where = rest
            layouts = self._strategies[one], self._strategies[other]
            moved = self._model.move_between(call, target, *layouts, RELATIONS[where])
            self._give(code, key, _longs(()), moved.seconds)
        else:
            first, strategy = rest[:2]
            self._give(code, key, _flat(self._model.memory.plain_links(call, self._strategies[strategy], first)))

    def _ordered(self, call: int, number: int, first: int, source_first: int, of_source: int) -> Matrix:
        """Return what a call takes whose parameters come, the order of its ranks being known.

        Args:
            of_source: twice the strategy with which the parameters live, and one more if they are gathered.
        """
        memory, target, source = self._model.memory, self._choices[call][number], self._strategies[of_source // 2]
        own = (first, first + target.n_devices), target.strategy
        home = (source_first, source_first + source.n_devices), source
        start, parts = seen_from(own[0], home[0]), self.learned.ordered[call, own, home].parts
        return memory.arriving(call, source, bool(of_source % 2), target, start, parts)

    def _give(self, code: int, key: Longs, values: npt.ArrayLike, seconds: float = 0.0) -> None:
        values = np.ascontiguousarray(values, dtype=np.int64)
        self._library.annealing_give(self._own, code, key.ctypes.data, values.ctypes.data, seconds)

    # ------------------------------------------------------------ layout

    def _numbers(self, plan: Plan) -> Longs:
        numbers = [(one.span[0], self._number[call][one.choice]) for call, one in enumerate(plan)]
        return _longs([*chain.from_iterable(numbers)])

    def _plan(self, numbers: Longs) -> Plan:
        pairs = numbers[: 2 * len(self._choices)].reshape(-1, 2).tolist()
        found = []
        for own, (first, number) in zip(self._choices, pairs, strict=True):
            found.append(Placed((first, first + own[number].n_devices), own[number]))
        return tuple(found)

    def _laid_out(self, problem: Problem) -> tuple[Longs, npt.NDArray[np.float64]]:
        """Return the numbers of a problem as annealing.cpp reads them."""
        model, flow = problem.model, problem.model.flow
        cluster, memory = model.cluster, model.memory
        rings, pairs = CONNECTION * RING_CHANNELS, CONNECTION * MESSAGE_CHANNELS
        longs = [len(flow.names), cluster.n_devices, cluster.n_devices_per_node, flow.ahead]
        longs += [memory.connects, memory.any_rows, rings, pairs]
        seconds = [model.capacity, model.alone]
        for call, own in enumerate(self._choices):
            readers = flow.readers[call] if flow.readers else ()
            longs += [flow.homes[call], memory.sources[call], problem.fixed.get(call, -1)]
            longs += [_bits(flow.followers[call]), _bits(readers), _bits(flow.before[call])]
            for found in (flow.waits[call], flow.leads[call]):
                longs += [len(found), *map(int, chain.from_iterable(found))]
            longs += [len(own), self._n_proposed[call]]
            for choice in own:
                strategy = choice.strategy
                n_split = strategy.dp if strategy.tp > 1 else 0
                longs += [choice.n_devices, self._number_of[strategy], choice.zero_stage == 3, n_split]
                seconds += [model.price(call, choice).seconds, model.least(call, choice)]
        longs.append(len(flow.moves))
        for move in flow.moves:
            longs += [move.owner, move.source, move.target, move.is_after]
        longs.append(len(flow.cycles))
        for cycle in flow.cycles:
            longs += [cycle.lag, _bits(cycle.calls), _bits(cycle.between)]
        longs += [len(flow.roles), *map(_bits, flow.roles)]
        return _longs(longs), np.array(seconds, dtype=np.float64)


class CompiledAnnealing(CompiledScores):
    """Chains of changes to plans of one problem, as `Annealing` makes them, with random numbers of their own.

    A chain knows what those before it have asked, but not what they have learned.
    """

    @property
    def n_choices(self) -> int:
        """Choices that are proposed."""
        return sum(self._n_proposed)

    def run(self, plan: Plan, kind: Kind, n_proposals: int, *, seed: str) -> Iterator[State]:
        """Yield plans that are better than those before and accepted, and (None, inf) after `TICK` proposals.

        At last come the best plans of the best arrangements of meshes: none is better than those before, and nobody
        was asked about them. A chain ends where another one begins.
        """
        self.learned, seed_of_chain = Learned(), random.Random(seed).getrandbits(63)
        settings, shares = _longs([n_proposals, seed_of_chain, kind.passes]), np.array(kind.shares)
        numbers = self._numbers(plan)
        self._library.annealing_begin(self._own, numbers.ctypes.data, settings.ctypes.data, shares.ctypes.data)
        code = _UNDER_WAY
        while code != _OVER:
            code = self._library.annealing_go(self._own, TICK, self._asked.ctypes.data, self._found.ctypes.data)
            if code == _UNDER_WAY:
                yield None, math.inf
            elif code == _BETTER:
                better, period = self._plan(self._asked), float(self._found[0])
                is_accepted = self.is_accepted(better)
                self._library.annealing_answer(self._own, is_accepted)
                if is_accepted:
                    yield better, period
            elif code != _OVER:
                self._tell(code)
        yield from self._apart()

    def _apart(self) -> Iterator[State]:
        plans, periods = np.zeros((MOST_APART, 2 * len(self._choices)), dtype=np.int64), np.zeros(MOST_APART)
        n = self._library.annealing_apart(self._own, MOST_APART, plans.ctypes.data, periods.ctypes.data)
        for plan, period in zip(plans[:n], periods[:n].tolist(), strict=True):
            yield self._plan(plan), period


def _bits(calls: Sequence[int] | frozenset[int]) -> int:
    return sum(1 << call for call in calls)


def _longs(numbers: Sequence[int]) -> Longs:
    return np.array(numbers, dtype=np.int64)


def _flat(links: Links) -> Longs:
    """Return connections as annealing.cpp reads them."""
    found = [len(links.rings)]
    for ring, first, end in links.rings:
        found += [*ring, first, end]
    found.append(len(links.messages))
    for ring, first, counts in links.messages:
        found += [*ring, first, first + len(counts), *counts.tolist()]
    peers = links.peers.astype(np.uint64).view(np.int64).tolist()
    return _longs([*found, links.first, len(peers), *peers])

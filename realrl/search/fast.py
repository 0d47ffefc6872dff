"""The period of a plan by a fast model: the calls of a few steps, started as the master starts them.

A call takes one time on all devices of its mesh. Parameters that it needs in another layout come before it, while the
devices of their home wait too: the master sends hooks to both layouts, whose devices meet even if no byte moves. Of a
replica whose ranks share the work, one answers with the output, and the others after it; readers start in between,
behind a call that is not answered yet. Rows, messages and batches of a step that overlap are left out; `realrl.sim` has
them.

Invariants of `Model.period`:
    - it is at least the seconds that each device works in a step, and at least the seconds around each cycle of waits,
      divided by the steps that the cycle spans (see `Cycle`); both hold for every run that goes on for ever;
    - plans that are alike but for the places of their meshes, with the same relations between them, have equal periods.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from realrl.errors import GraphError
from realrl.mesh.device_mesh import Cluster, ParallelStrategy
from realrl.search.flow import Cycle, Flow, Move
from realrl.search.memory.devices import BytesOf, DeviceMemory, Learned, Shown
from realrl.search.sharing import Bar, waiting_shares
from realrl.search.space import Choice, Placed, Relation, Span, relation, segments_of

_MEASURED = 2, 4  # the period is measured from the end of the first of these steps to the end of the second
_SHARING_ROUNDS = 2  # as many as `realrl.sim.contention` has


class Spread(NamedTuple):
    """Bytes of a call on the devices of its mesh, as they are needed to bound those of plans.

    Attributes:
        mean: kept on a device on average.
        least: kept and used on any device at least.
        first: kept and used on the first device.
    """

    mean: float
    least: tuple[int, int]
    first: tuple[int, int]


@dataclass(frozen=True)
class Price:
    """Cost of a call under one choice.

    Attributes:
        seconds: of its batches of one step.
        kept: bytes of its role's state on the device on which it needs the most, if the role lives there.
        used: bytes that it takes on that device while it runs, without parameters that come from another layout, and
            with the fewest connections of any device.
        on_others: the same on other devices; None if all are alike.
    """

    seconds: float
    kept: int = 0
    used: int = 0
    on_others: Spread | None = None

    @property
    def spread(self) -> Spread:
        """Bytes on all devices."""
        return self.on_others or Spread(self.kept, (self.kept, self.used), (self.kept, self.used))


@dataclass(frozen=True)
class Moved:
    """Cost of a move: its seconds, and the bytes of parameters that it brings to some device of its target at least."""

    seconds: float
    n_bytes: int = 0


_NOTHING = Moved(0.0)  # between equal layouts of one role, where no hook is


class Prices(BytesOf, Protocol):
    """Costs of all calls under all choices; equal questions get equal answers."""

    def call(self, call: str, choice: Choice) -> Price:
        """Return the cost of a call."""

    def move(
        self, calls: tuple[str, str], source: ParallelStrategy, target: ParallelStrategy, relation: Relation
    ) -> Moved:
        """Return the cost of a move between the layouts of two calls, the second seen from the first."""


@dataclass(frozen=True)
class Parts:
    """Seconds of one call's parts, and the devices of each.

    Attributes:
        before_spans, after_spans: layouts that a hook is sent to; their devices meet, however short it is.
        n_split: replicas whose ranks share the work: the master hears of an output before it hears of all of its
            replica's ranks; 0 if each rank has its own work.
    """

    before: float
    run: float
    after: float
    mesh: Span
    before_spans: tuple[Span, ...] = ()
    after_spans: tuple[Span, ...] = ()
    n_split: int = 0

    @property
    def seconds(self) -> float:
        return self.before + self.run + self.after


@dataclass
class Model:
    """The fast model of one run on one cluster.

    Attributes:
        capacity: bytes of a device that a plan may use.
        accepts: has the last word on a whole plan that would be the best, such as its exact memory.
        shows: what the exact count of a plan shows that was not accepted; None if that had another reason.
        alone: times as fast as a device computes while all others of its node wait; prices hold while none does.
    """

    flow: Flow
    prices: Prices
    cluster: Cluster
    capacity: float = math.inf
    accepts: Callable[[tuple[Placed, ...]], bool] = field(default=lambda plan: True)
    shows: Callable[[tuple[Placed, ...]], Shown | None] = field(default=lambda plan: None)
    alone: float = 1.0
    _prices: dict[tuple[int, Choice], Price] = field(default_factory=dict)
    _moves: dict[tuple[int, int, ParallelStrategy, ParallelStrategy, Relation], Moved] = field(default_factory=dict)
    _memory: DeviceMemory | None = None

    def price(self, call: int, choice: Choice) -> Price:
        """Return the cost of a call, which is asked for once."""
        found = self._prices.get((call, choice))
        if found is None:
            found = self._prices[call, choice] = self.prices.call(self.flow.names[call], choice)
        return found

    def is_priced(self, call: int, choice: Choice) -> bool:
        """Return True if the cost of a call is known."""
        return (call, choice) in self._prices

    def note(self, call: int, choice: Choice, price: Price) -> None:
        """Take the cost of a call from elsewhere, so that it is not asked for."""
        self._prices[call, choice] = price

    def least(self, call: int, choice: Choice) -> float:
        """Return the least seconds of a call: those it takes while all other devices of its nodes wait."""
        size = self.cluster.n_devices_per_node
        waiting = max(0, size - choice.n_devices) / max(1, size - 1)
        return self.price(call, choice).seconds * min(1.0, self._relief(waiting))

    def _relief(self, waiting: float) -> float:
        """Return what a call takes of its time, of which so large a share the other devices of its nodes wait."""
        return 1.0 - waiting + waiting / self.alone

    def move(self, move: Move, source: ParallelStrategy, target: ParallelStrategy, relation: Relation) -> Moved:
        """Return the cost of a move, which is asked for once; `_NOTHING` between equal layouts of one role."""
        if relation == "same" and source == target and move.owner == move.target:
            return _NOTHING
        return self.move_between(move.source, move.target, source, target, relation)

    def move_between(
        self, first: int, second: int, source: ParallelStrategy, target: ParallelStrategy, relation: Relation
    ) -> Moved:
        """Return the cost of a move between the layouts of two calls, which is asked for once."""
        key = (first, second, source, target, relation)
        found = self._moves.get(key)
        if found is None:
            names = self.flow.names[first], self.flow.names[second]
            found = self._moves[key] = self.prices.move(names, source, target, relation)
        return found

    def moved(self, move: Move, plan: Sequence[Placed]) -> Moved:
        """Return the cost of a move in a plan."""
        source, target = plan[move.source], plan[move.target]
        place = relation(source.span, target.span, self.cluster.n_devices_per_node)
        return self.move(move, source.choice.strategy, target.choice.strategy, place)

    @property
    def memory(self) -> DeviceMemory:
        """The count of the bytes of each device."""
        if self._memory is None:
            self._memory = DeviceMemory(self.flow, self.prices, self.cluster)
        return self._memory

    def overflow(self, plan: Sequence[Placed]) -> float:
        """Return the bytes that the fullest device lacks at least; 0 if the plan may fit."""
        return max(0.0, self.need(plan) - self.capacity)

    def need(self, plan: Sequence[Placed]) -> int:
        """Return the bytes that the fullest device needs at least."""
        return self.memory.need(dict(enumerate(plan)))

    def may_fit(self, plan: Mapping[int, Placed], learned: Learned) -> bool:
        """Return False if no plan with these calls, all or some, can fit the devices by what is known."""
        return self.memory.need(plan, learned, limit=self.capacity) <= self.capacity

    def is_accepted(self, plan: tuple[Placed, ...], learned: Learned) -> bool:
        """Return True if a plan is accepted; else learn why it is not."""
        if self.accepts(plan):
            return True
        shown = self.shows(plan)
        if shown is not None:
            self.memory.learn(plan, shown, learned)
        return False

    def parts(self, plan: Sequence[Placed], *, moves: bool = True) -> list[Parts]:
        """Return the parts of every call; without those that move parameters, if `moves` is False."""
        found = []
        for call, placed in enumerate(plan):
            seconds, spans = {False: 0.0, True: 0.0}, {False: list[Span](), True: list[Span]()}
            for move in self.flow.moves_of[call] if moves else ():
                moved = self.moved(move, plan)
                if moved is not _NOTHING:
                    seconds[move.is_after] += moved.seconds
                    spans[move.is_after] += [plan[move.source].span, plan[move.target].span]
            run = self.price(call, placed.choice).seconds
            both = (tuple(spans[False]), tuple(spans[True]))
            strategy = placed.choice.strategy
            n_split = strategy.dp if strategy.tp > 1 else 0
            found.append(Parts(seconds[False], run, seconds[True], placed.span, *both, n_split))
        return found

    def period(self, plan: Sequence[Placed], *, moves: bool = True, limit: float = math.inf) -> float:
        """Return the seconds of a step, once the run is under way.

        Args:
            moves: False: as if moves took no time.
            limit: of a period that is not below it, a bound that is not below it either may be returned.
        """
        parts = self.parts(plan, moves=moves)
        least = [self.least(call, placed.choice) for call, placed in enumerate(plan)] if self.alone != 1.0 else []
        stretches = _stretches(parts)
        quick = [replace(one, run=run) for one, run in zip(parts, least, strict=True)] if least else parts
        bound = self._least(quick, stretches)
        if bound >= limit:
            return bound
        if least:
            parts = self._shared(parts)
            bound = self._least(parts, stretches)
        ends = _ran(self.flow, parts, _MEASURED[1], stretches).ends
        return max(bound, (ends[_MEASURED[1]] - ends[_MEASURED[0]]) / (_MEASURED[1] - _MEASURED[0]))

    def _least(self, parts: Sequence[Parts], stretches: Sequence[_Stretches]) -> float:
        return max(_busiest(parts, stretches), slowest_cycle(self.flow.cycles, parts))

    def _shared(self, parts: Sequence[Parts]) -> list[Parts]:
        """Return the parts with calls that are faster while other devices of their nodes wait."""
        spans, found = [one.mesh for one in parts], [*parts]
        for _ in range(_SHARING_ROUNDS):
            shares = waiting_shares(bars_of(self.flow, found), spans, self.cluster)
            found = [replace(one, run=one.run * self._relief(w)) for one, w in zip(parts, shares, strict=True)]
        return found


def busiest(parts: Sequence[Parts]) -> float:
    """Return the seconds that the device with the most work has work in a step."""
    return _busiest(parts, _stretches(parts))


def _busiest(parts: Sequence[Parts], stretches: Sequence[_Stretches]) -> float:
    load: dict[int, float] = {}
    for one, where in zip(parts, stretches, strict=True):
        for segments, seconds in ((where.begin, one.before), (where.mesh, one.run), (where.finish, one.after)):
            if seconds:
                for segment in segments:
                    load[segment] = load.get(segment, 0.0) + seconds
    return max(load.values(), default=0.0)


def slowest_cycle(cycles: Sequence[Cycle], parts: Sequence[Parts]) -> float:
    """Return the least period that cycles of waits allow."""
    seconds = [one.seconds for one in parts]
    bounds, segments = segments_of([one.mesh for one in parts])
    most = 0.0
    for cycle in cycles:
        work = [0.0] * len(bounds)
        for call in cycle.between:
            for segment in segments[call]:
                work[segment] += seconds[call]
        most = max(most, (sum([seconds[call] for call in cycle.calls]) + max(work)) / cycle.lag)
    return most


def finish_times(flow: Flow, parts: Sequence[Parts], n_steps: int = _MEASURED[1]) -> list[float]:
    """Return the time at which each step is complete, from step 0, which is the start.

    Calls start by the rules of `realrl.sched.track.scheduler`: older steps first, then producers before consumers; one
    call of the oldest step may be queued behind another one, and reserves its devices while they have no room.

    Raises:
        GraphError: the calls wait for each other for ever.
    """
    return _ran(flow, parts, n_steps, _stretches(parts)).ends


def bars_of(flow: Flow, parts: Sequence[Parts], *, since: int = _MEASURED[0], until: int = _MEASURED[1]) -> list[Bar]:
    """Return when each call computes between the ends of two steps, its hooks left out."""
    run = _ran(flow, parts, until, _stretches(parts))
    first, last = run.ends[since], run.ends[until]
    return [(call, max(start, first), min(end, last)) for call, start, end in run.bars if start < last and first < end]


def _ran(flow: Flow, parts: Sequence[Parts], n_steps: int, stretches: Sequence[_Stretches]) -> _Run:
    run = _Run(flow, parts, n_steps, stretches)
    while run.oldest <= n_steps:
        run.start_calls()
        run.finish_next()
    return run


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Segments on which a call begins, hooks included, on which it runs, and on which its hooks after it do.

    Attributes:
        begin_bits, mesh_bits: of the first two, a bit for each segment; and one for the ranks that answer last of each
            call whose replicas are split, which are nowhere in particular: what has the whole mesh has them.
        late_bits: those that have not answered when the call's outputs are there.
    """

    begin: tuple[int, ...]
    mesh: range
    finish: tuple[int, ...]
    begin_bits: int
    mesh_bits: int
    late_bits: int = 0


def _stretches(parts: Sequence[Parts]) -> list[_Stretches]:
    bounds, segments = segments_of([span for one in parts for span in (one.mesh, *one.before_spans, *one.after_spans)])
    found, first = [], 0
    for one in parts:
        n_before, n_after = len(one.before_spans), len(one.after_spans)
        mesh = segments[first]
        then, first = first + 1 + n_before, first + 1 + n_before + n_after
        begin = tuple({*mesh}.union(*segments[then - n_before : then])) if n_before else tuple(mesh)
        finish = tuple({*mesh}.union(*segments[then:first])) if n_after else tuple(mesh)
        mesh_bits = (1 << mesh.stop) - (1 << mesh.start)
        found.append(_Stretches(begin, mesh, finish, sum([1 << segment for segment in begin]), mesh_bits))
    late: dict[int, int] = {}  # bits of a mesh -> that of its last ranks
    for one, where in zip(parts, found, strict=True):
        if one.n_split > 1 and where.mesh_bits not in late:
            late[where.mesh_bits] = 1 << len(bounds) + len(late)
    if not late and not any(one.n_split for one in parts):
        return found
    return [
        replace(
            where,
            begin_bits=where.begin_bits | _of_whole(where.begin_bits, late),
            mesh_bits=where.mesh_bits | _of_whole(where.mesh_bits, late),
            late_bits=late[where.mesh_bits] if one.n_split > 1 else where.mesh_bits * one.n_split,
        )
        for one, where in zip(parts, found, strict=True)
    ]


def _of_whole(bits: int, late: Mapping[int, int]) -> int:
    """Return the bits of the last ranks of all meshes of which these segments have all."""
    return sum([last for mesh, last in late.items() if bits & mesh == mesh])


class _Run:
    """The state of a run: calls are started at `now`, and the clock goes on when one is complete.

    Calls that can start, but for devices, stay in `ready`; of those that cannot, the ones of which that may have
    changed are in `doubtful`. Segments of a call that is under way are busy; those of a second one behind it are full.
    """

    def __init__(self, flow: Flow, parts: Sequence[Parts], n_steps: int, stretches: Sequence[_Stretches]) -> None:
        self.oldest, self.ends, self.bars = 1, [0.0], list[Bar]()
        self._flow, self._parts, self._stretches = flow, parts, stretches
        self._free = [0.0] * (1 + max([max(*one.begin, *one.finish, 0) for one in self._stretches]))
        self._busy = self._full = 0
        self._done, self._sent = [0] * len(parts), [0] * len(parts)
        self._given = [0] * len(parts)  # steps whose outputs are there
        self._last, self._has_leads = n_steps + 1 + flow.ahead, any(flow.leads)
        self._under_way: list[tuple[float, int]] = []
        self._ready: list[tuple[int, bool, int]] = []
        self._is_known, self._doubtful = [False] * len(parts), set(range(len(parts)))
        self._now = 0.0

    def start_calls(self) -> None:
        """Start the calls that can start now."""
        while True:
            for call in self._doubtful:
                if not self._is_known[call] and self._can_start(call):
                    one = self._stretches[call]
                    self._is_known[call] = True
                    insort(self._ready, (self._sent[call] + 1, one.begin_bits == one.mesh_bits, call))
            held, waiting, started = 0, list[tuple[int, bool, int]](), list[int]()
            for entry in self._ready:
                step, _, call = entry
                begin = self._stretches[call].begin_bits
                if not begin & (held | (self._full if step == self.oldest else self._busy)):
                    self._take(call)
                    started.append(call)
                else:
                    waiting.append(entry)
                    held |= begin if step == self.oldest else 0
            if started:
                self._ready = waiting
                self._send(started)
            self._doubtful = set(range(len(self._parts))) if started and self._has_leads else set()
            if not self._doubtful:  # a call that changes parameters may wait for one that was sent just now
                return

    def _can_start(self, call: int) -> bool:
        step, done = self._sent[call] + 1, self._done
        if done[call] < step - 1 or step > min(self.oldest + self._flow.ahead, self._last):
            return False
        for other, lag in self._flow.waits[call]:
            if done[other] < step - lag and not (self._given[other] >= step and call in self._flow.readers[other]):
                return False
        for reader, lead, is_sent_enough in self._flow.leads[call]:
            if (self._sent if is_sent_enough else done)[reader] < min(step + lead, self._last):
                return False
        return True

    def _take(self, call: int) -> None:
        """Give a call its devices."""
        mesh = self._stretches[call].mesh_bits
        self._full |= self._busy & mesh
        self._busy |= mesh
        self._sent[call] += 1
        self._is_known[call] = False

    def _send(self, calls: Sequence[int]) -> None:
        """Send calls that start at the same moment: first hooks before all of them whose meshes are disjoint."""
        taken, free, late = 0, self._free, list[int]()
        for call in calls:
            mesh = self._stretches[call].mesh_bits
            if taken & mesh:
                late.append(call)
            elif self._parts[call].before_spans:
                self._meet(call)
            taken |= mesh
        for call in calls:
            one, stretches = self._parts[call], self._stretches[call]
            if one.before_spans and call in late:
                self._meet(call)
            start = max(self._now, max([free[segment] for segment in stretches.mesh]))
            end = start + one.run
            self.bars.append((call, start, end))
            for segment in stretches.mesh:
                free[segment] = end
            if one.after_spans:
                end = max([free[segment] for segment in stretches.finish]) + one.after
                for segment in stretches.finish:
                    free[segment] = end
            heappush(self._under_way, (end, call))

    def _meet(self, call: int) -> None:
        """Let the devices of a call's mesh and of its hooks meet, and do the hooks before it."""
        begin, free = self._stretches[call].begin, self._free
        end = max(self._now, max([free[segment] for segment in begin])) + self._parts[call].before
        for segment in begin:
            free[segment] = end

    def _release(self, bits: int) -> None:
        """Take devices from the call that has them; one behind it may be on them."""
        self._busy &= ~(bits & ~self._full)
        self._full &= ~bits

    def finish_next(self) -> None:
        """Go on to the time at which the next call is complete."""
        if not self._under_way:
            raise GraphError("the calls wait for each other for ever")
        self._now, call = heappop(self._under_way)  # one of those that end together: the master hears of one first
        mesh, late = self._stretches[call].mesh_bits, self._stretches[call].late_bits
        self._given[call] += 1
        if late and self._flow.readers and self._flow.readers[call]:
            self._release(mesh & ~late)
            self._doubtful |= self._flow.readers[call]
            self.start_calls()
            mesh = late
        self._done[call] += 1
        self._release(mesh)
        self._doubtful |= self._flow.followers[call]
        while min(self._done) >= self.oldest:
            self.ends.append(self._now)
            self.oldest += 1
            self._doubtful.update(range(len(self._parts)))

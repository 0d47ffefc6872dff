"""Calls of a graph and their waits, as the fast model needs them; and the cycles of waits, which bound a period."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise, product
from typing import TYPE_CHECKING

from realrl.errors import GraphError
from realrl.graph.build import (
    calls,
    data_graph,
    home_calls,
    lead_waits,
    topological_calls,
    version_edges,
    wait_graph,
    writer_waits,
)
from realrl.graph.mfc import OffloadHook

if TYPE_CHECKING:
    import networkx as nx

_MOST_CYCLES = 200


@dataclass(frozen=True)
class Move:
    """A hook of `owner` that moves parameters from the layout of call `source` to that of call `target`.

    Both are homes of their roles, unless `target` is `owner`: then the role's own parameters come for that call.
    """

    owner: int
    source: int
    target: int
    is_after: bool = False


@dataclass(frozen=True)
class Cycle:
    """Calls that wait for each other around, over so many steps.

    Once around takes at least the seconds of the calls. On top come those of calls `between` two of them, which have to
    run after the one and before the other: of all that share a device.
    """

    calls: tuple[int, ...]
    lag: int
    between: tuple[int, ...] = ()

    def implies(self, other: Cycle) -> bool:
        """Return True if no plan can be bound by the other cycle more than by this one."""
        is_wide = {*self.calls, *self.between}.issuperset(other.between)
        return is_wide and self.lag <= other.lag and set(self.calls).issuperset(other.calls)


@dataclass(frozen=True)
class Flow:
    """Calls of a graph and their waits; a call is named by its position, producers before consumers.

    Attributes:
        waits: for each call, (other call, lag): step i waits for step ``i - lag`` of the other one.
        leads: for each call, (reader, steps, is sent enough): the reader must be so far ahead.
        homes: for each call, that in whose layout its role's parameters live; -1 for a role without any.
        ahead: steps that a call may be ahead of the oldest one, as the master loads samples.
        readers: for each call, those that wait for its outputs of the same step, and for nothing else of it.
    """

    names: tuple[str, ...]
    waits: tuple[tuple[tuple[int, int], ...], ...]
    leads: tuple[tuple[tuple[int, int, bool], ...], ...]
    homes: tuple[int, ...]
    moves: tuple[Move, ...]
    cycles: tuple[Cycle, ...]
    ahead: int = 1
    readers: tuple[frozenset[int], ...] = ()

    @cached_property
    def moves_of(self) -> tuple[tuple[Move, ...], ...]:
        """For each call, the moves that are known as soon as it and all calls before it have a place."""
        return tuple([tuple([m for m in self.moves if m.owner == call]) for call in range(len(self.names))])

    @cached_property
    def roles(self) -> tuple[tuple[int, ...], ...]:
        """The calls of each role; one without parameters has a call alone."""
        roles: dict[int, list[int]] = {}
        for call, home in enumerate(self.homes):
            roles.setdefault(home if home >= 0 else ~call, []).append(call)
        return tuple(map(tuple, roles.values()))

    @cached_property
    def before(self) -> tuple[frozenset[int], ...]:
        """For each call at home, those of other roles before the last call of its role, or with moves to or from it."""
        found = []
        for call in range(len(self.names)):
            role = {other for other, home in enumerate(self.homes) if home == call}
            moving = {move.owner for move in self.moves if call in (move.source, move.target)} if role else set()
            found.append(frozenset((moving | {*range(max(role, default=0))}) - role))
        return tuple(found)

    @cached_property
    def followers(self) -> tuple[frozenset[int], ...]:
        """For each call, those that may be able to start when a step of it is complete, itself included."""
        found = [{call} for call in range(len(self.names))]
        for call, (waits, leads) in enumerate(zip(self.waits, self.leads, strict=True)):
            for other in (*[other for other, _ in waits], *[reader for reader, _, _ in leads]):
                found[other].add(call)
        return tuple(map(frozenset, found))


def flow_of(graph: nx.DiGraph, *, weightless: Collection[str] = ()) -> Flow:
    """Return the calls of a graph as the fast model needs them.

    Args:
        graph: from `build_graph`.
        weightless: roles without parameters.
    """
    mfcs = topological_calls(graph)
    place = {mfc.name: i for i, mfc in enumerate(mfcs)}
    home_of = {role: place[name] for role, name in home_calls(graph).items() if role not in weightless}
    waits: list[list[tuple[int, int]]] = [[] for _ in mfcs]
    for first, second, lag in wait_graph(graph).edges(data="lag"):
        waits[place[second]].append((place[first], lag))
    strict = {(wait.before, wait.after) for wait in (*version_edges(graph), *writer_waits(graph))}
    readers: list[set[int]] = [set() for _ in mfcs]
    for edge in data_graph(graph).edges:
        if edge not in strict:
            readers[place[edge[0]]].add(place[edge[1]])
    leads: list[list[tuple[int, int, bool]]] = [[] for _ in mfcs]
    for lead in lead_waits(graph):
        leads[place[lead.writer]].append((place[lead.reader], lead.lead, lead.until == "sent"))
    moves = []
    for i, mfc in enumerate(mfcs):
        if home_of.get(mfc.role, i) != i:
            moves.append(Move(i, home_of[mfc.role], i))
        for hooks, is_after in ((mfc.pre_hooks, False), (mfc.post_hooks, True)):
            for hook in hooks:
                if isinstance(hook, OffloadHook):
                    continue
                source, target = (mfc.role if end is None else end.role for end in (hook.source, hook.target))
                if source != target and source in home_of and target in home_of:
                    moves.append(Move(i, home_of[source], home_of[target], is_after))
    return Flow(
        tuple(place),
        tuple(tuple(sorted(one)) for one in waits),
        tuple(map(tuple, leads)),
        tuple(home_of.get(mfc.role, -1) for mfc in mfcs),
        tuple(moves),
        cycles_of(waits),
        ahead=1 + max(mfc.max_staleness for mfc in calls(graph)),
        readers=tuple(map(frozenset, readers)),
    )


def cycles_of(waits: Sequence[Sequence[tuple[int, int]]]) -> tuple[Cycle, ...]:
    """Return the cycles of waits that bound a period; also each call by itself, which runs one step at a time.

    Of very many cycles the first are taken. Each of them holds by itself.
    """
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(waits)))
    lags = {(other, call): lag for call, found in enumerate(waits) for other, lag in found}
    graph.add_edges_from(sorted(lags))
    within = nx.DiGraph([edge for edge, lag in lags.items() if lag == 0])
    found = {Cycle((call,), 1): None for call in graph}
    for names in islice(nx.simple_cycles(graph), _MOST_CYCLES):
        lag = sum(lags[edge] for edge in pairwise((*names, names[0])))
        if lag <= 0:
            raise GraphError(f"calls {names} wait for each other within a step")
        found[Cycle(tuple(sorted(names)), lag)] = None
        found |= dict.fromkeys(_wider(names, lag, within))
    strict: list[Cycle] = []
    for one in sorted(found, key=lambda one: (one.lag, -len(one.calls), -len(one.between), one.calls, one.between)):
        if not any(other.implies(one) for other in strict):
            strict.append(one)
    return tuple(strict)


def _wider(names: Sequence[int], lag: int, within: nx.DiGraph) -> Iterator[Cycle]:
    """Yield a cycle with all calls between two of its calls in a step, in the place of those that it goes through."""
    import networkx as nx

    for first, n_skipped in product(range(len(names)), range(1, len(names) - 1)):
        path = [names[(first + i) % len(names)] for i in range(n_skipped + 2)]
        if all(within.has_edge(a, b) for a, b in pairwise(path)):
            between = nx.descendants(within, path[0]) & nx.ancestors(within, path[-1])
            if len(between) > n_skipped:
                yield Cycle(tuple(sorted({*names}.difference(path[1:-1]))), lag, tuple(sorted(between)))

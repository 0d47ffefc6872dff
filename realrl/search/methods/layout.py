"""Plans of a method: sets of calls, each with a mesh, whose strategies `realrl.search.methods.fill` finds.

Invariants:
    - a plan that is returned fits its devices and is accepted; its meshes nest or are disjoint; it honours all pins;
    - equal input gives an equal plan.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from realrl.errors import AllocationError
from realrl.graph.build import topological_calls
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Cluster
from realrl.plan.memory.plan import show_bytes
from realrl.search.methods.fill import Filler, Rule
from realrl.search.problem import Problem
from realrl.search.space import Placed, Span, mesh_sizes, relation

Plan = tuple[Placed, ...]
Calls = tuple[int, ...]

_ROOM = (1.0, 0.97, 0.94, 0.9, 0.85)  # shares of the capacity to fill, where the exact memory of a plan is more
_MOST_NODES = 16  # of a cluster on which every number of nodes is tried
_MORE = "Use more devices, or another method."


@dataclass(frozen=True)
class Maker:
    """A method that makes a plan for one problem.

    Attributes:
        name: of the method, for messages.
        moves_count: see `Filler`.
    """

    name: str
    problem: Problem
    rule: Rule = field(default_factory=Rule)
    moves_count: bool = True

    @property
    def mfcs(self) -> tuple[MFCDef, ...]:
        assert self.problem.graph is not None, "a problem that was posed has a graph"
        return topological_calls(self.problem.graph)

    @property
    def cluster(self) -> Cluster:
        return self.problem.model.cluster

    def of_roles(self, roles: Iterable[str]) -> Calls:
        """Return the calls of roles."""
        wanted = set(roles)
        return tuple([call for call, mfc in enumerate(self.mfcs) if mfc.role in wanted])

    def on(self, meshes: Mapping[Calls, Span]) -> Plan:
        """Return the plan with these sets of calls on these meshes.

        Raises:
            AllocationError: nothing fits, or a pin lies across a mesh of the method.
        """
        return self._fitting(lambda filler: meshes, {calls: end - first for calls, (first, end) in meshes.items()})

    def sized(self, placements: Iterable[Sequence[Calls]]) -> Plan:
        """Return the best plan that gives the sets of one of these placements meshes of their own.

        Sizes are those with the least sum over generation, inference and training of the slowest set's seconds.

        Raises:
            AllocationError: nothing fits, or a pin lies across a mesh of the method.
        """
        tried = [tuple(placement) for placement in placements]
        fewest = min(tried, key=lambda sets: len(sets))
        return self._fitting(
            lambda filler: _quickest(filler, tried, self.cluster), dict.fromkeys(fewest, self.cluster.n_devices)
        )

    def _fitting(
        self, meshes_of: Callable[[Filler], Mapping[Calls, Span] | None], largest: Mapping[Calls, int]
    ) -> Plan:
        """Return the first plan that fits as a whole, from fillers that leave more and more room.

        Args:
            meshes_of: sets of calls and their meshes, by a filler; None if nothing fits.
            largest: sets and the most devices that they could have, to say why nothing fits.
        """
        model = self.problem.model
        for room in _ROOM:
            filler = Filler(self.problem, self.mfcs, self.rule, room * model.capacity, self.moves_count)
            meshes = meshes_of(filler)
            plan = None if meshes is None else self._plan(filler, meshes)
            if plan is None and room == _ROOM[0]:
                raise self._shortage(filler, largest)
            if plan is not None and not model.overflow(plan) and model.accepts(plan):
                return plan
        raise AllocationError(
            f"method '{self.name}' has no plan that fits, once the memory of all calls is planned together",
            remedy=_MORE,
        )

    # ------------------------------------------------------------ from sets to calls

    def _plan(self, filler: Filler, meshes: Mapping[Calls, Span]) -> Plan | None:
        """Return the best choices for sets of calls, on their meshes or those of pins; None if they do not fit.

        Raises:
            AllocationError: the mesh of a pin lies across another one.
        """
        places: dict[int, Placed] = {}
        for calls, (start, end) in meshes.items():
            found = filler.best(calls, end - start)
            if found is None:
                return None
            for call, choice in found.choices.items():
                first = self.problem.fixed.get(call, start)
                places[call] = Placed((first, first + choice.n_devices), choice)
        plan = tuple([places[call] for call in range(len(places))])
        node = self.cluster.n_devices_per_node
        for (one, a), (other, b) in combinations(enumerate(plan), 2):
            is_across = a.span[0] < b.span[1] and b.span[0] < a.span[1]
            if is_across and relation(a.span, b.span, node) in ("beside", "apart"):
                names = self.problem.model.flow.names
                raise AllocationError(
                    f"method '{self.name}' puts call '{names[one]}' on ranks {_ranks(a.span)} and call "
                    f"'{names[other]}' on ranks {_ranks(b.span)}, which overlap in part",
                    remedy="Leave the pins out, or use another method.",
                    call=names[one],
                )
        return plan

    def _shortage(self, filler: Filler, sizes: Mapping[Calls, int]) -> AllocationError:
        """Return the error that says why sets of calls fit no meshes of these sizes."""
        names = self.problem.model.flow.names
        for calls, size in sizes.items():
            least = filler.least(calls, size)
            for call in calls:
                if not filler.fastest(call, size):
                    return AllocationError(
                        f"method '{self.name}' has no strategy for call '{names[call]}' on {size} devices that its "
                        "samples and the memory of a device allow",
                        remedy="Use another method, more devices, or a pin that fits this one.",
                        call=names[call],
                    )
            spelled = ", ".join(names[call] for call in calls)
            if least is None:
                return AllocationError(
                    f"method '{self.name}' has no strategy that is the same for all of {spelled} on {size} devices",
                    remedy="Use another method, or pins that fit this one.",
                )
            if least >= sys.maxsize:
                return AllocationError(
                    f"method '{self.name}' keeps {spelled} apart from other calls, and has {size} devices in all",
                    remedy=_MORE,
                )
            if least > filler.capacity:
                return AllocationError(
                    f"method '{self.name}' has no plan that fits: a mesh of {size} devices for {spelled} takes "
                    f"{show_bytes(int(least))} of a device at least, and a plan may use "
                    f"{show_bytes(int(filler.capacity))}",
                    remedy=_MORE,
                )
        return AllocationError(
            f"method '{self.name}' has no plan that fits: each of its {len(sizes)} meshes fits a cluster with "
            f"{self.cluster}, but all together do not",
            remedy=_MORE,
        )


def _ranks(span: Span) -> str:
    return f"{span[0]}-{span[1] - 1}"


# ---------------------------------------------------------------- sizes


def set_sizes(cluster: Cluster, n_sets: int) -> tuple[int, ...]:
    """Return the sizes of meshes that sets of calls may get, ascending.

    Parts of a node count where nodes are fewer than sets. Of many nodes, only 1, 2, 3, 4, 6, 8, 12, ... are taken.
    """
    node, sizes = cluster.n_devices_per_node, mesh_sizes(cluster)
    round_numbers = {factor << power for power in range(cluster.n_nodes.bit_length()) for factor in (1, 3)}
    return tuple(
        size
        for size in sizes
        if (size < node and cluster.n_nodes < n_sets)
        or (size >= node and (cluster.n_nodes <= _MOST_NODES or size // node in {*round_numbers, cluster.n_nodes}))
    )


def spans_of(sizes: Sequence[int], cluster: Cluster) -> tuple[Span, ...] | None:
    """Return disjoint legal meshes of these sizes; None if the cluster has no room for them."""
    node = cluster.n_devices_per_node
    free = dict.fromkeys(range(cluster.n_nodes), 0)  # node -> devices that are taken, from the first
    spans: dict[int, Span] = {}
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = sizes[number]
        n_nodes = -(-size // node)
        for first in range(cluster.n_nodes - n_nodes + 1):
            start = free[first] if size < node else 0
            if start + min(size, node) <= node and all(not free[first + i] or size < node for i in range(n_nodes)):
                spans[number] = (first * node + start, first * node + start + size)
                for i in range(n_nodes):
                    free[first + i] = start + min(size, node)
                break
        else:
            return None
    return tuple([spans[number] for number in range(len(sizes))])


def _quickest(filler: Filler, placements: Sequence[Sequence[Calls]], cluster: Cluster) -> dict[Calls, Span] | None:
    """Return the sets and meshes with the least sum over stages of the slowest set's seconds; None if none fit."""
    least, best = math.inf, None
    for sets in sorted(placements, key=lambda sets: len(sets)):
        sizes = set_sizes(cluster, len(sets))
        options = [
            [
                (size, found.seconds)
                for size in reversed(sizes)
                if filler.bound(calls, size) < least and (found := filler.best(calls, size)) is not None
            ]
            for calls in sets
        ]
        quicker = _best_sizes(options, cluster, least)
        if quicker is not None:
            least, best = quicker[0], dict(zip(sets, quicker[1], strict=True))
    return best


def _best_sizes(
    options: Sequence[Sequence[tuple[int, tuple[float, ...]]]], cluster: Cluster, limit: float
) -> tuple[float, tuple[Span, ...]] | None:
    """Return the least sum over stages of the slowest set's seconds, and meshes of that; None if it is over `limit`.

    Args:
        options: for each set, sizes and seconds of the stages.
    """
    least = [min((size for size, _ in found), default=math.inf) for found in options]
    best: tuple[float, tuple[Span, ...]] | None = None

    def go(chosen: tuple[int, ...], stages: tuple[float, ...], room: int) -> None:
        nonlocal best, limit
        if len(chosen) == len(options):
            spans = spans_of(chosen, cluster)
            if spans is not None:
                limit, best = sum(stages), (sum(stages), spans)
            return
        rest = sum(least[len(chosen) + 1 :])
        for size, seconds in options[len(chosen)]:
            slowest = tuple(map(max, seconds, stages)) if stages else seconds
            if size + rest <= room and sum(slowest) < limit:
                go((*chosen, size), slowest, room - size)

    go((), (), cluster.n_devices)
    return best

"""Plans of a method: sets of calls, each with a mesh, whose strategies `realrl.search.methods.fill` finds.

Invariants:
    - a plan that is returned fits its devices and is accepted, its meshes nest or are disjoint, and it honours all pins;
    - equal input gives an equal plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from realrl.errors import AllocationError
from realrl.graph.build import topological_calls
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Cluster
from realrl.search.fast import Placed, Span, relation, same_layout
from realrl.search.methods.fill import Filled, Filler, Rule
from realrl.search.problem import Problem
from realrl.search.space import mesh_sizes

Plan = tuple[Placed, ...]
Calls = tuple[int, ...]

_ROOM = (1.0, 0.97, 0.94, 0.9, 0.85)  # shares of the capacity to fill, where the exact memory of a plan is more
_MOST_NODES = 16  # of a cluster on which every number of nodes is tried


@dataclass(frozen=True)
class Maker:
    """A method that makes a plan for one problem.

    Attributes:
        name: of the method, for messages.
        moves_count: True if a call goes back to the strategy of its role's home where that makes the period shorter,
            because no parameters move; False if the method leaves moves out of account.
    """

    name: str
    problem: Problem
    rule: Rule = Rule()
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
        model = self.problem.model
        for room in _ROOM:
            filler = Filler(self.problem, self.mfcs, self.rule, room * model.capacity)
            filled = {calls: filler.best(calls, end - first) for calls, (first, end) in meshes.items()}
            for calls, found in filled.items():
                if found is None:
                    raise self._shortage(filler, {calls: meshes[calls][1] - meshes[calls][0]})
            plan = self._placed(meshes, {calls: found for calls, found in filled.items() if found is not None})
            if not model.overflow(plan) and model.accepts(plan):
                return self._settled(plan, filler, meshes) if self.moves_count else plan
        raise AllocationError(
            f"method '{self.name}' has no plan that fits: its calls take more memory together than each by itself",
            remedy="Use more devices, or another method.",
        )

    def sized(self, placements: Iterable[Sequence[Calls]]) -> Plan:
        """Return the best plan that gives the sets of one of these placements meshes of their own.

        Sizes are those with the least sum over generation, inference and training of the slowest set's seconds.

        Raises:
            AllocationError: nothing fits.
        """
        error: AllocationError | None = None
        tried = [tuple(placement) for placement in placements]
        for room in _ROOM:
            filler = Filler(self.problem, self.mfcs, self.rule, room * self.problem.model.capacity)
            meshes = _quickest(filler, tried, self.cluster)
            if meshes is None:
                whole = dict.fromkeys(min(tried, key=len), self.cluster.n_devices)
                raise error or self._shortage(filler, whole)
            try:
                return self.on(meshes)
            except AllocationError as refused:
                error = refused
        assert error is not None
        raise error

    # ------------------------------------------------------------ from sets to calls

    def _placed(self, meshes: Mapping[Calls, Span], filled: Mapping[Calls, Filled]) -> Plan:
        """Return the plan of choices that were made for sets of calls.

        Raises:
            AllocationError: the mesh of a pin lies across another one.
        """
        places: dict[int, Placed] = {}
        for calls, found in filled.items():
            for call in calls:
                pin, choice, first = self.problem.pins.get(call), found.choices[call], meshes[calls][0]
                if pin is not None and pin.mesh is not None:
                    first = pin.mesh.ranks[0]
                places[call] = Placed((first, first + choice.n_devices), choice)
        plan = tuple([places[call] for call in range(len(places))])
        node = self.cluster.n_devices_per_node
        for (one, a), (other, b) in combinations(enumerate(plan), 2):
            is_across = a.span[0] < b.span[1] and b.span[0] < a.span[1]
            if is_across and relation(a.span, b.span, node) in ("beside", "apart"):
                names = self.problem.model.flow.names
                raise AllocationError(
                    f"method '{self.name}' puts call '{names[one]}' on ranks {_ranks(a.span)} and call '{names[other]}' "
                    f"on ranks {_ranks(b.span)}, which overlap in part",
                    remedy="Leave the pins out, or use another method.",
                    call=names[one],
                )
        return plan

    def _settled(self, plan: Plan, filler: Filler, meshes: Mapping[Calls, Span]) -> Plan:
        """Return a plan in which no call has another strategy than its role's home to no avail."""
        model, period = self.problem.model, self.problem.model.period(plan)
        sizes = {call: span[1] - span[0] for calls, span in meshes.items() for call in calls}
        for call, placed in enumerate(plan):
            home = model.flow.homes[call]
            if home in (-1, call) or same_layout(plan[home], placed) or plan[home].span != placed.span:
                continue
            alike = (c for _, c in filler.fastest(call, sizes[call]) if c.strategy == plan[home].choice.strategy)
            for choice in alike:
                changed = (*plan[:call], Placed(placed.span, choice), *plan[call + 1 :])
                if not model.overflow(changed) and model.period(changed) < period and model.accepts(changed):
                    plan, period = changed, model.period(changed)
                    break
        return plan

    def _shortage(self, filler: Filler, sizes: Mapping[Calls, int]) -> AllocationError:
        """Return the error that says why sets of calls fit no meshes of these sizes."""
        names = self.problem.model.flow.names
        for calls, size in sizes.items():
            least = filler.least(calls, size)
            for call in calls:
                if not filler.fastest(call, size):
                    return AllocationError(
                        f"method '{self.name}' has no strategy for call '{names[call]}' on {size} devices",
                        remedy="Use another method, or a pin that fits this one.",
                        call=names[call],
                    )
            if least is None or least > filler.capacity:
                need = "" if least is None else f" takes {least / 1e9:,.1f} GB of a device at least, and a plan"
                return AllocationError(
                    f"method '{self.name}' has no plan that fits: {', '.join(names[call] for call in calls)} on {size} "
                    f"devices{need} may use {filler.capacity / 1e9:,.1f} GB",
                    remedy="Use more devices, or another method.",
                )
        return AllocationError(
            f"method '{self.name}' has no plan that fits: each of its {len(sizes)} meshes fits a cluster with "
            f"{self.cluster}, but all together do not",
            remedy="Use more devices, or another method.",
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
    for sets in sorted(placements, key=len):
        sizes = set_sizes(cluster, len(sets))
        options = [
            [(size, found.seconds) for size in reversed(sizes) if (found := filler.best(calls, size)) is not None]
            for calls in sets
        ]
        found = _best_sizes(options, cluster, least)
        if found is not None:
            least, best = found[0], dict(zip(sets, found[1], strict=True))
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

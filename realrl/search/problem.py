"""Searches to be made: the choices of every call that fit a device, what the user has decided, and their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from realrl.errors import AllocationError
from realrl.graph.build import call as call_of
from realrl.mesh.device_mesh import Allocation, Cluster
from realrl.plan.allocation import check_meshes
from realrl.plan.memory.formulas.local import Kernels
from realrl.plan.memory.plan import show_bytes
from realrl.search.fast import Model
from realrl.search.flow import flow_of
from realrl.search.prices import CostPrices, Workload
from realrl.search.space import Choice, Pin, RoleSpace, choices_of, mesh_at
from realrl.sim.hardware import Hardware

if TYPE_CHECKING:
    import networkx as nx

_MANY_DEVICES = 64


@dataclass(frozen=True)
class Problem:
    """A search to be made.

    Attributes:
        choices: of each call.
        pins: by call; their strategies are those of `choices` already.
        n_walks: local searches from other plans before branches are tried.
        graph, heads: calls, and role -> head of its model, "none" without one; methods place roles by what they do.
    """

    model: Model
    choices: Sequence[Sequence[Choice]]
    pins: Mapping[int, Pin] = field(default_factory=dict)
    n_walks: int = 4
    graph: nx.DiGraph | None = None
    heads: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_many_devices(self) -> bool:
        """True if there are so many devices that it takes long to evaluate a plan."""
        return self.model.cluster.n_devices > _MANY_DEVICES

    @cached_property
    def fixed(self) -> Mapping[int, int]:
        """Call whose mesh is pinned -> the first rank of that mesh."""
        return {call: pin.mesh.ranks[0] for call, pin in self.pins.items() if pin.mesh is not None}


@dataclass(frozen=True)
class Draft:
    """A search whose choices may have no prices yet.

    Attributes:
        model, choices, pins, graph, heads: as `Problem` has them.
        alike: calls that take equally long under equal choices, together.
    """

    model: Model
    choices: Sequence[Sequence[Choice]]
    pins: Mapping[int, Pin]
    graph: nx.DiGraph
    heads: Mapping[str, str]
    alike: Sequence[tuple[int, ...]]

    def problem(self) -> Problem:
        """Price all choices, and return the search among those that fit a device.

        Raises:
            AllocationError: no choice of a call fits a device.
        """
        choices = [fitting(self.model, call, found) for call, found in enumerate(self.choices)]
        return Problem(self.model, choices, self.pins, graph=self.graph, heads=self.heads)

    def on_all_devices(self) -> Draft:
        """Return the same with the largest meshes alone, so that few choices have to be priced."""
        largest = [max((choice.n_devices for choice in found), default=0) for found in self.choices]
        choices = [[c for c in found if c.n_devices == n] for found, n in zip(self.choices, largest, strict=True)]
        return replace(self, choices=choices)


def pose(workload: Workload, hardware: Hardware, **settings: Any) -> Problem:
    """Return the search for the best plan of a workload.

    Args:
        settings: as for `draft`.

    Raises:
        AllocationError: as for `draft` and `Draft.problem`.
    """
    return draft(workload, hardware, **settings).problem()


def draft(
    workload: Workload,
    hardware: Hardware,
    *,
    capacity: float,
    roles: Mapping[str, RoleSpace],
    pins: Mapping[str, Pin] | None = None,
    kernels: Kernels | None = None,
) -> Draft:
    """Return the search for the best plan of a workload, without prices.

    Args:
        capacity: bytes of a device that a plan may use.
        roles: all roles.
        pins: call -> what the user has decided.
        kernels: the machine's kernels; those of CUDA by default.

    Raises:
        AllocationError: a pin breaks a rule, or two pins contradict each other.
    """
    graph, cluster, pins = workload.graph, workload.cluster, pins or {}
    flow = flow_of(graph, weightless=[name for name, role in roles.items() if role.model is None])
    _check_pins(graph, pins, cluster)
    prices = CostPrices(workload, hardware, kernels=kernels or Kernels(), capacity=capacity)
    model = Model(flow, prices, cluster, capacity, alone=hardware.device.alone)
    choices = [choices_of(graph, name, roles, cluster, pin=pins.get(name)) for name in flow.names]
    heads = {name: "none" if role.model is None else role.model.head for name, role in roles.items()}
    numbers = {flow.names.index(name): pin for name, pin in pins.items()}
    alike: dict[str, list[int]] = {}
    for call, name in enumerate(flow.names):
        alike.setdefault(prices.twin(name), []).append(call)
    return Draft(model, choices, numbers, graph, heads, [*map(tuple, alike.values())])


def fitting(model: Model, call: int, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the choices of a call that fit a device which has nothing else to hold.

    Raises:
        AllocationError: there is none; the message has the least bytes that one takes.
    """
    if not choices:
        name = model.flow.names[call]
        raise AllocationError(
            f"call '{name}' has no strategy on a cluster with {model.cluster} that its samples, its model and the "
            "backend of its role allow",
            remedy="Use another backend or ZeRO stage, or more samples.",
            call=name,
        )
    needs, found = list[int](), list[Choice]()
    for choice in choices:
        price = model.price(call, choice)
        needs.append(price.kept + price.used)
        if needs[-1] <= model.capacity:
            found.append(choice)
    if not found:
        name, best = model.flow.names[call], min(range(len(needs)), key=lambda i: (needs[i], choices[i].order))
        raise AllocationError(
            f"call '{name}' fits no mesh of a cluster with {model.cluster}: it takes {show_bytes(needs[best])} of "
            f"a device at least, with {choices[best]}, and a plan may use {show_bytes(int(model.capacity))}",
            remedy="Use more devices or devices with more memory, a smaller model, or shorter texts.",
            call=name,
        )
    return tuple(found)


def _check_pins(graph: nx.DiGraph, pins: Mapping[str, Pin], cluster: Cluster) -> None:
    """Refuse pins of calls that are not there, with sizes that no mesh has, and meshes that overlap in part."""
    for name, pin in pins.items():
        call_of(graph, name)
        if pin.strategy.n_devices > cluster.n_devices:
            raise AllocationError(
                f"call '{name}' is pinned to {pin.strategy}, which takes {pin.strategy.n_devices} devices; the cluster "
                f"has {cluster}",
                remedy=f"Pin it to at most {cluster.n_devices} devices.",
                call=name,
            )
        try:
            mesh_at(cluster, 0, pin.strategy.n_devices)
        except AllocationError as error:
            message = f"call '{name}' is pinned to {pin.strategy}: {error.message}"
            raise AllocationError(message, remedy=error.remedy, call=name) from None
    placed = {name: Allocation(pin.mesh, pin.strategy) for name, pin in pins.items() if pin.mesh is not None}
    check_meshes(graph.subgraph(placed), placed)

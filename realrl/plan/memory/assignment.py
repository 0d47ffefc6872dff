"""Memory of a graph's calls under any allocations: homes, hooks and loads follow from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from realrl.graph.build import topological_calls
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Allocation
from realrl.plan.hooks import HookPlanner
from realrl.plan.memory.load import Load
from realrl.plan.memory.model import MemoryModel, Peaks
from realrl.plan.memory.plan import CallState, RoleState

if TYPE_CHECKING:
    import networkx as nx


class AssignedMemory:
    """A graph whose calls may run anywhere.

    Args:
        model: counts the bytes; several graphs or settings may share one.
        graph: from `build_graph`.
        roles: roles that have parameters; their homes are those of the assignment, and not these.
        load_of: returns the load of a call, which depends on dp and pp of its allocation alone.
        weightless, offload_frozen: see `plan_hooks`.
    """

    def __init__(
        self,
        model: MemoryModel,
        graph: nx.DiGraph,
        roles: Mapping[str, RoleState],
        *,
        load_of: Callable[[MFCDef, Allocation], Load],
        weightless: Collection[str] = (),
        offload_frozen: bool = False,
    ) -> None:
        self.model = model
        self._hooks = HookPlanner(graph, weightless=weightless, offload_frozen=offload_frozen)
        self._calls, self._roles, self._load_of = topological_calls(graph), roles, load_of
        self._loads: dict[tuple[str, int, int], Load] = {}

    def peaks(
        self,
        allocations: Mapping[str, Allocation],
        *,
        runtime_bytes: Mapping[int, int] | None = None,
        is_host_memory: bool = False,
    ) -> Peaks:
        """Return what every device needs in the call that needs the most; see `MemoryModel.peaks`.

        Args:
            allocations: call -> mesh and strategy, in the rank order of the run.
            runtime_bytes, is_host_memory: as for `MemoryModel.peaks`.

        Raises:
            AllocationError: a strategy does not fit a model, or hooks contradict each other.
        """
        states = self.states(allocations)
        return self.model.peaks(*states, runtime_bytes=runtime_bytes, is_host_memory=is_host_memory)

    def states(self, allocations: Mapping[str, Allocation]) -> tuple[dict[str, RoleState], list[CallState]]:
        """Return the input of `MemoryModel.plan`, to which a caller may add other calls.

        Raises:
            AllocationError: hooks contradict each other.
        """
        hooks = self._hooks.plan(allocations)
        roles = {
            name: replace(role, home=allocations[self._hooks.home_calls[name]]) for name, role in self._roles.items()
        }
        states = [
            CallState(mfc.name, mfc.role, mfc.interface_type, place, hooks[mfc.name], self._load(mfc, place))
            for mfc in self._calls
            for place in (allocations[mfc.name],)
        ]
        return roles, states

    def _load(self, mfc: MFCDef, allocation: Allocation) -> Load:
        key = mfc.name, allocation.strategy.dp, allocation.strategy.pp
        if key not in self._loads:
            self._loads[key] = self._load_of(mfc, allocation)
        return self._loads[key]

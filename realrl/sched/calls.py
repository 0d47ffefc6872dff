"""Calls of a graph for the scheduler: producers before consumers, each with the steps of others that it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from realrl.graph.build import (
    LeadWait,
    StepWait,
    drop_feeders,
    drop_gates,
    lead_waits,
    topological_calls,
    version_edges,
    writer_waits,
)
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation
from realrl.plan.fused_calls import Fusion
from realrl.plan.hooks import CallHooks, plan_hooks
from realrl.plan.protocols import CallLayout
from realrl.sched.messages import Joins

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class ScheduledCall:
    """A declared call with its allocation, its hooks and its waits.

    Attributes:
        mfc: the declaration.
        partner: the call that trains at the same time on the same devices; empty for none.
        joins: whether the call is the first or the second of such a pair.
        hooks: reallocs and offloads around every dispatch.
        waits_for: steps of other calls that must be finished first.
        leads: readers that must run ahead before this call changes their parameters.
        feeds_drop: the call drops samples or precedes one that does; it sees samples that are dropped later.
        gates: dropping calls that must keep a sample before this call gets it; only where this call feeds a drop.
    """

    mfc: MFCDef
    allocation: Allocation
    hooks: CallHooks
    waits_for: tuple[StepWait, ...] = ()
    leads: tuple[LeadWait, ...] = ()
    feeds_drop: bool = False
    gates: tuple[str, ...] = ()
    partner: str = ""
    joins: Joins = ""

    @property
    def name(self) -> str:
        return self.mfc.name

    @cached_property
    def layout(self) -> CallLayout:
        """Input of the transfer protocols."""
        return CallLayout(self.allocation, self.hooks.home, self.mfc.balanced_dp)

    @cached_property
    def output_keys(self) -> frozenset[str]:
        """Keys that the call gives."""
        return frozenset(self.mfc.output_keys)

    @cached_property
    def extent(self) -> tuple[int, ...]:
        """Global ranks that the call needs to start: its mesh, and the ranks of the hooks before it."""
        return tuple(sorted({*self.ranks, *self.hooks.before_ranks}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the call's mesh."""
        return self.allocation.ranks

    @cached_property
    def changes_parameters(self) -> bool:
        """True if the call trains, or one of its hooks writes into a role."""
        return bool(self.mfc.changed_roles)

    @property
    def is_generate(self) -> bool:
        return self.mfc.interface_type is InterfaceType.GENERATE

    @property
    def reports_metrics(self) -> bool:
        """True if the call's returned metrics go to the log."""
        return self.mfc.is_train or self.mfc.log_return_value


def schedule_calls(
    graph: nx.DiGraph,
    allocations: Mapping[str, Allocation],
    *,
    hooks: Mapping[str, CallHooks] | None = None,
    fusion: Fusion | None = None,
) -> tuple[ScheduledCall, ...]:
    """Return the calls of a graph, producers before consumers.

    Args:
        graph: from `build_graph`.
        allocations: call name -> mesh and strategy.
        hooks: from `plan_hooks`; None: for roles that all have parameters.
        fusion: two calls that train at the same time.
    """
    partners: dict[str, tuple[str, Joins]] = {}
    if fusion is not None:
        partners = {fusion.first: (fusion.second, "opens"), fusion.second: (fusion.first, "closes")}
    waits: dict[str, list[StepWait]] = {}
    for wait in (*version_edges(graph), *writer_waits(graph)):
        waits.setdefault(wait.after, []).append(wait)
    leads, gates, feeders = lead_waits(graph), drop_gates(graph), drop_feeders(graph)
    hooks = plan_hooks(graph, allocations) if hooks is None else hooks
    return tuple(
        ScheduledCall(
            mfc,
            allocations[mfc.name],
            hooks[mfc.name],
            waits_for=tuple(waits.get(mfc.name, ())),
            leads=tuple(lead for lead in leads if lead.writer == mfc.name),
            feeds_drop=mfc.name in feeders,
            gates=gates[mfc.name],
            partner=partners.get(mfc.name, ("", ""))[0],
            joins=partners.get(mfc.name, ("", ""))[1],
        )
        for mfc in topological_calls(graph)
    )

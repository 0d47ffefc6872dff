"""Reallocs and offloads around each call: those that allocations imply, and those that the user declares.

The parameters of a role live in one layout, its home: that of its train_step, or else of its first call. A call in
another layout gets them from the home for its duration. Hooks of the user move parameters between the homes of two
roles.

Invariants of `plan_hooks`:
    - every call of the graph has an entry, in declared order;
    - a call whose allocation is not its role's home has one implied realloc, from the home to its own allocation, as
      the last of `before`; no other call has any, a train_step never;
    - each `ParamReallocHook` between two roles stands once, on its call's side, in the order given, from home to home;
      one within a role stands nowhere, because it is implied;
    - an `Offload` stands in `after` only, behind every realloc of the same list that has its role at one end;
    - with `offload_frozen`, a role that is not trained, whose home shares devices with calls of other roles, is
      offloaded after the last call of a step that runs on it and after every hook that writes into it;
    - no realloc has a role at one end that a call offloads which no data and no wait orders against it;
    - a role without weights stands nowhere;
    - a `HookPlanner` gives the same hooks for the same allocations, whatever it planned before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from realrl.errors import AllocationError
from realrl.graph.build import calls, data_graph, home_calls, writer_waits
from realrl.graph.mfc import Hook, MFCDef, OffloadHook, ParamReallocHook
from realrl.mesh.device_mesh import Allocation
from realrl.shape import DecoderConfig

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Realloc:
    """Parameters of `source` move: ``target = eta * source + (1 - eta) * target``.

    Attributes:
        source, target: roles; the same one where a call runs in another layout than its role's home.
        source_allocation: the home of `source`.
        target_allocation: the home of `target`, or the call's allocation where `is_implied`.
        eta: 1.0 replaces the target.
    """

    source: str
    source_allocation: Allocation
    target: str
    target_allocation: Allocation
    eta: float = 1.0

    @property
    def is_implied(self) -> bool:
        """True if it brings the role's own parameters into the layout of one call, for that call only."""
        return self.source == self.target

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that take part, ascending."""
        return tuple(sorted({*self.source_allocation.ranks, *self.target_allocation.ranks}))


@dataclass(frozen=True)
class Offload:
    """The parameters of a role go to host memory; on each rank, their next use brings them back.

    Attributes:
        allocation: the home of the role.
    """

    role: str
    allocation: Allocation

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that take part, ascending."""
        return self.allocation.ranks


PlannedHook = Realloc | Offload


@dataclass(frozen=True)
class CallHooks:
    """Hooks around every dispatch of one call.

    Attributes:
        before, after: hooks in order of execution.
        home: layout in which the parameters of the call's role live; None if it has none.
    """

    before: tuple[PlannedHook, ...] = ()
    after: tuple[PlannedHook, ...] = ()
    home: Allocation | None = None

    @property
    def before_ranks(self) -> tuple[int, ...]:
        """Global ranks that a hook before the call concerns, ascending."""
        return _ranks_of(self.before)

    @property
    def after_ranks(self) -> tuple[int, ...]:
        """Global ranks that a hook after the call concerns, ascending."""
        return _ranks_of(self.after)


def _ranks_of(hooks: tuple[PlannedHook, ...]) -> tuple[int, ...]:
    return tuple(sorted({rank for hook in hooks for rank in hook.ranks}))


NO_HOOKS = CallHooks()


@dataclass(frozen=True)
class Overlap:
    """Parameters that come to calls early, or stay; made by `realrl.plan.memory.overlap`.

    Attributes:
        stays: calls whose parameters stay in the call's layout between the batches of a step.
        resident: calls whose parameters stay there for the whole run.
        early: call -> calls beside which its parameters may travel, or be back from host memory already.
    """

    stays: frozenset[str] = frozenset()
    resident: frozenset[str] = frozenset()
    early: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def notes(self) -> dict[str, str]:
        """Call -> when its parameters come, and how long they stay, in a few words; only calls with such a decision."""
        words = {"come early": self.early, "stay for the step": self.stays, "live in two layouts": self.resident}
        names = sorted({*self.early, *self.stays, *self.resident})
        return {name: " and ".join(text for text, those in words.items() if name in those) for name in names}


NO_OVERLAP = Overlap()

_SAME_SHAPE = (
    "vocab_size",
    "hidden_size",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "intermediate_size",
    "tied_embeddings",
    "attention_bias",
    "o_bias",
    "mlp_bias",
    "gated_mlp",
    "norm_bias",
    "qk_norm",
    "norm_place",
    "sinks",
    "learned_positions",
    "max_positions",
    "moe",
    "head",
    "lora",
)


def role_homes(
    graph: nx.DiGraph, allocations: Mapping[str, Allocation], *, weightless: Collection[str] = ()
) -> dict[str, Allocation]:
    """Return role -> home of its parameters, for every role that has any.

    Args:
        graph: from `build_graph`.
        allocations: call -> mesh and strategy.
        weightless: roles without parameters, such as a reward that is a Python function.
    """
    return {role: allocations[name] for role, name in home_calls(graph).items() if role not in weightless}


def plan_hooks(
    graph: nx.DiGraph,
    allocations: Mapping[str, Allocation],
    *,
    weightless: Collection[str] = (),
    offload_frozen: bool = False,
) -> dict[str, CallHooks]:
    """Plan the hooks around every dispatch of every call.

    Args:
        graph: from `build_graph`, which has refused hooks that contradict each other.
        allocations: call -> mesh and strategy.
        weightless: roles without parameters; their calls run in any layout, and an `OffloadHook` on them has no effect.
        offload_frozen: keep roles that are not trained in host memory while they are not used.

    Raises:
        AllocationError: a `ParamReallocHook` has a role without parameters at one end, or a call offloads a role while
            another one may be moving its parameters.
    """
    return HookPlanner(graph, weightless=weightless, offload_frozen=offload_frozen).plan(allocations)


class HookPlanner:
    """Hooks of a graph's calls under any allocations; what depends on the graph alone is found once.

    Args:
        graph, weightless, offload_frozen: as for `plan_hooks`.
    """

    def __init__(self, graph: nx.DiGraph, *, weightless: Collection[str] = (), offload_frozen: bool = False) -> None:
        self._graph, self._calls = graph, calls(graph)
        self.home_calls = {role: name for role, name in home_calls(graph).items() if role not in weightless}
        self._last_calls = _last_calls(graph, self.home_calls) if offload_frozen else {}
        self._written = {mfc.name: {target for _, target in mfc.reallocs} for mfc in self._calls}
        self._unordered: dict[str, tuple[str, ...]] = {}

    def plan(self, allocations: Mapping[str, Allocation]) -> dict[str, CallHooks]:
        """Plan the hooks around every dispatch of every call.

        Args:
            allocations: call -> mesh and strategy.

        Raises:
            AllocationError: as `plan_hooks`.
        """
        homes = {role: allocations[name] for role, name in self.home_calls.items()}
        idle_after = {
            role: last
            for role, last in self._last_calls.items()
            if any(m.role != role and homes[role].mesh.overlaps(allocations[m.name].mesh) for m in self._calls)
        }
        plan: dict[str, CallHooks] = {}
        for mfc in self._calls:
            before = [planned for hook in mfc.pre_hooks for planned in _asked_for(mfc, hook, homes)]
            after = [planned for hook in mfc.post_hooks for planned in _asked_for(mfc, hook, homes)]
            home = homes.get(mfc.role)
            if home is not None and allocations[mfc.name] != home:
                before.append(Realloc(mfc.role, home, mfc.role, allocations[mfc.name]))
            for role, last in idle_after.items():
                if (mfc.name == last or role in self._written[mfc.name]) and Offload(role, homes[role]) not in after:
                    after.append(Offload(role, homes[role]))
            plan[mfc.name] = CallHooks(tuple(before), tuple(after), home)
        self._check_offloads(plan)
        return plan

    def _check_offloads(self, plan: Mapping[str, CallHooks]) -> None:
        for name, hooks in plan.items():
            homes = {hook.role: hook.allocation for hook in hooks.after if isinstance(hook, Offload)}
            if not homes:
                continue
            if name not in self._unordered:
                self._unordered[name] = _unordered_calls(self._graph, name)
            for other in self._unordered[name]:
                for hook in (*plan[other].before, *plan[other].after):
                    if not isinstance(hook, Realloc) or not homes.keys() & {hook.source, hook.target}:
                        continue
                    role = hook.source if hook.source in homes else hook.target
                    there = hook.target_allocation if hook.source == role else hook.source_allocation
                    raise AllocationError(
                        f"call '{name}' offloads role '{role}' after it, while call '{other}', which nothing orders "
                        f"against it, moves the role's parameters between {homes[role]} and {there}",
                        remedy=f"Let '{other}' run where the role lives, allocation.calls.{other}={homes[role]}, or "
                        "leave the OffloadHook out.",
                        call=name,
                    )


def check_realloc_shapes(graph: nx.DiGraph, shapes: Mapping[str, DecoderConfig]) -> None:
    """Check that every hook that moves parameters between two roles has models of one shape at its ends.

    Args:
        graph: from `build_graph`.
        shapes: role -> shape of its model, where known; other roles are not checked.

    Raises:
        AllocationError: names the call, both roles and the first difference.
    """
    for mfc in calls(graph):
        for source, target in mfc.reallocs:
            if source not in shapes or target not in shapes:
                continue
            for name in _SAME_SHAPE:
                here, there = (_value_of(shapes[role], name) for role in (source, target))
                if here != there:
                    remedy = f"Give both the same model: models.{target}.path = models.{source}.path."
                    if name == "head":
                        remedy = "Leave the hook out, or declare both roles with one head: Role(..., head=...)."
                    if name == "lora":
                        remedy = f"Leave out models.{source if here else target}.lora: no hook can merge adapters."
                    raise AllocationError(
                        f"a hook of call '{mfc.name}' moves parameters from role '{source}' to role '{target}', but "
                        f"their models differ: {name} is {here} and {there}",
                        remedy=remedy,
                        call=mfc.name,
                    )


def _value_of(shape: DecoderConfig, field: str) -> object:
    """Return a shape's field as far as parameters depend on it: unless learned, positions do not count."""
    if field == "max_positions" and not shape.learned_positions:
        return None
    if field == "moe":
        moe = shape.moe
        if moe is None:
            return None
        sizes = f"{moe.n_experts} experts of size {moe.intermediate_size}, {moe.top_k} a token"
        sizes += " with biases" if moe.biases else ""
        return sizes + (f", but in layers {', '.join(map(str, moe.dense_layers))}" if moe.dense_layers else "")
    value: object = getattr(shape, field)
    return value


def _asked_for(mfc: MFCDef, hook: Hook, homes: Mapping[str, Allocation]) -> tuple[PlannedHook, ...]:
    """Return the planned form of one hook of the user."""
    if isinstance(hook, OffloadHook):
        return (Offload(mfc.role, homes[mfc.role]),) if mfc.role in homes else ()
    assert isinstance(hook, ParamReallocHook)
    source = mfc.role if hook.source is None else hook.source.role
    target = mfc.role if hook.target is None else hook.target.role
    if source == target:
        return ()
    for role in (source, target):
        if role not in homes:
            raise AllocationError(
                f"a hook of call '{mfc.name}' moves parameters from role '{source}' to role '{target}', but "
                f"'{role}' has none",
                remedy="Leave the hook out, or give the role a model.",
                call=mfc.name,
            )
    return (Realloc(source, homes[source], target, homes[target], hook.eta),)


def _unordered_calls(graph: nx.DiGraph, name: str) -> tuple[str, ...]:
    """Return the calls that neither data nor a wait of the same step orders against a call."""
    import networkx as nx

    order = data_graph(graph)
    order.add_edges_from((wait.before, wait.after) for wait in writer_waits(graph) if wait.lag == 0)
    ordered = nx.ancestors(order, name) | nx.descendants(order, name) | {name}
    return tuple(other for other in order if other not in ordered)


def _last_calls(graph: nx.DiGraph, with_home: Collection[str]) -> dict[str, str]:
    """Return frozen role with a home -> its call that comes after all calls that read it, if there is one."""
    import networkx as nx

    data = data_graph(graph)
    trained = {mfc.role for mfc in calls(graph) if mfc.is_train}
    last: dict[str, str] = {}
    for role in (role for role in with_home if role not in trained):
        readers = [mfc.name for mfc in calls(graph) if role in mfc.read_roles and role not in mfc.changed_roles]
        own = [mfc.name for mfc in calls(graph) if mfc.role == role]
        for name in own:
            if set(readers) - {name} <= nx.ancestors(data, name):
                last[role] = name
    return last

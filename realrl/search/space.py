"""The choices that a plan has for each call: strategy, micro-batches, and the settings of a role at its home.

Invariants of `choices_of`:
    - every choice passes the checks of `realrl.plan.allocation` for its call on a mesh of its size;
    - a pinned call has choices of the pinned strategy alone;
    - equal input gives equal choices, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Literal, get_args

from realrl.errors import AllocationError, ConfigError
from realrl.graph.build import call, home_calls
from realrl.graph.mfc import DEFAULT_PROTOCOL, InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.mesh.notation import parse_mesh, parse_strategy
from realrl.plan.allocation import check_cut, check_n_seqs, check_protocols, check_shapes
from realrl.plan.backends import BACKENDS, TrainedRole, check_backend
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.samples.partition import default_n_mbs
from realrl.shape import DecoderConfig, DType

if TYPE_CHECKING:
    import networkx as nx

_MOST_STAGES = 16
_MOST_ACROSS = 8  # devices of a tensor-parallel group of several nodes
_MOST_NODES = 16  # of clusters of which meshes have any number
_FACTORS = (4, 16)  # micro-batches: as many as by default, then so many times as many
_PRECISIONS: Mapping[DType, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


Span = tuple[int, int]
"""First rank of a mesh, and the one behind its last."""

Placement = tuple[Span, ParallelStrategy]

Relation = Literal["same", "inside", "around", "beside", "apart"]
"""Place of a mesh, seen from another one: "beside" is disjoint in the same node, "apart" disjoint otherwise."""

RELATIONS: tuple[Relation, ...] = get_args(Relation)


@dataclass(frozen=True)
class Choice:
    """All that a plan decides for a call but the place of its mesh.

    Attributes:
        n_mbs: micro-batches of a minibatch and rank; None for as many as the declaration says, or the default.
        zero_stage, checkpoints, offloads: of the role, in its home call: stage of ZeRO, blocks computed again in the
            backward pass, and host memory for the optimizer of a trained role, or for a frozen one between its calls.
    """

    strategy: ParallelStrategy
    n_mbs: int | None = None
    zero_stage: int = 0
    checkpoints: bool = False
    offloads: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.strategy, self.n_mbs or 0, self.zero_stage, self.checkpoints, self.offloads))

    def __hash__(self) -> int:  # as that of strategies
        return self._hash

    @cached_property
    def n_devices(self) -> int:
        return self.strategy.n_devices

    @property
    def order(self) -> tuple[int, ...]:
        """A total order of choices, simple ones first."""
        s = self.strategy
        settings = self.offloads, self.checkpoints, self.zero_stage, self.n_mbs or 0
        return (s.n_devices, s.pp, s.tp, s.sp, *settings)

    def __str__(self) -> str:
        parts = [
            str(self.strategy),
            f"n_mbs={self.n_mbs}" if self.n_mbs else "",
            f"zero={self.zero_stage}" if self.zero_stage else "",
            "checkpointing" if self.checkpoints else "",
            "offload" if self.offloads else "",
        ]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Placed:
    """A call's mesh and the choice of all else."""

    span: Span
    choice: Choice

    @cached_property
    def placement(self) -> Placement:
        """Mesh and strategy, which decide which rank has which part of a model."""
        return self.span, self.choice.strategy


@dataclass(frozen=True)
class RoleSpace:
    """A role, as far as its choices depend on it.

    Attributes:
        model: its shape; None for a role without parameters.
        backend: backend that trains it.
        zero_stages: stages to choose from; () for all that the backend supports.
        checkpoints, offloads: what may be chosen, see `Choice`; one value where the configuration leaves no choice.
    """

    model: DecoderConfig | None
    backend: str = "native"
    zero_stages: tuple[int, ...] = ()
    checkpoints: tuple[bool, ...] = (False, True)
    offloads: tuple[bool, ...] = (False, True)


@dataclass(frozen=True)
class Pin:
    """The part of an allocation that a user has decided; `mesh` is None where only the strategy is given."""

    strategy: ParallelStrategy
    mesh: DeviceMesh | None = None


def pin_from(text: str, cluster: Cluster) -> Pin:
    """Read ``strategy`` or ``strategy@mesh``, as `allocation.calls` has them.

    Raises:
        AllocationError: the text is neither, or the strategy has another size than its mesh.
    """
    strategy, at, mesh = text.partition("@")
    if not at:
        return Pin(parse_strategy(strategy))
    allocation = Allocation(parse_mesh(mesh, cluster), parse_strategy(strategy))
    return Pin(allocation.strategy, allocation.mesh)


def mesh_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Return the sizes that meshes of a cluster can have, ascending.

    In a cluster of more than 16 nodes, numbers of nodes have at most three significant bits: 1 to 8, 10, 12, 14, 16,
    20, ..., or are all of them.
    """
    size, n_nodes = cluster.n_devices_per_node, cluster.n_nodes
    inside = [1 << power for power in range(size.bit_length()) if 1 << power < size]
    rough = [n for n in range(1, n_nodes) if n_nodes <= _MOST_NODES or not n % (1 << max(0, n.bit_length() - 3))]
    return (*inside, *(size * n for n in (*rough, n_nodes)))


@lru_cache(maxsize=1024)
def mesh_at(cluster: Cluster, first: int, n_devices: int) -> DeviceMesh:
    """Return the mesh of so many devices from rank `first`."""
    return DeviceMesh(cluster, tuple(range(first, first + n_devices)))


def choices_of(
    graph: nx.DiGraph,
    name: str,
    roles: Mapping[str, RoleSpace],
    cluster: Cluster,
    *,
    pin: Pin | None = None,
) -> tuple[Choice, ...]:
    """Return the choices of one call.

    Args:
        graph: from `build_graph`.
        roles: all roles.
        pin: what the user has decided.

    Raises:
        AllocationError: the pin breaks a rule; the message says which.
    """
    mfc, role = call(graph, name), roles[call(graph, name).role]
    is_home = home_calls(graph)[mfc.role] == name and role.model is not None
    found: list[Choice] = []
    legal: dict[object, bool] = {}
    for strategy, mesh in _layouts(cluster, role, pin):
        key = strategy.dp if mfc.protocol == DEFAULT_PROTOCOL else strategy  # how the usual protocol divides samples
        if key not in legal:
            try:
                _check(graph, mfc, role, Allocation(mesh, strategy), is_pinned=pin is not None)
                legal[key] = True
            except AllocationError:
                if pin is not None:
                    raise
                legal[key] = False
        if not legal[key]:
            continue
        settings = _settings(mfc, role, strategy) if is_home else [(0, False, False)]
        for n_mbs, (zero_stage, checkpoints, offloads) in product(_numbers(mfc, role, strategy), settings):
            found.append(Choice(strategy, n_mbs, zero_stage, checkpoints, offloads))
    if pin is not None and not found:
        raise _unsupported(mfc, role, pin.strategy)
    return tuple(sorted(found, key=lambda choice: choice.order))


def _layouts(cluster: Cluster, role: RoleSpace, pin: Pin | None) -> Iterator[tuple[ParallelStrategy, DeviceMesh]]:
    """Yield every strategy that can cut the role's model, with a mesh of its size; or the pinned one."""
    if pin is not None:
        yield pin.strategy, pin.mesh or mesh_at(cluster, 0, pin.strategy.n_devices)
        return
    fits: dict[tuple[int, int], bool] = {}
    for size in mesh_sizes(cluster):
        mesh = mesh_at(cluster, 0, size)
        for strategy in strategies_of(size, cluster, role):
            cut = strategy.tp, strategy.pp
            if cut not in fits:
                fits[cut] = _can_cut(role, *cut)
            if fits[cut]:
                yield strategy, mesh


def _can_cut(role: RoleSpace, tp: int, pp: int) -> bool:
    """Return True if `check_shapes` lets a strategy cut the role's model."""
    if role.model is None:
        return True
    try:
        check_cut(parameter_specs(role.model), ParallelStrategy(tp=tp, pp=pp))
    except AllocationError:
        return False
    return True


def strategies_of(n_devices: int, cluster: Cluster, role: RoleSpace) -> Iterator[ParallelStrategy]:
    """Yield strategies of so many devices; a tensor-parallel group shares out its rows.

    Such a group lies inside a node, or is a few whole nodes with at most 8 devices in all. A role without parameters
    has data-parallel strategies alone.
    """
    if role.model is None:
        yield ParallelStrategy(dp=n_devices)
        return
    divisors, node = [d for d in range(1, n_devices + 1) if n_devices % d == 0], cluster.n_devices_per_node
    widths = [tp for tp in divisors if node % tp == 0 or (tp % node == 0 and tp <= _MOST_ACROSS)]
    for pp in (d for d in divisors if d <= min(role.model.n_layers, _MOST_STAGES)):
        for tp in widths:
            if n_devices % (pp * tp) == 0:
                yield ParallelStrategy(n_devices // (pp * tp), tp, pp, sp=tp > 1)


def _check(graph: nx.DiGraph, mfc: MFCDef, role: RoleSpace, allocation: Allocation, *, is_pinned: bool) -> None:
    """Check one call by itself, as `check_supported` and `check_shapes` check it among the others."""
    alone, allocations = graph.subgraph([mfc.name]), {mfc.name: allocation}
    check_protocols(alone, allocations, weightless=[mfc.role] if role.model is None else [])
    check_n_seqs(alone, allocations)
    if role.model is not None and is_pinned:
        check_shapes(alone, allocations, {mfc.role: role.model})


def _numbers(mfc: MFCDef, role: RoleSpace, strategy: ParallelStrategy) -> Iterator[int | None]:
    """Yield numbers of micro-batches."""
    yield None
    is_open = mfc.n_mbs is None and mfc.max_tokens_per_mb is None
    if role.model is None or mfc.interface_type is InterfaceType.GENERATE or not is_open:
        return
    usual = default_n_mbs(strategy.pp, is_train=mfc.is_train)
    most = mfc.n_seqs // mfc.n_minibatches // strategy.dp
    for factor in _FACTORS:
        if usual * factor <= most:
            yield usual * factor


def _settings(mfc: MFCDef, role: RoleSpace, strategy: ParallelStrategy) -> Iterator[tuple[int, bool, bool]]:
    """Yield stage of ZeRO, checkpointing and offload."""
    if not mfc.is_train:
        for offloads in role.offloads:
            yield 0, False, offloads
        return
    for offloads in role.offloads if BACKENDS[role.backend].offloads else (False,):
        stages = supported_stages(mfc.role, role, strategy, offloads=offloads)
        for stage, checkpoints in product(stages if strategy.dp > 1 else stages[:1], role.checkpoints):
            yield stage, checkpoints, offloads


def supported_stages(name: str, role: RoleSpace, strategy: ParallelStrategy, *, offloads: bool) -> list[int]:
    """Return the stages of ZeRO that may be chosen and that the backend of a trained role has in a layout, ascending.

    Args:
        offloads: True if the optimizer is in host memory.
    """
    found = []
    for stage in sorted(role.zero_stages or BACKENDS[role.backend].stages):
        try:
            check_backend(_trained(name, role, strategy, stage, offloads))
        except ConfigError:
            continue
        found.append(stage)
    return found


def _unsupported(mfc: MFCDef, role: RoleSpace, strategy: ParallelStrategy) -> AllocationError:
    """Return the reason why a trained role has no setting under a pinned strategy."""
    stage, offloads = (role.zero_stages or BACKENDS[role.backend].stages)[0], min(role.offloads)
    try:
        check_backend(_trained(mfc.role, role, strategy, stage, offloads))
    except ConfigError as error:
        message, remedy = f"call '{mfc.name}' is pinned to {strategy}, but {error.message}", error.remedy
        return AllocationError(message, remedy=remedy, call=mfc.name)
    return AllocationError(f"call '{mfc.name}' has no settings with {strategy}", call=mfc.name)


def _trained(name: str, role: RoleSpace, strategy: ParallelStrategy, stage: int, offloads: bool) -> TrainedRole:
    assert role.model is not None, "what is trained has parameters"
    return TrainedRole(
        name=name,
        backend=role.backend,
        zero_stage=stage,
        offload=offloads,
        precision=_PRECISIONS[role.model.dtype],
        strategy=strategy,
        has_adapters=role.model.lora is not None,
    )


def relation(seen_from: Span, other: Span, n_per_node: int) -> Relation:
    """Return where a mesh lies, seen from another one that it nests with or is disjoint from."""
    if seen_from == other:
        return "same"
    if seen_from[0] <= other[0] and other[1] <= seen_from[1]:
        return "inside"
    if other[0] <= seen_from[0] and seen_from[1] <= other[1]:
        return "around"
    return "beside" if seen_from[0] // n_per_node == other[0] // n_per_node else "apart"


def segments_of(spans: Sequence[Span]) -> tuple[list[int], list[range]]:
    """Return the starts of stretches of ranks that the same spans cover, and the stretches of each span."""
    bounds = sorted({bound for span in spans for bound in span})
    place = {bound: i for i, bound in enumerate(bounds)}
    return bounds, [range(place[first], place[end]) for first, end in spans]

"""Two train calls that compute at the same time on the devices that they share: which may, where, and in what order.

The first one's pipeline runs forwards along its mesh, the second one's the other way: its role's home, and every other
call of the role in the same allocation, have the stages in reversed order.

Invariants:
    - calls that are fused start together, and nothing makes one of them wait for the other, at any step;
    - data-parallel and tensor ranks of both are the same devices, so the stages of any two pipelines either share
      all devices or none;
    - the order of a device depends on the numbers of micro-batches and on the two models, not on times or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from realrl.errors import AllocationError, ConfigError, did_you_mean
from realrl.graph.build import call, calls, lead_waits, wait_graph
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Allocation
from realrl.plan.fusion.instance import Instance, Model, on_block
from realrl.plan.fusion.messages import steps_of
from realrl.plan.fusion.quick import fused_orders
from realrl.plan.fusion.schedule import FusedSchedule
from realrl.plan.parameters.adapters import is_adapter
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.stages import stage_layers, stage_of_layers
from realrl.plan.pipeline import Schedule
from realrl.shape import DecoderConfig

if TYPE_CHECKING:
    import networkx as nx

KEY = "allocation.fuse"


@dataclass(frozen=True)
class Fusion:
    """Two calls that train at the same time on the same devices; the second one's stages are in reversed order."""

    first: str
    second: str

    @property
    def calls(self) -> tuple[str, str]:
        return self.first, self.second

    def partner_of(self, name: str) -> str:
        """Return the other one of both calls."""
        return self.second if name == self.first else self.first

    def __contains__(self, name: object) -> bool:
        return name in self.calls

    def __str__(self) -> str:
        return f"{self.first} + {self.second}"


# ---------------------------------------------------------------- which calls


def fusion_of(graph: nx.DiGraph, names: Sequence[str]) -> Fusion | None:
    """Return the calls to fuse, as far as the graph allows it; None where none are named.

    Args:
        graph: from `build_graph`.
        names: value of `allocation.fuse`.

    Raises:
        ConfigError: there are not two names of two train calls with equally large batches.
        AllocationError: one of them waits for the other.
    """
    if not names:
        return None
    known, text = [mfc.name for mfc in calls(graph)], _key(names)
    trained = [mfc.name for mfc in calls(graph) if mfc.is_train]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{text}: there is no call '{name}'",
                remedy=f"The calls that train are {', '.join(trained) or '(none)'}.{did_you_mean(name, trained)}",
            )
        if name not in trained:
            kind = call(graph, name).interface_type.value
            raise ConfigError(
                f"{text}: call '{name}' does not train (it is a call of type {kind})",
                remedy=f"The calls that train are {', '.join(trained) or '(none)'}.",
            )
    if len(names) != 2:
        how_many = "one call" if len(names) == 1 else f"{len(names)} calls"
        raise ConfigError(f"{text} names {how_many}", remedy="Name two, which will train at the same time.")
    first, second = (call(graph, name) for name in names)
    if first.name == second.name:
        raise ConfigError(f"{text} names the same call twice", remedy="Name two different ones.")
    if first.n_seqs != second.n_seqs:
        raise ConfigError(
            f"{text}: '{first.name}' has n_seqs={first.n_seqs} and '{second.name}' n_seqs={second.n_seqs}, so they do "
            "not train equally often",
            remedy="Give both the same n_seqs.",
        )
    _check_independent(graph, first, second)
    return Fusion(first.name, second.name)


def _check_independent(graph: nx.DiGraph, first: MFCDef, second: MFCDef) -> None:
    for writer, reader in ((first, second), (second, first)):
        roles = sorted(reader.read_roles & writer.changed_roles)
        if roles:
            raise AllocationError(
                f"{_key((first.name, second.name))}: '{writer.name}' changes role '{roles[0]}', which '{reader.name}' "
                "reads in a hook",
                remedy="Such calls run one after the other: leave allocation.fuse out, or the hook.",
                call=reader.name,
            )
    for before, after in ((first, second), (second, first)):
        path = _waiting_path(graph, before.name, after.name)
        if path:
            raise AllocationError(
                f"{_key((first.name, second.name))}: '{after.name}' waits for '{before.name}' "
                f"({' -> '.join(path)}), so they cannot train at the same time",
                remedy="Leave allocation.fuse out.",
                call=after.name,
            )


def _waiting_path(graph: nx.DiGraph, before: str, after: str) -> list[str]:
    """Return calls from `before` to `after` that each wait for the one before them, at the same or a later step."""
    import networkx as nx

    # an edge's weight: how many steps later the waiting call is, negated for calls that wait for later steps
    waits = nx.DiGraph()
    for first, second, lag in wait_graph(graph).edges(data="lag"):
        waits.add_edge(first, second, lag=lag)
    for lead in lead_waits(graph):
        known = waits.get_edge_data(lead.reader, lead.writer, {"lag": 0})["lag"]
        waits.add_edge(lead.reader, lead.writer, lag=min(known, -lead.lead))
    if before not in waits or after not in waits:
        return []
    try:
        lag, path = nx.single_source_bellman_ford(waits, before, target=after, weight="lag")
    except nx.NetworkXNoPath:
        return []
    return list(path) if lag <= 0 else []


def check_places(fusion: Fusion, allocations: Mapping[str, Allocation]) -> None:
    """Check that both calls cut their devices in the same way.

    Args:
        allocations: call -> mesh and strategy.

    Raises:
        AllocationError: meshes or strategies differ, or there are no stages.
    """
    first, second = (allocations[name] for name in fusion.calls)
    text = _key(fusion.calls)
    if first.mesh != second.mesh:
        raise AllocationError(
            f"{text}: '{fusion.first}' trains on {first} and '{fusion.second}' on {second}, not on the same devices",
            remedy=f"Put both on one mesh: allocation.calls.{fusion.second}={first}.",
            call=fusion.second,
            mesh=str(second.mesh),
        )
    if first.strategy != second.strategy:
        raise AllocationError(
            f"{text}: '{fusion.first}' is cut as {first.strategy} and '{fusion.second}' as {second.strategy}, so their "
            "stages have not the same devices",
            remedy=f"Cut both alike: allocation.calls.{fusion.second}={first}.",
            call=fusion.second,
            mesh=str(second.mesh),
        )
    if first.strategy.vpp > 1:
        raise AllocationError(
            f"{text}: {first} has virtual stages, whose pipeline cannot be fused with another one",
            remedy="Leave virtual_stages out for both calls, or allocation.fuse.",
            call=fusion.first,
            mesh=str(first.mesh),
        )
    if first.strategy.pp < 2:
        raise AllocationError(
            f"{text}: {first} has one pipeline stage, and so no bubbles that the other call could fill",
            remedy="Give both calls the same strategy with pp=2 or more, or leave allocation.fuse out.",
            call=fusion.first,
            mesh=str(first.mesh),
        )


def check_trainers(fusion: Fusion, backends: Mapping[str, str]) -> None:
    """Check that both roles are trained by the native backend.

    Args:
        backends: call -> name of its role's backend.

    Raises:
        ConfigError: one of them has another one, which runs its own pipeline.
    """
    for name in fusion.calls:
        if backends[name] != "native":
            raise ConfigError(
                f"{_key(fusion.calls)}: call '{name}' trains with backend={backends[name]}, which runs its own "
                "pipeline",
                remedy="Use backend=native for both roles, or leave allocation.fuse out.",
            )


# ---------------------------------------------------------------- where


def reversed_stages(allocation: Allocation) -> Allocation:
    """Return the allocation with its pipeline stages in reversed order; data and tensor ranks stay."""
    s = allocation.strategy
    places = [
        s.mesh_rank(pp_rank=s.pp - 1 - pp_rank, dp_rank=dp_rank, tp_rank=tp_rank)
        for pp_rank, dp_rank, tp_rank in map(s.coordinates, range(s.n_devices))
    ]
    return replace(allocation, order=tuple(allocation.ranks[place] for place in places))


def with_reversed_home(
    graph: nx.DiGraph, allocations: Mapping[str, Allocation], fusion: Fusion | None
) -> dict[str, Allocation]:
    """Return the allocations, with reversed stages for the second role of a fusion wherever it is in its home."""
    if fusion is None:
        return dict(allocations)
    home, role = allocations[fusion.second], call(graph, fusion.second).role
    return {
        mfc.name: reversed_stages(home) if mfc.role == role and allocations[mfc.name] == home else allocations[mfc.name]
        for mfc in calls(graph)
    }


# ---------------------------------------------------------------- in what order


@dataclass(frozen=True)
class FusedModel:
    """A model of a fusion, as far as its times and memory depend on it.

    Attributes:
        work: of each stage, elements of the matrices that a token meets.
        activation: of each stage, memory that a token takes from its forward to its backward, in any unit that both
            models share.
        recomputes: True if a backward computes the forward again.
        samples: share of a batch in a minibatch.
    """

    work: tuple[int, ...]
    activation: tuple[int, ...]
    recomputes: bool = False
    samples: float = 1.0

    @classmethod
    def of(cls, config: DecoderConfig, pp: int, *, recomputes: bool, n_minibatches: int) -> FusedModel:
        """Return what is known of a decoder that is cut in `pp` stages."""
        stages = stage_layers(config, pp)
        stage_of = stage_of_layers(stages)
        work = [0] * pp
        for spec in parameter_specs(config):
            if is_adapter(spec.name) or len(spec.shape) < 2:
                continue
            if isinstance(spec.layer, int):
                work[stage_of[spec.layer]] += spec.n_elements_per_token
            elif "head" in spec.layers:
                work[-1] += spec.n_elements
        # what a block keeps grows with its widths; where it is computed again, only its input is kept
        width = 2 * config.hidden_size if recomputes else 8 * config.hidden_size + 3 * config.intermediate_size
        return cls(
            tuple(work), tuple(sum(map(len, chunks)) * width for chunks in stages), recomputes, 1.0 / n_minibatches
        )

    def placed(self, name: str, n_micro_batches: int, *, is_reversed: bool) -> Model:
        """Return the model with micro-batches of equal size, for a search."""
        share = self.samples / n_micro_batches
        return Model(
            name,
            len(self.work),
            n_micro_batches,
            forward=[work * share for work in self.work],
            backward=[(3 if self.recomputes else 2) * work * share for work in self.work],
            activation=[size * share for size in self.activation],
            is_reversed=is_reversed,
        )


@dataclass(frozen=True)
class FusedModels:
    """Both models of a fusion; decides the order of their tasks on each device of a pipeline.

    Devices have the numbers of the first model's stages. The first model's chunks are its stages; the second one's
    follow them.
    """

    first: FusedModel
    second: FusedModel

    def instance(self, n_first: int, n_second: int) -> Instance:
        """Return the problem of a minibatch with these numbers of micro-batches."""
        return on_block(
            [
                self.first.placed("first", n_first, is_reversed=False),
                self.second.placed("second", n_second, is_reversed=True),
            ]
        )

    def schedule(self, n_first: int, n_second: int) -> FusedSchedule:
        """Return the orders of a minibatch of each; equal in every process."""
        return fused_orders(self.instance(n_first, n_second))

    def in_flight(self, n_first: int, n_second: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return for each device the largest numbers of micro-batches of both models that are kept there at once.

        A moment with no more of either model than another moment has is left out. A model without any counts as one
        with one.
        """
        found = []
        for order in self.schedule(n_first, n_second).orders:
            held, moments = [0, 0], set[tuple[int, int]]()
            for task in order:
                held[task.pipeline] += -1 if task.is_backward else 1
                moments.add((max(1, held[0]), max(1, held[1])))
            smaller = {m for m in moments if any(o != m and o[0] >= m[0] and o[1] >= m[1] for o in moments)}
            found.append(tuple(sorted(moments - smaller)))
        return tuple(found)

    def lists(self, n_first: int, n_second: int) -> Schedule:
        """Return the list of each device for the pipeline executor; its messages are posted one by one."""
        return _lists(self, n_first, n_second)


@lru_cache(maxsize=256)
def _lists(models: FusedModels, n_first: int, n_second: int) -> Schedule:
    return steps_of(models.schedule(n_first, n_second))


def _key(names: Sequence[str]) -> str:
    return f"{KEY}=[{','.join(names)}]"

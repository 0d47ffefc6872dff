"""From a resolved configuration to everything that is decided before a process starts: calls, graph, allocations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.config.schema import RunConfig
from realrl.errors import ConfigError, GraphError, did_you_mean
from realrl.experiment import Experiment, Role
from realrl.graph.build import build_graph
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster
from realrl.plan.allocation import plan_allocations

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class RunPlan:
    """One run, decided but not started; the same configuration gives the same plan in every process."""

    config: RunConfig
    experiment: Experiment
    mfcs: tuple[MFCDef, ...]
    graph: nx.DiGraph
    allocations: Mapping[str, Allocation]
    cluster: Cluster

    @property
    def roles(self) -> Mapping[str, Role]:
        """The roles of this run."""
        return self.experiment.roles_for(self.config)

    @property
    def n_workers(self) -> int:
        """One worker per device."""
        return self.cluster.n_devices

    @property
    def dataset_call(self) -> MFCDef:
        """The first call that reads a dataset key."""
        keys = set(self.experiment.dataset.keys)
        return next(mfc for mfc in self.mfcs if keys.intersection(mfc.input_keys))

    @property
    def dataset_role(self) -> str:
        """The role whose tokenizer makes the dataset's tokens."""
        return self.dataset_call.role

    @property
    def dataset_rank(self) -> int:
        """The rank that holds the dataset: the first of `dataset_call`."""
        return self.allocations[self.dataset_call.name].ranks[0]

    @property
    def samples_per_step(self) -> int:
        """Samples that traverse the graph in one step."""
        return max(mfc.n_seqs for mfc in self.mfcs)

    def calls_of(self, role: str) -> tuple[MFCDef, ...]:
        """All calls of one role, in declared order."""
        return tuple(mfc for mfc in self.mfcs if mfc.role == role)

    def role_ranks(self, role: str) -> tuple[int, ...]:
        """Global ranks that hold a role, in mesh order: its calls share one mesh."""
        return self.allocations[self.calls_of(role)[0].name].ranks


def plan_run(config: RunConfig, experiment: Experiment) -> RunPlan:
    """Build the calls, their graph and their allocations.

    Raises:
        GraphError: the MFC list is not a valid graph, or names a role that the experiment does not declare.
        ConfigError: micro-batching is given twice for one call.
        AllocationError: a mesh or strategy does not fit the cluster or the call.
    """
    mfcs = tuple(_with_micro_batching(mfc, config) for mfc in experiment.mfcs(config))
    roles = experiment.roles_for(config)
    _check_roles(mfcs, experiment.name, roles)
    graph = build_graph(mfcs, experiment.dataset.keys)
    cluster = Cluster(config.cluster.n_nodes, config.cluster.n_devices_per_node)
    heads = {name: role.head for name, role in roles.items()}
    allocations = plan_allocations(graph, config.allocation, cluster, heads=heads)
    return RunPlan(config, experiment, mfcs, graph, allocations, cluster)


def _with_micro_batching(mfc: MFCDef, config: RunConfig) -> MFCDef:
    """A call that says nothing about micro-batches takes the run's setting."""
    if mfc.n_mbs is not None and mfc.max_tokens_per_mb is not None:
        raise ConfigError(f"call '{mfc.name}' sets both n_mbs and max_tokens_per_mb", remedy="Keep one of them.")
    if mfc.n_mbs is not None or mfc.max_tokens_per_mb is not None:
        return mfc
    return dataclasses.replace(mfc, n_mbs=config.n_mbs, max_tokens_per_mb=config.max_tokens_per_mb)


def _check_roles(mfcs: tuple[MFCDef, ...], experiment: str, roles: Mapping[str, Role]) -> None:
    trained = {mfc.role for mfc in mfcs if mfc.is_train}
    for mfc in mfcs:
        if mfc.role not in roles:
            raise GraphError(
                f"call '{mfc.name}' runs role '{mfc.role}', which experiment '{experiment}' does not declare."
                + did_you_mean(mfc.role, roles),
                call=mfc.name,
            )
    for name, role in roles.items():
        if name not in {mfc.role for mfc in mfcs}:
            raise GraphError(f"role '{name}' of experiment '{experiment}' has no call")
        if role.trainable != (name in trained):
            state = "trainable, but no train_step call" if role.trainable else "frozen, but a train_step call"
            raise GraphError(f"role '{name}' of experiment '{experiment}' is {state} uses it")

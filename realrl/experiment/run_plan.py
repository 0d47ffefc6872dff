"""From a resolved configuration to everything that is decided before a process starts: calls, graph, allocations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.config.schema import RunConfig
from realrl.errors import AllocationError, AssetError, ConfigError, GraphError, did_you_mean
from realrl.experiment.call_settings import check_leads, check_run_staleness, configured_calls, with_run_settings
from realrl.experiment.declaration import Experiment, Role
from realrl.experiment.evaluation import EvalPlan, evaluation_experiment, plan_evaluation
from realrl.graph.build import build_graph, topological_calls
from realrl.graph.mfc import MFCDef, OffloadHook
from realrl.mesh.device_mesh import Allocation, Cluster
from realrl.plan.allocation import check_shapes, plan_allocations
from realrl.plan.groups import ProcessGroup, process_groups
from realrl.plan.hooks import CallHooks, check_realloc_shapes, plan_hooks
from realrl.plan.parameters.layout import parameter_layout, parameter_specs
from realrl.plan.protocols import CallLayout, slices_of

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class RunPlan:
    """One run, decided but not started; the same configuration gives the same plan in every process.

    Attributes:
        allocations: call -> where it runs.
        hooks: call -> what moves around it.
        evaluation: the calls that evaluate a training run; None where it is not evaluated.
    """

    config: RunConfig
    experiment: Experiment
    mfcs: tuple[MFCDef, ...]
    graph: nx.DiGraph
    allocations: Mapping[str, Allocation]
    cluster: Cluster
    hooks: Mapping[str, CallHooks]
    evaluation: EvalPlan | None = None

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

    def eval_calls_of(self, role: str) -> tuple[MFCDef, ...]:
        """All calls of one role that evaluate the run."""
        return tuple(mfc for mfc in self.evaluation.mfcs if mfc.role == role) if self.evaluation is not None else ()

    def hooks_of(self, call: str) -> CallHooks:
        """What moves around a call, of training or of evaluation."""
        return self.hooks[call] if call in self.hooks or self.evaluation is None else self.evaluation.hooks[call]

    def allocation_of(self, call: str) -> Allocation:
        """Where a call runs, of training or of evaluation."""
        if call in self.allocations or self.evaluation is None:
            return self.allocations[call]
        return self.evaluation.allocations[call]

    def is_evaluating(self, call: str) -> bool:
        """Whether a call evaluates."""
        return self.config.eval.only or (self.evaluation is not None and call in self.evaluation.names)

    def home_of(self, role: str) -> Allocation | None:
        """Where the parameters of a role live; None if it has none."""
        return self.hooks[self.calls_of(role)[0].name].home

    def allocations_of(self, role: str) -> tuple[Allocation, ...]:
        """The distinct allocations of a role's calls, its home first."""
        home = self.home_of(role)
        used = [self.allocations[mfc.name] for mfc in self.calls_of(role)]
        return tuple(dict.fromkeys(used if home is None else [home, *used]))

    def role_ranks(self, role: str) -> tuple[int, ...]:
        """Global ranks that a call of a role runs on, ascending."""
        return tuple(sorted({rank for mfc in self.calls_of(role) for rank in self.allocations[mfc.name].ranks}))

    @property
    def changed_roles(self) -> frozenset[str]:
        """Roles whose parameters some call or hook changes."""
        return frozenset().union(*(mfc.changed_roles for mfc in self.mfcs))

    @property
    def process_groups(self) -> tuple[ProcessGroup, ...]:
        """All process groups, in the order in which every rank creates them."""
        return process_groups(self.allocations.values(), self.cluster)


def plan_run(config: RunConfig, experiment: Experiment) -> RunPlan:
    """Build the calls, their graph, their allocations and what moves between them; those of the evaluation too.

    Raises:
        GraphError: the MFC list is not a valid graph, or names a role that the experiment does not declare.
        ConfigError: a setting of a call is impossible or without effect (see `call_settings`), a role to offload does
            not exist, or `max_staleness` is set where no call runs ahead; or an evaluation is wanted that cannot be.
        AllocationError: a mesh or strategy does not fit the cluster or the call, or hooks contradict each other.
    """
    if config.eval.only:
        experiment = evaluation_experiment(experiment, config)
    declared = experiment.calls(config) if config.eval.only else configured_calls(experiment, config)
    mfcs = tuple(with_run_settings(mfc, config) for mfc in declared)
    roles = experiment.roles_for(config)
    _check_roles(mfcs, experiment.name, roles)
    check_run_staleness(mfcs, config, experiment.name)
    mfcs = _with_offloading(mfcs, config, roles, build_graph(mfcs, experiment.dataset.keys))
    graph = build_graph(mfcs, experiment.dataset.keys)
    if not config.eval.only:
        check_leads(graph, config)
    cluster = Cluster(config.cluster.n_nodes, config.cluster.n_devices_per_node)
    heads = {name: role.head for name, role in roles.items()}
    allocations = plan_allocations(graph, config.allocation, cluster, heads=heads)
    weightless = [name for name, role in roles.items() if role.head == "none"]
    hooks = plan_hooks(graph, allocations, weightless=weightless, offload_frozen=config.allocation.offload_frozen)
    plan = RunPlan(config, experiment, mfcs, graph, allocations, cluster, hooks)
    orders = _rank_orders(plan)
    if orders:
        allocations = {name: dataclasses.replace(a, order=orders.get(name)) for name, a in allocations.items()}
        hooks = plan_hooks(graph, allocations, weightless=weightless, offload_frozen=config.allocation.offload_frozen)
        plan = dataclasses.replace(plan, allocations=allocations, hooks=hooks)
    if not config.eval.is_on or config.eval.only:
        return plan

    def finish(mfc: MFCDef) -> MFCDef:
        return dataclasses.replace(with_run_settings(mfc, config), min_n_seqs=None)

    evaluation = plan_evaluation(experiment, config, finish, allocations, hooks)
    return dataclasses.replace(plan, evaluation=evaluation)


def check_models_fit(plan: RunPlan) -> None:
    """Check every role's model against the strategies of its calls and its adapters; others need no check.

    Raises:
        AllocationError: tp or pp does not fit a model, or a hook moves parameters between models that differ.
        AssetError: config.json or a tokenizer cannot be used.
        ConfigError: an adapter's target matches no layer of the role's model, one without experts has a
            load-balancing loss, or a training backend cannot do what is asked of it.
    """
    from realrl.experiment.backends import check_backends

    check_backends(plan)
    is_sharded = any(a.strategy.tp > 1 or a.strategy.pp > 1 for a in plan.allocations.values())
    sections = [plan.config.models[role] for role in plan.roles]
    depends_on_model = any(s.lora.rank or s.router_aux_loss_coef is not None for s in sections)
    if is_sharded or depends_on_model or any(mfc.reallocs for mfc in plan.mfcs):
        from realrl.experiment.models import role_configs

        shapes = role_configs(plan)
        check_shapes(plan.graph, plan.allocations, shapes)
        check_realloc_shapes(plan.graph, shapes)


def _rank_orders(plan: RunPlan) -> dict[str, tuple[int, ...]]:
    """Call -> the order of its mesh's ranks, for calls that get shards of their parameters from another layout.

    Homes keep the plain order, so that a checkpoint does not depend on how other calls run. A model that cannot be read
    or cut has no order: `check_inputs` refuses it before anything starts.
    """
    orders: dict[str, tuple[int, ...]] = {}
    for mfc in plan.mfcs:
        home, allocation = plan.home_of(mfc.role), plan.allocations[mfc.name]
        strategy = allocation.strategy
        if home is None or home == allocation or strategy.tp == strategy.pp == 1:
            continue
        from realrl.experiment.models import role_config
        from realrl.plan.parameters.rank_order import order_for

        try:
            model = role_config(plan, mfc.role)
            assert model is not None
            source = parameter_layout(parameter_specs(model), home.strategy, home.ranks)
            order = order_for(source, strategy, allocation.ranks, node_of=plan.cluster.node_of)
            slices_of(mfc.protocol, CallLayout(dataclasses.replace(allocation, order=order), home, mfc.balanced_dp))
        except (AssetError, AllocationError):
            continue
        orders[mfc.name] = order
    return orders


def _with_offloading(
    mfcs: tuple[MFCDef, ...], config: RunConfig, roles: Mapping[str, Role], graph: nx.DiGraph
) -> tuple[MFCDef, ...]:
    """Each role of `allocation.offload` gets a hook after its last call of a step, unless that call has one."""
    last: dict[str, str] = {mfc.role: mfc.name for mfc in topological_calls(graph)}
    for role in config.allocation.offload:
        if role not in roles:
            raise ConfigError(
                f"allocation.offload={role}: there is no role '{role}'",
                remedy=f"The roles are {', '.join(roles)}.{did_you_mean(role, roles)}",
            )
    wanted = {last[role] for role in config.allocation.offload}
    return tuple(
        dataclasses.replace(mfc, post_hooks=(*mfc.post_hooks, OffloadHook()))
        if mfc.name in wanted and OffloadHook() not in mfc.post_hooks
        else mfc
        for mfc in mfcs
    )


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

"""Planning of a run from a resolved configuration, before a process starts. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from realrl.config.schema import RunConfig
from realrl.errors import AllocationError, AssetError, ConfigError, GraphError, did_you_mean
from realrl.experiment.backends import check_backends
from realrl.experiment.call_settings import check_leads, check_run_staleness, configured_calls, with_run_settings
from realrl.experiment.declaration import Experiment, Role
from realrl.experiment.evaluation import evaluation_experiment, plan_evaluation
from realrl.experiment.models import role_config, role_configs, with_precision
from realrl.experiment.pieces import find_piece, sampler_of
from realrl.experiment.registry import check_interface_name
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import cut_to_fit
from realrl.graph.build import build_graph, calls, dataset_keys, replace_calls, topological_calls
from realrl.graph.mfc import InterfaceType, MFCDef, OffloadHook
from realrl.mesh.device_mesh import Allocation, Cluster
from realrl.plan.allocation import check_shapes, plan_allocations
from realrl.plan.fused_calls import check_places, fusion_of, with_reversed_home
from realrl.plan.hooks import check_realloc_shapes, plan_hooks, role_homes
from realrl.plan.modes import SIZED_MODES, Cut
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import parameter_layout
from realrl.plan.protocols import CallLayout, slices_of
from realrl.shape import DecoderConfig

if TYPE_CHECKING:
    import networkx as nx

_SAMPLES = "ppo_actor"  # the interface that generates by `algorithm.sampler`


def plan_run(config: RunConfig, experiment: Experiment) -> RunPlan:
    """Plan the calls, their graph, their allocations and their hooks; those of the evaluation too.

    Raises:
        GraphError: the MFC list is not a valid graph, or names a role that the experiment does not declare.
        ConfigError: a setting of a call is impossible or without effect (see `call_settings`), a sampler or a role to
            offload does not exist, or `max_staleness` is set where no call runs ahead; or an evaluation is wanted that
            cannot be.
        AllocationError: a mesh or strategy does not fit the cluster or the call, calls cannot be fused, or hooks
            contradict each other.
    """
    config = with_precision(config)
    if config.eval.only:
        experiment = evaluation_experiment(experiment, config)
    declared = experiment.calls(config) if config.eval.only else configured_calls(experiment, config)
    mfcs = tuple(with_run_settings(mfc, config) for mfc in declared)
    roles = experiment.roles_for(config)
    _check_roles(mfcs, experiment.name, roles)
    if any(mfc.interface_type is InterfaceType.GENERATE and mfc.interface.name == _SAMPLES for mfc in mfcs):
        find_piece("sampler", sampler_of(config.algorithm))
    check_run_staleness(mfcs, config, experiment.name)
    graph = build_graph(mfcs, experiment.dataset.keys)
    if not dataset_keys(graph):
        raise GraphError(
            f"no call of experiment '{experiment.name}' reads a key of the dataset",
            remedy=f"Give one of them an input key: {', '.join(experiment.dataset.keys)}.",
        )
    replace_calls(graph, _offloading_calls(graph, config, roles))
    if not config.eval.only:
        check_leads(graph, config)
    cluster = Cluster(config.cluster.n_nodes, config.cluster.n_devices_per_node)
    fusion = None if config.eval.only else fusion_of(graph, config.allocation.fuse)

    def place(cuts: Mapping[str, Cut]) -> RunPlan:
        heads = {name: role.head for name, role in roles.items()}
        allocations = plan_allocations(graph, config.allocation, cluster, heads=heads, cuts=cuts)
        if fusion is not None:
            check_places(fusion, allocations)
        allocations = with_reversed_home(graph, allocations, fusion)
        allocations = _with_rank_orders(allocations, graph, config, roles)
        weightless = [name for name, head in heads.items() if head == "none"]
        hooks = plan_hooks(graph, allocations, weightless=weightless, offload_frozen=config.allocation.offload_frozen)
        return RunPlan(config, experiment, calls(graph), graph, allocations, cluster, hooks, fusion=fusion)

    plan = _with_room(place({}), place)
    if not config.eval.is_on or config.eval.only:
        return plan

    def finish(mfc: MFCDef) -> MFCDef:
        return dataclasses.replace(with_run_settings(mfc, config), min_n_seqs=None)

    return dataclasses.replace(plan, evaluation=plan_evaluation(plan, finish))


def first_steps(config: RunConfig, n: int) -> RunConfig:
    """Return the configuration of a run that ends after `n` steps, without checkpoints and evaluations."""
    off = {"at_end": False, "every_steps": 0, "every_epochs": 0, "every_s": 0.0, "keep_best": ""}
    changes = {
        "steps": n,
        "epochs": 1_000_000,
        "save": config.save.model_copy(update=off),
        "eval": config.eval.model_copy(update={"every_steps": 0, "at_start": False}),
    }
    return config.model_copy(update=changes)


def _with_room(plan: RunPlan, place: Callable[[Mapping[str, Cut]], RunPlan]) -> RunPlan:
    """Return the plan with models cut for the memory of the devices, where that is known and the mode leaves it open.

    A model that cannot be read is not cut: the preflight refuses it before anything starts.
    """
    config = plan.config
    if config.cluster.device_memory_gb is None or config.allocation.mode not in SIZED_MODES:
        return plan
    with contextlib.suppress(AssetError):
        return cut_to_fit(plan, place)
    return plan


def check_models_fit(plan: RunPlan) -> None:
    """Check every role's model against the strategies of its calls, its adapters, and the lengths of responses.

    Raises:
        AllocationError: tp or pp does not fit a model, or a hook moves parameters between models that differ.
        AssetError: config.json or a tokenizer cannot be used.
        ConfigError: an adapter's target matches no layer of the role's model, one without experts has a
            load-balancing loss, a training backend does not support a setting, or a response alone fills all positions.
    """
    check_backends(plan)
    shapes, n_new = role_configs(plan), plan.config.generation.max_new_tokens
    for role in plan.generating_roles:
        if role in shapes and n_new >= shapes[role].max_positions:
            raise ConfigError(
                f"generation.max_new_tokens={n_new} leaves no place for a prompt in the "
                f"{shapes[role].max_positions} positions of the model of role '{role}'",
                remedy="Lower it.",
            )
    is_sharded = any(a.strategy.tp > 1 or a.strategy.pp > 1 for a in plan.allocations.values())
    if is_sharded or any(mfc.reallocs for mfc in plan.mfcs):
        check_shapes(plan.graph, plan.allocations, shapes)
        check_realloc_shapes(plan.graph, shapes)


def _with_rank_orders(
    allocations: Mapping[str, Allocation], graph: nx.DiGraph, config: RunConfig, roles: Mapping[str, Role]
) -> dict[str, Allocation]:
    """Return the allocations, with an order of the mesh's ranks for calls that get shards from another layout.

    Homes keep their order, so that a checkpoint does not depend on how other calls run. A model that cannot be read
    or cut has no order: the preflight refuses it before anything starts.
    """
    homes, ordered = role_homes(graph, allocations), dict(allocations)
    for mfc in calls(graph):
        home, allocation = homes[mfc.role], allocations[mfc.name]
        strategy = allocation.strategy
        if roles[mfc.role].head == "none" or home == allocation or strategy.tp == strategy.pp == 1:
            continue
        try:
            model = role_config(config, mfc.role, roles[mfc.role])
            assert model is not None
            best = _in_best_order(model, home, allocation)
            slices_of(mfc.protocol, CallLayout(best, home, mfc.balanced_dp))
        except (AssetError, AllocationError):
            continue
        ordered[mfc.name] = best
    return ordered


@functools.lru_cache(maxsize=512)  # a search asks for the same layouts again and again
def _in_best_order(model: DecoderConfig, home: Allocation, allocation: Allocation) -> Allocation:
    from realrl.plan.parameters.rank_order import order_for  # brings numpy, which few runs need to be planned

    source, node_of = (
        parameter_layout(parameter_specs(model), home.strategy, home.ranks),
        allocation.mesh.cluster.node_of,
    )
    order = order_for(source, allocation.strategy, allocation.ranks, node_of=node_of)
    return dataclasses.replace(allocation, order=order)


def _offloading_calls(graph: nx.DiGraph, config: RunConfig, roles: Mapping[str, Role]) -> list[MFCDef]:
    """Return the last call of each role of `allocation.offload` with an `OffloadHook` added, where it has none."""
    last = {mfc.role: mfc for mfc in topological_calls(graph)}
    for role in config.allocation.offload:
        if role not in roles:
            raise ConfigError(
                f"allocation.offload={role}: there is no role '{role}'",
                remedy=f"The roles are {', '.join(roles)}.{did_you_mean(role, roles)}",
            )
    wanted = [last[role] for role in dict.fromkeys(config.allocation.offload)]
    return [
        dataclasses.replace(mfc, post_hooks=(*mfc.post_hooks, OffloadHook()))
        for mfc in wanted
        if OffloadHook() not in mfc.post_hooks
    ]


def _check_roles(mfcs: tuple[MFCDef, ...], experiment: str, roles: Mapping[str, Role]) -> None:
    trained = {mfc.role for mfc in mfcs if mfc.is_train}
    for mfc in mfcs:
        check_interface_name(mfc.interface.name)
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

"""Roles and calls of a run, as planners of memory and models of costs take them."""

from __future__ import annotations

from collections.abc import Mapping

from realrl.experiment.evaluation import eval_generation
from realrl.experiment.run_plan import RunPlan
from realrl.graph.build import topological_calls
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.plan.backends import zero_stage_of
from realrl.plan.memory.load import RowLengths, load_of
from realrl.plan.memory.plan import CallState, RoleState
from realrl.shape import DecoderConfig


def role_states(plan: RunPlan, models: Mapping[str, DecoderConfig]) -> dict[str, RoleState]:
    """Return the roles with parameters, as `plan_memory` needs them."""
    states = {}
    for name, model in models.items():
        home, section = plan.home_of(name), plan.config.models[name]
        assert home is not None, "a role with a model has a home"
        states[name] = RoleState(
            model=model,
            home=home,
            is_trained=plan.roles[name].trainable,
            is_changed=name in plan.changed_roles,
            is_averaged=name in plan.averaged_roles,
            backend=section.backend,
            zero_stage=zero_stage_of(section.backend, section.optimizer.zero_stage),
            offloads_optimizer=section.optimizer.offload,
            checkpoints_activations=section.activation_checkpointing,
        )
    return states


def call_states(plan: RunPlan, rows: RowLengths) -> list[CallState]:
    """Return all calls in the order of a step, those of an evaluation behind them."""
    graphs = [plan.graph] if plan.evaluation is None else [plan.graph, plan.evaluation.graph]
    return [_call_state(plan, mfc, rows) for graph in graphs for mfc in topological_calls(graph)]


def _call_state(plan: RunPlan, mfc: MFCDef, rows: RowLengths) -> CallState:
    allocation = plan.allocation_of(mfc.name)
    generation = eval_generation(plan.config) if plan.is_evaluating(mfc.name) else plan.config.generation
    load = load_of(
        mfc, allocation, rows, generation=generation, n_responses=responses_of(plan, mfc, generation.n_responses)
    )
    return CallState(mfc.name, mfc.role, mfc.interface_type, allocation, plan.hooks_of(mfc.name), load)


def responses_of(plan: RunPlan, mfc: MFCDef, n_responses: int) -> int:
    """Return the responses of each sample that a call makes or reads; 0 if its sequences are the dataset's."""
    made = [mfc] if mfc.interface_type is InterfaceType.GENERATE else _generators(plan, mfc)
    if not made:
        return 0
    return max(1 if one.interface.args.get("greedy") else n_responses for one in made)


def _generators(plan: RunPlan, mfc: MFCDef) -> list[MFCDef]:
    """Return the generate calls whose tokens a call computes on."""
    others = () if plan.evaluation is None else plan.evaluation.mfcs
    calls = others if mfc in others else plan.mfcs
    tokens = {key for key in mfc.input_keys if mfc.input_key_remap.get(key, key) == "input_ids"}
    return [one for one in calls if one.interface_type is InterfaceType.GENERATE and tokens & {*one.output_keys}]

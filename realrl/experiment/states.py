"""Roles and calls of a run, as planners of memory and models of costs take them, and what counts its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from realrl.config.schema import RunConfig
from realrl.data.kinds import DatasetKind
from realrl.experiment.evaluation import eval_generation
from realrl.experiment.run_plan import RunPlan
from realrl.graph.build import topological_calls
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.plan.backends import zero_stage_of
from realrl.plan.memory.formulas import Kernels
from realrl.plan.memory.load import RowLengths, load_of
from realrl.plan.memory.plan import CallState, RoleState
from realrl.plan.memory.saving import Saves
from realrl.shape import DecoderConfig

if TYPE_CHECKING:
    from realrl.plan.memory.model import MemoryModel

MARGIN = 0.9  # usable share of a device's memory; allocators and kernels need some of the rest


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


# ---------------------------------------------------------------- memory


def longest_rows(config: RunConfig, kind: DatasetKind) -> RowLengths:
    """Return the largest numbers of tokens that the configuration allows for a row of the dataset."""
    n_sequences = 2 if kind in (DatasetKind.PREFERENCE_PAIR, DatasetKind.UNPAIRED) else 1
    n_tokens = config.dataset.max_prompt_tokens + config.dataset.max_answer_tokens
    return RowLengths([config.dataset.max_prompt_tokens], [n_sequences * n_tokens], [n_tokens])


def memory_model(plan: RunPlan, kernels: Kernels, *, on_cpu: bool) -> MemoryModel:
    """Return what counts the memory of a run's devices.

    Args:
        on_cpu: True if the devices are CPUs: there host memory holds the rows of samples.
    """
    from realrl.plan.memory.model import MemoryModel  # brings numpy, which few runs need to be planned

    save = plan.config.save
    is_repeated = bool(save.every_steps or save.every_epochs or save.every_s)
    saves = None
    if any(mfc.is_train for mfc in plan.mfcs) and (is_repeated or save.at_end):
        saves = Saves(is_staged=not on_cpu, is_repeated=is_repeated)
    rows_bytes = 0 if on_cpu else plan.config.cluster.device_rows_bytes
    return MemoryModel(kernels=kernels, rows_bytes=rows_bytes, saves=saves)


def runtime_bytes(plan: RunPlan, roles: Mapping[str, RoleState], calls: Sequence[CallState]) -> dict[int, int]:
    """Return rank -> bytes of an accelerator for the CUDA context and NCCL's connections.

    Workers that share devices have no connections: what they send goes through host memory.
    """
    from realrl.plan.memory.connections import CUDA_CONTEXT, connection_bytes  # bring numpy too

    cluster = plan.config.cluster
    if cluster.shares_devices:
        return dict.fromkeys(range(plan.n_workers), CUDA_CONTEXT)
    connections = connection_bytes(
        plan.process_groups,
        roles,
        calls,
        node_of=plan.process_groups[0].mesh.cluster.node_of,
        any_rows=cluster.data_plane == "collective",
    )
    return {rank: CUDA_CONTEXT + n_bytes for rank, n_bytes in connections.items()}

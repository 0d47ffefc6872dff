"""Roles and calls of a run, as planners of memory and models of costs take them; and places by the size of models.

A model that takes more than a device has is cut into parts in `realrl.plan.modes.SIZED_MODES`, where
`cluster.device_memory_gb` is known: tensor-parallel inside of a node first, then pipeline-parallel, no further than all
devices have room. All else stays as the user has set it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from realrl.config.schema import RunConfig
from realrl.data.kinds import DatasetKind
from realrl.errors import AllocationError
from realrl.experiment.evaluation import eval_generation
from realrl.experiment.models import fused_models, role_configs
from realrl.experiment.run_plan import RunPlan
from realrl.graph.build import topological_calls
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.graph.origins import origins
from realrl.plan.backends import zero_stage_of
from realrl.plan.fused_calls import Fusion
from realrl.plan.memory.formulas.local import ON_CUDA, Kernels
from realrl.plan.memory.load import RowLengths, load_of
from realrl.plan.memory.plan import Beside, CallState, RoleState, show_bytes
from realrl.plan.memory.saving import Saves
from realrl.plan.modes import Cut
from realrl.shape import DecoderConfig

if TYPE_CHECKING:
    from realrl.plan.memory.model import MemoryModel, Peaks

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
    states = [_call_state(plan, mfc, rows) for graph in graphs for mfc in topological_calls(graph)]
    return states if plan.fusion is None else _side_by_side(plan, plan.fusion, states)


def _side_by_side(plan: RunPlan, fusion: Fusion, states: Sequence[CallState]) -> list[CallState]:
    """Return the calls, of which the two that train together know each other."""
    by_name = {state.name: state for state in states}
    first, second = by_name[fusion.first], by_name[fusion.second]
    pairs = fused_models(plan, role_configs(plan)).in_flight(first.load.n_mbs, second.load.n_mbs)
    swapped = tuple(tuple((m, n) for n, m in moments) for moments in reversed(pairs))
    beside = {
        first.name: Beside(second.role, second.allocation, second.load, pairs),
        second.name: Beside(first.role, first.allocation, first.load, swapped),
    }
    return [replace(state, beside=beside.get(state.name)) for state in states]


def _call_state(plan: RunPlan, mfc: MFCDef, rows: RowLengths) -> CallState:
    allocation = plan.allocation_of(mfc.name)
    generation = eval_generation(plan.config) if plan.is_evaluating(mfc.name) else plan.config.generation
    load = load_of(
        mfc,
        allocation,
        rows,
        generation=generation,
        n_responses=responses_of(plan, mfc, generation.n_responses),
        algorithm=plan.config.algorithm,
    )
    return CallState(mfc.name, mfc.role, mfc.interface_type, allocation, plan.hooks_of(mfc.name), load)


def responses_of(plan: RunPlan, mfc: MFCDef, n_responses: int) -> int:
    """Return the most responses of a sample that a call makes or reads; 0 if its sequences are the dataset's.

    A call that reads what another one has kept of the responses may read all of them.
    """
    others = () if plan.evaluation is None else plan.evaluation.mfcs
    made = [mfc] if mfc.interface_type is InterfaceType.GENERATE else []
    made = made or [origin.call for origin in origins(mfc, others if mfc in others else plan.mfcs)]
    return max((1 if one.interface.args.get("greedy") else n_responses for one in made), default=0)


# ---------------------------------------------------------------- memory


def longest_rows(config: RunConfig, kind: DatasetKind) -> RowLengths:
    """Return the largest numbers of tokens that the configuration allows for a row of the dataset."""
    n_sequences = 2 if kind in (DatasetKind.PREFERENCE_PAIR, DatasetKind.UNPAIRED) else 1
    n_tokens = config.dataset.max_prompt_tokens + config.dataset.max_answer_tokens
    answers = [config.dataset.max_answer_tokens] if kind is DatasetKind.PROMPT else []
    return RowLengths([config.dataset.max_prompt_tokens], [n_sequences * n_tokens], [n_tokens], n_sequences, answers)


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


# ---------------------------------------------------------------- places by size

Place = Callable[[Mapping[str, Cut]], RunPlan]

_MOST_STAGES = 16


def cut_to_fit(plan: RunPlan, place: Place) -> RunPlan:
    """Return a plan in which every device has room, with models cut into as few parts as that takes.

    In each turn, the role is cut whose next cut leaves the devices short of the fewest bytes.

    Args:
        plan: the run with every model whole.
        place: returns the run with given cuts.

    Raises:
        AllocationError: the devices lack memory however the models are cut; or a strategy that the user has pinned does
            not fit its model.
        AssetError: the shape of a model cannot be read.
    """
    count = _Count(plan)
    cuts: dict[str, Cut] = dict.fromkeys(count.models, (1, 1))
    lack = count.lack(plan)
    while lack:
        options = [found for role in cuts if (found := _next(role, cuts, place, count))]
        if not options:
            break
        least, role, cut, other = min(options, key=lambda option: option[:3])
        if least >= lack:
            break
        lack, plan = least, other
        cuts[role] = cut
        count.note_connections(plan)
        lack = count.lack(plan)
    count.check(plan)
    return plan


def _next(role: str, cuts: Mapping[str, Cut], place: Place, count: _Count) -> tuple[int, str, Cut, RunPlan] | None:
    """Return the least further cut of a role that is legal: bytes that devices lack then, and the plan."""
    for cut in _further(cuts[role], count.node_size):
        try:
            plan = place({**cuts, role: cut})
            return count.lack(plan), role, cut, plan
        except AllocationError:
            continue
    return None


def _further(cut: Cut, node_size: int) -> Iterator[Cut]:
    tp, pp = cut
    yield from ((wider, pp) for wider in range(tp + 1, node_size + 1) if node_size % wider == 0)
    yield from ((tp, longer) for longer in range(pp + 1, _MOST_STAGES + 1))


class _Count:
    """Memory of plans of one run, which differ in allocations alone.

    Attributes:
        models: role -> its model.
    """

    def __init__(self, plan: RunPlan) -> None:
        cluster = plan.config.cluster
        self._on_cpu = cluster.device != "cuda"
        self._capacity = int((cluster.device_memory_gb or 0) * 1e9)
        self._model = memory_model(plan, Kernels() if self._on_cpu else ON_CUDA, on_cpu=self._on_cpu)
        self._rows = longest_rows(plan.config, plan.experiment.dataset)
        self.models, self.node_size = role_configs(plan), cluster.n_devices_per_node
        self._connections: dict[int, int] = {}
        self.note_connections(plan)

    def note_connections(self, plan: RunPlan) -> None:
        """Count the memory of NCCL's connections, which the next cut changes little."""
        if not self._on_cpu:
            self._connections = runtime_bytes(plan, role_states(plan, self.models), call_states(plan, self._rows))

    def lack(self, plan: RunPlan) -> int:
        """Return the bytes that all devices together lack for their fullest calls."""
        _, most = self._peaks(plan).by_rank
        return sum(max(0, needs - int(MARGIN * self._capacity)) for needs in most.tolist())

    def check(self, plan: RunPlan) -> None:
        """Refuse a plan that has no room on some device, even if allocators needed nothing of the rest."""
        rank, call, needs = self._peaks(plan).fullest
        if needs <= self._capacity:
            return
        raise AllocationError(
            f"allocation.mode={plan.config.allocation.mode} finds no room: device {rank} needs {show_bytes(needs)} in "
            f"{call}, with models cut as far as that helps, and has {show_bytes(self._capacity)}",
            remedy=f"Set {' or '.join(_savings(plan, call))}, or use more devices. realrl doctor counts what it saves.",
            call=call,
        )

    def _peaks(self, plan: RunPlan) -> Peaks:
        return self._model.peaks(
            role_states(plan, self.models),
            call_states(plan, self._rows),
            runtime_bytes=self._connections,
            is_host_memory=self._on_cpu,
        )


def _savings(plan: RunPlan, call: str) -> list[str]:
    """Return settings that are not made yet, and with which a call may need less."""
    found = []
    trained = [name for name, role in plan.roles.items() if role.trainable]
    if any(not plan.config.models[name].activation_checkpointing for name in trained):
        found.append("models.*.activation_checkpointing=true")
    if any(not plan.config.models[name].optimizer.zero_stage for name in trained):
        found.append("models.*.optimizer.zero_stage=1")
    if any(not plan.config.models[name].optimizer.offload for name in trained):
        found.append("models.*.optimizer.offload=true")
    if len(trained) < len(plan.roles) and not plan.config.allocation.offload_frozen:
        found.append("allocation.offload_frozen=true")
    kinds = {mfc.name: mfc.interface_type for mfc in plan.mfcs}
    if kinds.get(call) is InterfaceType.GENERATE:
        found.append(f"generation.max_batch_size={max(1, plan.config.generation.max_batch_size // 4)}")
    return found or ["a smaller n_seqs"]

"""Places of a run's models by their size: a model that takes more than a device has is cut into parts.

Models are cut in `realrl.plan.modes.SIZED_MODES`, where `cluster.device_memory_gb` is known: tensor-parallel inside of a
node first, then pipeline-parallel, no further than all devices have room. All else stays as the user has set it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from realrl.errors import AllocationError
from realrl.experiment.models import role_configs
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import MARGIN, call_states, longest_rows, memory_model, role_states, runtime_bytes
from realrl.graph.mfc import InterfaceType
from realrl.plan.memory.formulas import Kernels
from realrl.plan.memory.plan import show_bytes
from realrl.plan.modes import Cut

if TYPE_CHECKING:
    from realrl.plan.memory.model import Peaks

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


def _next(
    role: str, cuts: Mapping[str, Cut], place: Place, count: _Count
) -> tuple[int, str, Cut, RunPlan] | None:
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
        self._model = memory_model(plan, Kernels(), on_cpu=self._on_cpu)
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
            remedy=f"Set {' or '.join(_savings(plan, call))}, or use more devices; realrl doctor counts what that saves.",
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

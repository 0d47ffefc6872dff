"""Costs of calls under choices, by `realrl.sim.costs` and `realrl.plan.memory`, each call by itself.

A choice is priced on the first devices of the cluster; a move between two meshes as far to the left as their relation
allows. So a price depends on no place. Calls of equal work on equal models are priced once.

Bytes leave out what depends on other calls, such as messages that a rank of a home sends. Of connections, which calls
share, a price has those of its call; see `Price.links`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from realrl.config.schema import GenerationConfig
from realrl.graph.build import call as call_of
from realrl.graph.build import calls
from realrl.graph.mfc import DEFAULT_PROTOCOL, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy
from realrl.plan.hooks import CallHooks
from realrl.plan.memory.connections import Link, least_connections, links_of
from realrl.plan.memory.cuts import CutModel
from realrl.plan.memory.formulas.local import Kernels
from realrl.plan.memory.load import RowLengths, load_of
from realrl.plan.memory.plan import RoleState
from realrl.plan.memory.roles import RoleBytes
from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import RunCall
from realrl.sched.track.dispatch import RankWork, plan_work
from realrl.search.fast import Moved, Price, Relation
from realrl.search.moves import move_cost
from realrl.search.space import Choice, mesh_at
from realrl.shape import DecoderConfig
from realrl.sim.costs.calls import CostModel
from realrl.sim.costs.moves import copy_seconds
from realrl.sim.durations import SampleSizes
from realrl.sim.hardware import Hardware

if TYPE_CHECKING:
    import networkx as nx

_MOST_MODELS = 16  # cost models that are kept, of the last questions
_OF_NO_ACCOUNT: Mapping[str, Any] = {  # fields of a declaration that change neither seconds nor tokens
    "name": "", "model_name": "", "interface_impl": "", "input_keys": (), "output_keys": (), "input_key_remap": {},
    "output_key_remap": {}, "min_n_seqs": None, "log_return_value": False, "max_staleness": 0, "pre_hooks": (),
    "post_hooks": (), "may_drop": False,
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """The work of one step.

    Attributes:
        graph: from `build_graph`.
        roles: roles that have parameters, as the configuration has them; their homes count for nothing.
        sizes: sample -> its tokens, for all samples of a step; responses included.
        rows: lengths in the worst case, for memory.
        n_responses: call -> responses of a prompt that it makes or reads; 0 for sequences of the dataset.
        algorithm: options of the algorithm, for memory; see `load_of`.
        connects: True if devices have NCCL's connections to each other, which take memory.
    """

    graph: nx.DiGraph
    roles: Mapping[str, RoleState]
    cluster: Cluster
    generation: GenerationConfig
    sizes: Mapping[str, SampleSizes]
    rows: RowLengths
    n_responses: Mapping[str, int]
    seed: int = 1
    connects: bool = False
    algorithm: Any = None


@dataclass
class CostPrices:
    """`realrl.search.fast.Prices` of a workload on given hardware.

    Attributes:
        kernels: the machine's kernels; those of CUDA by default.
        capacity: bytes of a device that a plan may use.
    """

    workload: Workload
    hardware: Hardware
    kernels: Kernels = field(default_factory=Kernels)
    capacity: float = math.inf
    _cuts: dict[DecoderConfig, CutModel] = field(default_factory=dict)
    _roles: dict[object, RoleBytes] = field(default_factory=dict)
    _used: dict[object, tuple[int, int, int]] = field(default_factory=dict)
    _models: dict[object, CostModel] = field(default_factory=dict)
    _twins: dict[str, str] = field(default_factory=dict)
    _shares: dict[object, Sequence[RankWork]] = field(default_factory=dict)
    _seconds: dict[object, float] = field(default_factory=dict)
    _samples: dict[int, Sequence[Mapping[str, SampleSizes]]] = field(default_factory=dict)

    def call(self, call: str, choice: Choice) -> Price:
        """Return the cost of a call on devices that do nothing else; infinite seconds if they lack memory for it."""
        mfc = call_of(self.workload.graph, call)
        links = self._links(mfc, choice)
        connections = least_connections(links)
        if mfc.role not in self.workload.roles:
            return Price(self._step_seconds(mfc, choice), 0, connections, 0, connections, links)
        state = self._state(mfc, choice)
        parameters, kept, used = self._bytes(mfc, state, choice)
        used += connections
        if kept + used > self.capacity:
            return Price(math.inf, kept, used, 0, connections, links)
        if mfc.is_train:
            return Price(self._training_seconds(mfc, choice), kept, used, 0, connections, links)
        seconds = self._step_seconds(mfc, replace(choice, offloads=False))
        if not choice.offloads:
            return Price(seconds, kept, used, 0, connections, links)
        n_active = min(choice.n_devices, self.workload.cluster.n_devices_per_node)
        seconds += copy_seconds(parameters, n_active, self.hardware)
        return Price(seconds, kept - parameters, used + parameters, parameters, connections, links)

    def move(
        self, calls: tuple[str, str], source: ParallelStrategy, target: ParallelStrategy, relation: Relation
    ) -> Moved:
        """Return the cost of moving the parameters of one call's role into the layout of another call."""
        roles = [call_of(self.workload.graph, name).role for name in calls]
        model = self._cut(self.workload.roles[roles[0]].model)
        first, second = self._beside(source, target, relation)
        moved = move_cost(model, first, second, self.hardware.links)
        if roles[0] == roles[1]:
            return moved
        n_bytes = int(model.overlap(source, target).needed.max())
        seconds = moved.seconds + 3 * n_bytes / self.hardware.device.stream  # read twice, and written
        return replace(moved, seconds=seconds)

    def _state(self, mfc: MFCDef, choice: Choice) -> RoleState:
        """Return the call's role with the settings of a choice, living where the call runs."""
        return replace(
            self.workload.roles[mfc.role],
            home=self._allocation(choice),
            is_trained=mfc.is_train,
            zero_stage=choice.zero_stage,
            offloads_optimizer=mfc.is_train and choice.offloads,
            checkpoints_activations=choice.checkpoints,
        )

    @property
    def _nowhere(self) -> Allocation:
        return Allocation(mesh_at(self.workload.cluster, 0, 1), ParallelStrategy())

    def _allocation(self, choice: Choice) -> Allocation:
        return Allocation(mesh_at(self.workload.cluster, 0, choice.n_devices), choice.strategy)

    # ------------------------------------------------------------ seconds

    def _training_seconds(self, mfc: MFCDef, choice: Choice) -> float:
        """Return the seconds of a train_step, asking for few of the choices.

        What follows the passes of a minibatch depends on ZeRO and offload, and on neither micro-batches nor
        checkpointing; the passes themselves depend on these, and on ZeRO where it gathers parameters for each.
        """
        stage = 3 if choice.zero_stage == 3 else 0
        base = replace(choice, zero_stage=stage, offloads=False)
        usual = replace(base, n_mbs=None, checkpoints=False)
        ends = replace(usual, zero_stage=choice.zero_stage, offloads=choice.offloads)
        passes, end = self._step_seconds(mfc, base), self._step_seconds(mfc, ends) - self._step_seconds(mfc, usual)
        return passes + end

    def _step_seconds(self, mfc: MFCDef, choice: Choice) -> float:
        """Return the seconds of all batches of a step."""
        mfc = call_of(self.workload.graph, self.twin(mfc.name))
        key = mfc.name, choice
        if key not in self._seconds:
            changed = mfc if choice.n_mbs is None else replace(mfc, n_mbs=choice.n_mbs)
            state = self._state(mfc, choice) if mfc.role in self.workload.roles else None
            allocation = self._allocation(choice)
            call = ScheduledCall(changed, allocation, CallHooks(home=None if state is None else allocation))
            model = self._model(mfc.role, state)
            self._seconds[key] = sum(self._batch_seconds(model, call, batch) for batch in self._batches(mfc.n_seqs))
        return self._seconds[key]

    def _batch_seconds(self, model: CostModel, call: ScheduledCall, sizes: Mapping[str, SampleSizes]) -> float:
        shares = self._shares_of(call, sizes)
        if call.hooks.home is not None:
            return max(model.of_replicas(call, [work.minibatches for work in shares], sizes))
        requests = [RunCall(0, 0, call.name, 1, work.minibatches, (), keeps=work.keeps) for work in shares]
        return max(model.call(call, dict(enumerate(requests)), sizes).values())

    def _shares_of(self, call: ScheduledCall, sizes: Mapping[str, SampleSizes]) -> Sequence[RankWork]:
        """Return the work of each replica's first rank; by the usual protocol, it is alike for any tp and pp."""
        strategy, ids = call.allocation.strategy, [*sizes]
        key = call.name, ids[0], strategy.dp if call.mfc.protocol == DEFAULT_PROTOCOL else strategy
        if key not in self._shares:
            counts = [sum(size.tokens) for size in sizes.values()]
            work, _ = plan_work(call, ids, counts, {}, self.workload.cluster.node_of, key=(self.workload.seed, 1, 0))
            self._shares[key] = [work[call.ranks[i * strategy.tp]] for i in range(strategy.dp)]
        return self._shares[key]

    def twin(self, call: str) -> str:
        """Return the first call that takes as long as this one under any choice: equal work on an equal model."""
        if call not in self._twins:
            work = self._work(call_of(self.workload.graph, call))
            same = (one.name for one in calls(self.workload.graph) if self._work(one) == work)
            self._twins[call] = next(same)
        return self._twins[call]

    def _work(self, mfc: MFCDef) -> tuple[object, ...]:
        own, role = replace(mfc, **_OF_NO_ACCOUNT), self.workload.roles.get(mfc.role)
        if role is None:
            return own, None
        head = role.model.head if role.model.head == "lm" else "value"  # one number a token, like those of rewards
        return own, replace(role.model, head=head), role.backend if mfc.is_train else ""

    def _model(self, role: str, state: RoleState | None) -> CostModel:
        key = (role, state)
        if key not in self._models:
            while len(self._models) >= _MOST_MODELS:
                del self._models[next(iter(self._models))]
            roles = {} if state is None else {role: state}
            generation = self.workload.generation
            self._models[key] = CostModel(roles, self.hardware, generation=generation, kernels=self.kernels)
        return self._models[key]

    def _batches(self, n_seqs: int) -> Sequence[Mapping[str, SampleSizes]]:
        """Return the samples of each batch of so many."""
        if n_seqs not in self._samples:
            most = max(mfc.n_seqs for mfc in calls(self.workload.graph))
            step = list(self.workload.sizes.items())[:most]
            self._samples[n_seqs] = [dict(step[first : first + n_seqs]) for first in range(0, most, n_seqs)]
        return self._samples[n_seqs]

    # ------------------------------------------------------------ bytes

    def _cut(self, model: DecoderConfig) -> CutModel:
        if model not in self._cuts:
            self._cuts[model] = CutModel(model)
        return self._cuts[model]

    def _bytes(self, mfc: MFCDef, state: RoleState, choice: Choice) -> tuple[int, int, int]:
        """Return the bytes of parameters, of all that the role keeps, and of what else it uses but connections."""
        role = replace(state, home=self._nowhere, is_changed=False)  # which matters for checkpoints alone
        if role not in self._roles:
            self._roles[role] = RoleBytes(state, self._cut(state.model), self.kernels, None)
        if choice.n_mbs is not None:
            mfc = replace(mfc, n_mbs=choice.n_mbs)
        load = load_of(
            mfc,
            state.home,
            self.workload.rows,
            generation=self.workload.generation,
            n_responses=self.workload.n_responses[mfc.name],
            algorithm=self.workload.algorithm,
        )
        strategy = choice.strategy
        if not state.zero_stage:  # replicas share nothing, so that two tell as much as many
            strategy = replace(strategy, dp=min(strategy.dp, 2))
        key = role, strategy, mfc.interface_type, load
        if key not in self._used:
            kept, used = self._roles[role].fullest(strategy, mfc.interface_type, load)
            self._used[key] = kept.parameters, kept.total, used.total
        return self._used[key]

    def _links(self, mfc: MFCDef, choice: Choice) -> frozenset[Link]:
        """Return what a call connects a device to."""
        if not self.workload.connects:
            return frozenset()
        return links_of(choice.strategy, self.workload.cluster, is_trained=mfc.is_train)

    def _beside(
        self, source: ParallelStrategy, target: ParallelStrategy, relation: Relation
    ) -> tuple[Allocation, Allocation]:
        """Return two layouts with a relation between their meshes, as far to the left as they go."""
        cluster, sizes = self.workload.cluster, [source.n_devices, target.n_devices]
        starts = [0, 0]
        if relation in ("beside", "apart"):
            small = sizes.index(min(sizes))
            first = sizes[1 - small]
            node = cluster.n_devices_per_node
            starts[small] = first if relation == "beside" else -(-first // node) * node
        found = [
            Allocation(mesh_at(cluster, start, strategy.n_devices), strategy)
            for start, strategy in zip(starts, (source, target), strict=True)
        ]
        return found[0], found[1]

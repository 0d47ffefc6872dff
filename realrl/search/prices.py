"""Costs of calls under choices, by `realrl.sim.costs` and `realrl.plan.memory`, each call by itself.

A choice is priced on the first devices of the cluster; a move between two meshes as far to the left as their relation
allows. So a price depends on no place. Calls of equal work on equal models are priced once.

Bytes leave out what depends on other calls, such as messages that a rank of a home sends. Of connections, which calls
share, a price has those of its call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from realrl.config.schema import GenerationConfig
from realrl.graph.build import call as call_of
from realrl.graph.build import calls
from realrl.graph.mfc import DEFAULT_PROTOCOL, InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy
from realrl.plan.hooks import CallHooks
from realrl.plan.memory.buffers import REALLOC_BUCKET
from realrl.plan.memory.cuts import CutModel, parts_of
from realrl.plan.memory.formulas.local import Kernels
from realrl.plan.memory.load import Load, RowLengths, load_of
from realrl.plan.memory.moves import MESSAGES
from realrl.plan.memory.plan import RoleState
from realrl.plan.memory.roles import RoleBytes
from realrl.plan.memory.saving import Saves
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import RunCall
from realrl.sched.track.dispatch import RankWork, plan_work
from realrl.search.fast import Moved, Price, Spread
from realrl.search.memory.devices import OnDevices
from realrl.search.memory.links import connected, links_of, node_links
from realrl.search.moves import move_cost
from realrl.search.space import Choice, Relation, mesh_at
from realrl.shape import DecoderConfig
from realrl.sim.costs.calls import CostModel
from realrl.sim.costs.moves import copy_seconds
from realrl.sim.durations import SampleSizes
from realrl.sim.hardware import Hardware

if TYPE_CHECKING:
    import networkx as nx

_HOST, _TOTAL = -2, -1  # rows of host memory and of sums in columns of usages
_MOST_MODELS = 16  # cost models that are kept, of the last questions
_OF_NO_ACCOUNT: Mapping[str, Any] = {  # fields of a declaration that change neither seconds nor tokens
    "name": "", "model_name": "", "interface_impl": "", "input_keys": (), "output_keys": (), "input_key_remap": {},
    "output_key_remap": {}, "min_n_seqs": None, "log_return_value": False, "max_staleness": 0, "pre_hooks": (),
    "post_hooks": (), "may_drop": False,
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """The work of a step.

    Attributes:
        graph: from `build_graph`.
        roles: roles that have parameters, as the configuration has them; their homes count for nothing.
        steps: number of a step -> its samples -> their tokens, responses included; seconds are the mean of all steps.
        rows: lengths in the worst case, for memory.
        n_responses: call -> responses of a prompt that it makes or reads; 0 for sequences of the dataset.
        algorithm: options of the algorithm, for memory; see `load_of`.
        connects: True if devices have NCCL's connections to each other, which take memory.
        any_rows: True if rows move between any two devices of a node, which are connected then.
        saves: the run's checkpoints; None if it writes none.
    """

    graph: nx.DiGraph
    roles: Mapping[str, RoleState]
    cluster: Cluster
    generation: GenerationConfig
    steps: Mapping[int, Mapping[str, SampleSizes]]
    rows: RowLengths
    n_responses: Mapping[str, int]
    seed: int = 1
    connects: bool = False
    any_rows: bool = False
    algorithm: Any = None
    saves: Saves | None = None


class _Batch(NamedTuple):
    """Samples of a call, by their step and their number in it."""

    step: int
    number: int
    sizes: Mapping[str, SampleSizes]


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
    _owns: dict[object, RoleBytes] = field(default_factory=dict)
    _loads: dict[object, Load] = field(default_factory=dict)
    _allocations: dict[ParallelStrategy, Allocation] = field(default_factory=dict)
    _of_links: dict[object, int] = field(default_factory=dict)
    _by_source: dict[object, Matrix] = field(default_factory=dict)
    _used: dict[object, tuple[Matrix, Matrix, Matrix]] = field(default_factory=dict)
    _models: dict[object, CostModel] = field(default_factory=dict)
    _twins: dict[str, str] = field(default_factory=dict)
    _shares: dict[object, Sequence[RankWork]] = field(default_factory=dict)
    _seconds: dict[object, float] = field(default_factory=dict)
    _samples: dict[int, Sequence[_Batch]] = field(default_factory=dict)
    _of_choices: dict[tuple[str, Choice], tuple[Matrix, Matrix, Matrix]] = field(default_factory=dict)
    _moved: dict[object, Moved] = field(default_factory=dict)

    def call(self, call: str, choice: Choice) -> Price:
        """Return the cost of a call on devices that do nothing else; infinite seconds if they lack memory for it."""
        mfc = call_of(self.workload.graph, call)
        connections = self._connections(mfc, choice)
        if mfc.role not in self.workload.roles:
            return Price(self._step_seconds(mfc, choice), 0, connections)
        is_away = self._is_away(mfc, choice)
        parameters, kept, used = self._bytes(mfc, choice)
        most = int((kept + used).argmax())
        n_bytes = int(parameters[most])
        if is_away:
            kept, used = kept - parameters, used + parameters
        spread = Spread(
            float(kept.mean()),
            (int(kept.min()), int(used.min()) + connections),
            (int(kept[0]), int(used[0]) + connections),
        )
        price = Price(math.inf, int(kept[most]), int(used[most]) + connections, spread)
        if price.kept + price.used > self.capacity:
            return price
        return replace(price, seconds=self._call_seconds(mfc, choice, n_bytes))

    @property
    def connects(self) -> bool:
        """True if devices have connections to each other, which take memory."""
        return self.workload.connects

    @property
    def any_rows(self) -> bool:
        """True if rows move between any two devices of a node, which are connected then."""
        return self.workload.any_rows

    def is_trained(self, call: str) -> bool:
        """Return True if a call trains."""
        return call_of(self.workload.graph, call).is_train

    def on_devices(self, call: str, choice: Choice) -> OnDevices:
        """Return the bytes of a call on each device of its mesh."""
        mfc, parts = call_of(self.workload.graph, call), parts_of(choice.strategy)
        if mfc.role not in self.workload.roles:
            nothing = np.zeros(choice.n_devices, dtype=np.int64)
            return OnDevices(nothing, nothing)
        parameters, kept, used = self._bytes(mfc, choice)
        if mfc.is_train:
            copies, taken = self._saved(mfc, choice)
            return OnDevices(kept[parts] + copies, np.maximum(used[parts], taken))
        if not self._is_away(mfc, choice):
            return OnDevices(kept[parts], used[parts])
        return OnDevices((kept - parameters)[parts], (used + parameters)[parts], parameters[parts])

    def parts(self, call: str, choice: Choice) -> Matrix:
        """Return int64 [devices], the number of the part of the model that each device has."""
        return parts_of(choice.strategy)

    def arriving(
        self,
        calls: tuple[str, str],
        source: Choice,
        target: Choice,
        start: int | None,
        parts: tuple[int, ...] | None = None,
    ) -> Matrix:
        """Return what the second call takes on each device at least, whose parameters live where the first one runs.

        Each rank takes at least what it would with the part of the model that costs it the least.

        Args:
            source: of it, strategy and stage of ZeRO matter.
            start: first device of the first call's mesh, seen from that of the second one's; None if none is shared.
            parts: part of the model that each device of the second call's mesh gets; None if any device may get any.
        """
        key = calls, source.strategy, source.zero_stage, target
        if key not in self._by_source:
            self._by_source[key] = self._used_by_source(*key)
        n_bytes = self._by_source[key]
        of_ranks = np.full(target.n_devices, len(n_bytes) - 1)
        if start is not None:
            first, end = max(start, 0), min(start + source.n_devices, target.n_devices)
            of_ranks[first:end] = parts_of(source.strategy)[first - start : end - start]
        found: Matrix = n_bytes.min(axis=1)[of_ranks] if parts is None else n_bytes[of_ranks, list(parts)]
        return found

    def move(
        self, calls: tuple[str, str], source: ParallelStrategy, target: ParallelStrategy, relation: Relation
    ) -> Moved:
        """Return the cost of moving the parameters of one call's role into the layout of another call."""
        roles = [call_of(self.workload.graph, name).role for name in calls]
        model = self.workload.roles[roles[0]].model
        key = model, source, target, relation
        if key not in self._moved:
            self._moved[key] = move_cost(self._cut(model), *self._beside(source, target, relation), self.hardware)
        moved = self._moved[key]
        if roles[0] == roles[1]:
            return moved
        n_bytes = int(self._cut(model).overlap(source, target).needed.max())
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
        strategy = choice.strategy
        if strategy not in self._allocations:
            self._allocations[strategy] = Allocation(mesh_at(self.workload.cluster, 0, choice.n_devices), strategy)
        return self._allocations[strategy]

    # ------------------------------------------------------------ seconds

    def _call_seconds(self, mfc: MFCDef, choice: Choice, parameters: int) -> float:
        """Return the seconds of a call whose fullest device has so many bytes of parameters."""
        if mfc.is_train:
            return self._training_seconds(mfc, choice)
        seconds = self._step_seconds(mfc, replace(choice, offloads=False))
        if not choice.offloads:
            return seconds
        n_active = min(choice.n_devices, self.workload.cluster.n_devices_per_node)
        return seconds + copy_seconds(parameters, n_active, self.hardware)

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
        """Return the seconds of all batches of a step, the mean of all steps."""
        mfc = call_of(self.workload.graph, self.twin(mfc.name))
        key = mfc.name, choice
        if key not in self._seconds:
            changed = mfc if choice.n_mbs is None else replace(mfc, n_mbs=choice.n_mbs)
            state = self._state(mfc, choice) if mfc.role in self.workload.roles else None
            allocation = self._allocation(choice)
            call = ScheduledCall(changed, allocation, CallHooks(home=None if state is None else allocation))
            model = self._model(mfc.role, state)
            seconds = sum(self._batch_seconds(model, call, batch) for batch in self._batches(mfc.n_seqs))
            self._seconds[key] = seconds / len(self.workload.steps)
        return self._seconds[key]

    def _batch_seconds(self, model: CostModel, call: ScheduledCall, batch: _Batch) -> float:
        shares, sizes = self._shares_of(call, batch), batch.sizes
        if call.hooks.home is not None:
            return max(model.of_replicas(call, [work.minibatches for work in shares], sizes))
        requests = [RunCall(0, 0, call.name, 1, work.minibatches, (), keeps=work.keeps) for work in shares]
        return max(model.call(call, dict(enumerate(requests)), sizes).values())

    def _shares_of(self, call: ScheduledCall, batch: _Batch) -> Sequence[RankWork]:
        """Return the work of each replica's first rank; by the usual protocol, it is alike for any tp and pp."""
        strategy, ids = call.allocation.strategy, [*batch.sizes]
        key = call.name, batch.step, batch.number, strategy.dp if call.mfc.protocol == DEFAULT_PROTOCOL else strategy
        if key not in self._shares:
            generates = call.mfc.interface_type is InterfaceType.GENERATE  # what nobody knows the lengths of yet
            counts = [size.prompt_tokens[0] if generates else sum(size.tokens) for size in batch.sizes.values()]
            place = self.workload.seed, batch.step, batch.number
            work, _ = plan_work(call, ids, counts, {}, self.workload.cluster.node_of, key=place)
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

    def _batches(self, n_seqs: int) -> Sequence[_Batch]:
        """Return the batches of all steps, of so many samples each."""
        if n_seqs not in self._samples:
            most = max(mfc.n_seqs for mfc in calls(self.workload.graph))
            self._samples[n_seqs] = [
                _Batch(step, number, dict(islice(sizes.items(), first, first + n_seqs)))
                for step, sizes in self.workload.steps.items()
                for number, first in enumerate(range(0, most, n_seqs))
            ]
        return self._samples[n_seqs]

    # ------------------------------------------------------------ bytes

    def _cut(self, model: DecoderConfig) -> CutModel:
        if model not in self._cuts:
            self._cuts[model] = CutModel(model)
        return self._cuts[model]

    def _used_by_source(
        self, calls: tuple[str, str], source: ParallelStrategy, zero_stage: int, target: Choice
    ) -> Matrix:
        """Return what `arriving` gives for a device with each part of the source, or with none, and of the target.

        Returns:
            int64 [parts of the source and one for none, parts of the target].
        """
        home, mfc = (call_of(self.workload.graph, name) for name in calls)
        own = self._role_bytes(home, Choice(source, zero_stage=zero_stage))
        overlap = self._cut(self.workload.roles[home.role].model).overlap(source, target.strategy)
        nothing = np.zeros_like(overlap.held[:1])
        _, _, used = self._bytes(mfc, target)
        if home.is_train and zero_stage == 3:  # what is gathered for the moment shares nothing with the home
            kept = np.zeros_like(overlap.held)
        else:
            kept = overlap.held if own.has_own_memory else overlap.whole
        received = overlap.needed - np.concatenate([overlap.held, nothing])  # [source parts and none, target parts]
        messages = np.where(received > REALLOC_BUCKET, np.minimum(received, MESSAGES), 0)  # in one round, they may fit
        found: Matrix = overlap.needed - np.concatenate([kept, nothing]) + np.maximum(used, messages)
        return found

    def _role_bytes(self, mfc: MFCDef, choice: Choice, *, is_saved: bool = False) -> RoleBytes:
        """Return the bytes of the call's role with the settings of a choice, wherever it lives."""
        key = mfc.role, mfc.is_train, choice.zero_stage, choice.offloads, choice.checkpoints, is_saved
        if key not in self._owns:
            role = replace(self._state(mfc, choice), home=self._nowhere, is_changed=is_saved)
            if role not in self._roles:
                saves = self.workload.saves if is_saved else None
                self._roles[role] = RoleBytes(role, self._cut(role.model), self.kernels, saves)
            self._owns[key] = self._roles[role]
        return self._owns[key]

    def _is_away(self, mfc: MFCDef, choice: Choice) -> bool:
        """Return True if a role's parameters leave the device's memory unless the call runs."""
        return choice.offloads and not mfc.is_train and not self.kernels.on_host

    def _saved(self, mfc: MFCDef, choice: Choice) -> tuple[Matrix | int, Matrix | int]:
        """Return, on each device of a trained role's home, copies that stay after a save, and what a save takes."""
        saves = self.workload.saves
        if saves is None:
            return 0, 0
        own, strategy = self._role_bytes(mfc, choice, is_saved=True), choice.strategy
        copies, gathered = own.copied(strategy) * self.kernels.on_host, own.gathered(strategy)
        return (copies, gathered) if saves.is_repeated else (0, gathered + copies)

    def _load(self, mfc: MFCDef, choice: Choice) -> Load:
        key = mfc.name, choice.n_mbs, choice.strategy.dp, choice.strategy.pp
        if key not in self._loads:
            self._loads[key] = load_of(
                mfc if choice.n_mbs is None else replace(mfc, n_mbs=choice.n_mbs),
                self._allocation(choice),
                self.workload.rows,
                generation=self.workload.generation,
                n_responses=self.workload.n_responses[mfc.name],
                algorithm=self.workload.algorithm,
            )
        return self._loads[key]

    def _bytes(self, mfc: MFCDef, choice: Choice) -> tuple[Matrix, Matrix, Matrix]:
        """Return the bytes of parameters, of all that the role keeps, and of what else it uses but connections.

        They are those of each part of the model, int64 [parts].
        """
        found = self._of_choices.get((mfc.name, choice))
        if found is None:
            found = self._of_choices[mfc.name, choice] = self._bytes_of_load(mfc, choice)
        return found

    def _bytes_of_load(self, mfc: MFCDef, choice: Choice) -> tuple[Matrix, Matrix, Matrix]:
        own, strategy, load = self._role_bytes(mfc, choice), _alike(choice), self._load(mfc, choice)
        key = own, strategy, mfc.interface_type, load
        if key not in self._used:
            kept, used = own.ends(strategy, mfc.interface_type, load)
            on_host = kept.resident[_HOST] * self.kernels.on_host
            self._used[key] = kept.parameters, kept.resident[_TOTAL] + on_host, used
        return self._used[key]

    def _connections(self, mfc: MFCDef, choice: Choice) -> int:
        """Return the fewest bytes of connections that any device has."""
        strategy, cluster = choice.strategy, self.workload.cluster
        key = strategy.dp, strategy.tp, strategy.pp, mfc.is_train
        if key not in self._of_links:
            links = [links_of(strategy, 0, cluster, is_trained=mfc.is_train)]
            links += [node_links(cluster)] * self.any_rows
            n_bytes = connected(links, cluster.n_devices, cluster.n_devices_per_node)[: strategy.n_devices]
            self._of_links[key] = int(n_bytes.min()) if self.workload.connects else 0
        return self._of_links[key]

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


def _alike(choice: Choice) -> ParallelStrategy:
    """Return a strategy with the same bytes: replicas that share nothing tell as much if there are two."""
    if choice.zero_stage or choice.strategy.dp <= 2:
        return choice.strategy
    return replace(choice.strategy, dp=2)

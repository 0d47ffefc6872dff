"""Durations of a run that was never made: every part of a step by its costs on given hardware.

Invariants of `CostModel`:
    - equal questions get equal answers, and no answer depends on earlier questions;
    - ranks that compute in one group take equally long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial

import numpy as np

from realrl.config.schema import GenerationConfig
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, ParallelStrategy
from realrl.plan.hooks import Offload, Realloc
from realrl.plan.memory import load as memory_load
from realrl.plan.memory.formulas.generation import generation_bytes
from realrl.plan.memory.formulas.local import Kernels, local_shape
from realrl.plan.memory.plan import RoleState, layout_of
from realrl.plan.parameters.realloc import ReallocPlan
from realrl.plan.parameters.shards import shard_of
from realrl.plan.parameters.specs import DTYPE_BYTES
from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import HookTime, MoveRows, RunCall
from realrl.shape import DecoderConfig, DType
from realrl.sim.costs.collectives import FREE, LinearCost, Route, all_gather, all_reduce, route_of, send
from realrl.sim.costs.flops import Array, StageWork, chunk_works, first_alike, stage_work, stage_works
from realrl.sim.costs.generation import Prompt, StageDecoding, replica_seconds, together_seconds
from realrl.sim.costs.moves import (
    RowBytes,
    copy_seconds,
    exchange_seconds,
    pull_seconds,
    realloc_of,
    realloc_seconds,
)
from realrl.sim.costs.samples import Tokens, micro_batches, tokens_of
from realrl.sim.costs.training import (
    NOTHING_FREE,
    STATISTICS,
    TRAINED_SIZES,
    Free,
    StageLinks,
    Training,
    busiest_stage,
    optimizer_seconds,
    passes_of,
    run_passes,
    train_seconds,
)
from realrl.sim.durations import SampleSizes, meeting_ranks
from realrl.sim.hardware import Device, Hardware, Links

_STATE_BYTES = 12.0  # a parameter's float32 master and moments in a checkpoint
_WIDTHS: Mapping[int, DType] = {2: "bfloat16", 4: "float32", 8: "float64"}
_MOST_REPLICAS = 4096  # whose seconds of generation are remembered


class CostModel:
    """`realrl.sim.durations.Durations` from hardware and shapes.

    Args:
        roles: roles that have parameters.
        hardware: the machines.
        generation: the run's settings of generation.
        kernels: the machine's kernels; those of CUDA by default.
        free: parts of calls that take no time.
    """

    def __init__(
        self,
        roles: Mapping[str, RoleState],
        hardware: Hardware,
        *,
        generation: GenerationConfig,
        kernels: Kernels | None = None,
        free: Free = NOTHING_FREE,
    ) -> None:
        self._roles = roles
        self._hardware = hardware
        self._generation = generation
        self._kernels = kernels or Kernels()
        self._free = free
        self._computing: dict[tuple[str, Allocation, InterfaceType], _Computing] = {}
        self._copied: dict[str, dict[int, float]] = {}  # role -> seconds of copying its parameters, by rank

    def without(self, free: Free, hardware: Hardware) -> CostModel:
        """Return the same costs where some parts of calls take no time, on other hardware."""
        return CostModel(self._roles, hardware, generation=self._generation, kernels=self._kernels, free=free)

    @property
    def hardware(self) -> Hardware:
        """The machines."""
        return self._hardware

    # ------------------------------------------------------------ calls

    def call(
        self, call: ScheduledCall, requests: Mapping[int, RunCall], sizes: Mapping[str, SampleSizes]
    ) -> Mapping[int, float]:
        """Return the seconds of one dispatch on each rank of the mesh.

        Raises:
            ConfigError: the hardware has no peak for the dtype of a model.
        """
        if call.hooks.home is None:
            return {rank: self._judging(request, sizes) for rank, request in requests.items()}
        replicas = self._computing_of(call.mfc, call.allocation).replicas
        seconds = self.of_replicas(call, [requests[members[0]].minibatches for members in replicas], sizes)
        return {rank: s for members, s in zip(replicas, seconds, strict=True) for rank in members}

    def of_replicas(
        self,
        call: ScheduledCall,
        minibatches: Sequence[tuple[tuple[str, ...], ...]],
        sizes: Mapping[str, SampleSizes],
    ) -> list[float]:
        """Return the seconds of one dispatch on each data-parallel replica of a role with parameters.

        Args:
            minibatches: those of each replica, as `RunCall` has them.
            sizes: as for `call`.
        """
        computing = self._computing_of(call.mfc, call.allocation)
        if call.mfc.is_train:
            seconds = [computing.training(call, minibatches, sizes)] * len(minibatches)
        elif call.is_generate:
            seconds = computing.generating([one[0] for one in minibatches], sizes)
        else:
            seconds = computing.inferring(call, [one[0] for one in minibatches], sizes)
        host = self._hardware.host
        counts = [sum(map(len, own)) for own in minibatches]
        return [s + (host.call_s + host.sample_s * n) for s, n in zip(seconds, counts, strict=True)]

    def meets(self, call: ScheduledCall) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that begin the computation of a call together."""
        return meeting_ranks(call)

    def _judging(self, request: RunCall, sizes: Mapping[str, SampleSizes]) -> float:
        """Return the seconds of a role without parameters, which works on what the rank keeps."""
        host = self._hardware.host
        n = sum(len(sizes[sample_id].prompt_tokens) for sample_id in request.keeps)
        return host.call_s + host.pool_s + host.reward_s * n

    def passes(
        self, mfc: MFCDef, allocation: Allocation, sample_ids: Sequence[str], sizes: Mapping[str, SampleSizes]
    ) -> tuple[Array, Array]:
        """Return the seconds of forward and of backward passes of a minibatch's micro-batches, [stages, micro-batches].

        Args:
            mfc: a train_step.
            sample_ids: the minibatch's samples on one replica.
        """
        return self._computing_of(mfc, allocation).pass_seconds(mfc, sample_ids, sizes)

    def _computing_of(self, mfc: MFCDef, allocation: Allocation) -> _Computing:
        key = (mfc.role, allocation, mfc.interface_type)
        if key not in self._computing:
            self._computing[key] = _Computing(
                self._roles[mfc.role],
                allocation,
                self._hardware,
                generation=self._generation,
                kernels=self._kernels,
                kind=mfc.interface_type,
                free=self._free,
            )
        return self._computing[key]

    # ------------------------------------------------------------ parameters and rows

    def hooks(self, call: ScheduledCall, when: HookTime, ranks: Collection[int]) -> Mapping[int, float]:
        """Return the seconds of the hooks on one side of a call, of parameters that are on the device."""
        seconds = dict.fromkeys(ranks, 0.0)
        if when == "ahead of":
            return dict.fromkeys(ranks, self._hardware.links.device.latency_s)
        for hook in call.hooks.before if when == "before" else call.hooks.after:
            if isinstance(hook, Offload):
                role = self._roles[hook.role]
                found = self._copying(hook.role, hook.ranks) if role.is_changed or role.is_trained else {}
            else:
                found = dict.fromkeys(hook.ranks, self._moving(hook))
            for rank in seconds:
                seconds[rank] += found.get(rank, 0.0)
        return seconds

    def onload(self, role: str, ranks: Collection[int]) -> Mapping[int, float]:
        """Return the seconds until parameters of a role are back from host memory."""
        return self._copying(role, ranks)

    def received_bytes(self, call: ScheduledCall, when: HookTime, rank: int) -> int:
        """Return the bytes of parameters that hooks bring to a rank from others."""
        hooks = () if when == "ahead of" else getattr(call.hooks, when)
        return sum(self._plan_of(hook).bytes_received(rank) for hook in hooks if isinstance(hook, Realloc))

    def rows(self, requests: Mapping[int, MoveRows | RunCall], sizes: Mapping[str, SampleSizes]) -> Mapping[int, float]:
        """Return the seconds in which ranks get the rows that they lack."""
        bytes_of, hardware = RowBytes(sizes), self._hardware
        found = {}
        for rank, request in requests.items():
            if isinstance(request, MoveRows):
                sent, received = request.sends, request.receives
                pulled = 0.0
            else:
                sent = tuple([t for t in request.spreads if t.source == rank])
                received = tuple([t for t in request.spreads if t.target == rank])
                pulled = pull_seconds(request.transfers, bytes_of, hardware)
            ways = (exchange_seconds(way, bytes_of, hardware, self._node_of) for way in (sent, received))
            found[rank] = pulled + max(ways)
        return found

    @cached_property
    def _node_of(self) -> Callable[[int], int]:
        cluster = next(iter(self._roles.values())).home.mesh.cluster
        return cluster.node_of

    def _plan_of(self, hook: Realloc) -> ReallocPlan:
        return realloc_of(self._roles[hook.source].model, hook.source_allocation, hook.target_allocation)

    def _moving(self, hook: Realloc) -> float:
        plan = self._plan_of(hook)
        seconds = realloc_seconds(plan, self._hardware, self._node_of)
        if hook.is_implied:
            return seconds
        target = max(plan.target_layout.num_bytes_of(rank) for rank in plan.target_layout.ranks)
        return seconds + 3 * target / self._hardware.device.stream  # read twice, and written

    def _copying(self, role: str, ranks: Collection[int]) -> dict[int, float]:
        if role not in self._copied:
            state = self._roles[role]
            layout, mesh = layout_of(state.model, state.home), state.home.mesh
            n_active = min(mesh.n_devices, mesh.cluster.n_devices_per_node)
            self._copied[role] = {
                rank: copy_seconds(layout.num_bytes_of(rank), n_active, self._hardware) for rank in mesh.ranks
            }
        copied = self._copied[role]
        return {rank: copied[rank] for rank in ranks if rank in copied}

    # ------------------------------------------------------------ everything else

    def load(self, n_samples: int) -> float:
        """Return the seconds of loading samples of the dataset."""
        return n_samples * self._hardware.host.sample_s

    def read(self, n_samples: int) -> float:
        """Return the seconds of reading texts and numbers out."""
        return n_samples * self._hardware.host.sample_s

    def free(self) -> float:
        """Return the seconds of freeing samples."""
        return self._hardware.host.sample_s

    def save(self, rank: int) -> float:
        """Return the seconds in which a rank copies its share of a checkpoint, and does nothing else."""
        return copy_seconds(self._saved_bytes(rank), 1, self._hardware)

    def write(self, rank: int) -> float:
        """Return the seconds in which the copy is then written."""
        return self._saved_bytes(rank) / self._hardware.host.disk_bytes_per_s

    def start(self) -> float:
        """Return the seconds in which a worker builds groups, models and dataset."""
        return self._hardware.host.start_s

    def handling(self, n_events: int) -> float:
        """Return the seconds in which the master handles events."""
        return n_events * self._hardware.host.event_s

    def latency(self, rank: int) -> float:
        """Return the seconds of one message between master and worker."""
        return self._hardware.host.message_s

    def _saved_bytes(self, rank: int) -> float:
        total = 0.0
        for state in self._roles.values():
            if not state.is_trained or rank not in state.home.ranks:
                continue
            layout = layout_of(state.model, state.home)
            stage, dp_rank, _ = layout.coordinates_of(rank)
            if dp_rank == 0:
                work = stage_work(state.model, state.home.strategy, stage)
                total += layout.num_bytes_of(rank) + _STATE_BYTES * work.n_trained
        return total


class _Computing:
    """Costs of one kind of computation of one role under one allocation."""

    def __init__(
        self,
        role: RoleState,
        allocation: Allocation,
        hardware: Hardware,
        *,
        generation: GenerationConfig,
        kernels: Kernels,
        kind: InterfaceType,
        free: Free,
    ) -> None:
        strategy, model = allocation.strategy, role.model
        self._model, self._strategy, self._hardware, self._allocation = model, strategy, hardware, allocation
        self._generation = generation
        if kind is InterfaceType.GENERATE:
            model = decoding_model(model, kernels)
        self._works = stage_works(model, strategy)
        self._links = [*map(free.of, _links_of(allocation, hardware.links))]
        self._free = free
        self._run = partial(busiest_stage if free.waits else run_passes, n_stages=strategy.pp)
        self._shares_prefixes = hardware.device.kind == "cpu" or role.model.dtype == "float32"
        training = None
        self._end_s = self._begin_s = 0.0
        if kind is InterfaceType.TRAIN_STEP:
            training = Training(
                role.backend,
                role.zero_stage,
                role.offloads_optimizer,
                role.checkpoints_activations,
                strategy.dp,
                strategy.pp,
            )
            self._begin_s = STATISTICS * max(link.reduce.latency_s for link in self._links)
            self._end_s = TRAINED_SIZES * hardware.device.size_s
            if not free.optimizer:
                ends = (optimizer_seconds(work, link, hardware, training) for work, link in self._stages)
                self._end_s += max(ends)
        elif role.zero_stage == 3 and role.is_trained and allocation == role.home:
            self._begin_s = max(link.gather(work.n_trained * work.element_bytes) for work, link in self._stages)
        chunks = chunk_works(model, strategy)
        self._chunk_links = [self._links[number % strategy.pp] for number in range(len(chunks))]
        self._passes = passes_of(chunks, self._chunk_links, hardware, training)
        if kind is InterfaceType.GENERATE:
            self._begin_s += packing_seconds(role.model, strategy, kernels, hardware.device.generating)

    @cached_property
    def replicas(self) -> list[tuple[int, ...]]:
        """Ranks of each data-parallel replica."""
        return [self._allocation.dp_group_members(i) for i in range(self._strategy.dp)]

    @property
    def _stages(self) -> Collection[tuple[StageWork, StageLinks]]:
        """Stages that differ, each once."""
        pairs = zip(self._works, self._links, strict=True)
        return {(id(work), link): (work, link) for work, link in pairs}.values()

    def training(
        self,
        call: ScheduledCall,
        minibatches: Sequence[tuple[tuple[str, ...], ...]],
        sizes: Mapping[str, SampleSizes],
    ) -> float:
        """Return the seconds of a train_step on all ranks; `minibatches` are those of each replica."""
        shares = [ids for replica in minibatches for ids in replica]
        n_minibatches = len(minibatches[0])
        tokens = self._tokens(sizes)
        cut = [
            ([place % n_minibatches for place in part.places], part.columns, part.load)
            for part in micro_batches(tokens, shares, call.mfc, n_stages=self._strategy.pp)
        ]
        return self._begin_s + train_seconds(
            cut, n_minibatches, self._passes, self._chunk_links, self._end_s, self._run
        )

    def pass_seconds(
        self, mfc: MFCDef, sample_ids: Sequence[str], sizes: Mapping[str, SampleSizes]
    ) -> tuple[Array, Array]:
        """Return the seconds of passes of one share of samples, [stages, micro-batches]."""
        (part,) = micro_batches(self._tokens(sizes), [sample_ids], mfc, n_stages=self._strategy.pp)
        forwards, backwards = (np.stack([cost(part.load)[:, 0] for cost in costs]) for costs in self._passes)
        return forwards, backwards

    def inferring(
        self, call: ScheduledCall, shares: Sequence[tuple[str, ...]], sizes: Mapping[str, SampleSizes]
    ) -> list[float]:
        """Return the seconds of each replica, whose samples are `shares`."""
        tokens = self._tokens(sizes)
        seconds = [self._begin_s] * len(shares)
        # the result, from the last stage to the others, in three messages: how long its form is, its form, itself
        told = 3 * math.ceil(math.log2(self._strategy.pp)) * self._links[0].forward.latency_s
        told += self._hardware.device.size_s
        for part in micro_batches(tokens, shares, call.mfc, n_stages=self._strategy.pp):
            found = self._run(part.load, *self._passes, self._chunk_links)
            for place, s in zip(part.places, found[part.columns].tolist(), strict=True):
                seconds[place] += s + told
        return seconds

    def generating(self, shares: Sequence[tuple[str, ...]], sizes: Mapping[str, SampleSizes]) -> list[float]:
        """Return the seconds of each replica; `sizes` has the responses that it will make."""
        replicas: list[tuple[Prompt, ...]] = [
            tuple([(size.prompt_tokens[0], size.response_tokens) for size in map(sizes.__getitem__, share)])
            for share in shares
        ]
        at_work = [place for place, prompts in enumerate(replicas) if prompts]
        seconds = [self._begin_s] * len(replicas)
        if self._strategy.pp == 1:
            most = self._generation.max_batch_size
            together = [place for place in at_work if sum([len(made) for _, made in replicas[place]]) <= most]
            found = together_seconds([replicas[place] for place in together], self._decoding[0])
            for place, s in zip(together, found.tolist(), strict=True):
                seconds[place] += s
            at_work = sorted({*at_work}.difference(together))
        for place in at_work:
            seconds[place] += self._replica_seconds(replicas[place])
        return seconds

    def _tokens(self, sizes: Mapping[str, SampleSizes]) -> Tokens:
        return tokens_of(sizes, self._model, shares_prefixes=self._shares_prefixes)

    @cached_property
    def _decoding(self) -> tuple[StageDecoding, ...]:
        n = self._strategy.vpp  # messages of each stage in a step; its chunks are taken for equal ones
        made = {
            (id(work), link): StageDecoding(
                work,
                self._hardware.device,
                link.tensor,
                LinearCost(n * link.forward.latency_s, n * link.forward.s_per_byte),
                self._generation.max_batch_size,
            )
            for work, link in self._stages
        }
        return tuple(made[id(work), link] for work, link in zip(self._works, self._links, strict=True))

    @cached_property
    def _replica_seconds(self) -> Callable[[tuple[Prompt, ...]], float]:
        @lru_cache(maxsize=_MOST_REPLICAS)
        def seconds(prompts: tuple[Prompt, ...]) -> float:
            return replica_seconds(prompts, self._decoding, self._generation, waits=not self._free.waits)

        return seconds


@lru_cache(maxsize=1024)  # a search asks for the same strategies again and again
def _links_of(allocation: Allocation, links: Links) -> tuple[StageLinks, ...]:
    """Return the collectives of each stage's ranks, by the first group of each kind."""
    strategy, mesh, ranks = allocation.strategy, allocation.mesh, allocation.ranks
    dp, tp, pp = strategy.dp, strategy.tp, strategy.pp

    def route(start: int, stop: int, step: int) -> Route:
        return route_of(ranks[start:stop:step], mesh)

    def of_stage(stage: int) -> StageLinks:
        first = stage * dp * tp
        replicas = route(first, first + dp * tp, tp)
        forward: LinearCost = FREE
        if pp > 1:
            here, there = (mesh.cluster.node_of(ranks[(stage + i) % pp * dp * tp]) for i in (0, 1))
            forward = send(here != there, replicas.n_active, links)
        is_end = pp > 1 and stage in (0, pp - 1)
        return StageLinks(
            tensor=all_reduce(route(first, first + tp, 1), links),
            reduce=all_reduce(replicas, links),
            gather=all_gather(replicas, links),
            tied=all_reduce(route(0, len(ranks), (pp - 1) * dp * tp), links) if is_end else FREE,
            forward=forward,
        )

    return tuple(map(of_stage, range(pp)))


def decoding_model(model: DecoderConfig, kernels: Kernels) -> DecoderConfig:
    """Return a model in the dtype in which a machine's kernels generate."""
    if kernels.generation_bytes in (None, DTYPE_BYTES[model.dtype]):
        return model
    return replace(model, dtype=_WIDTHS[kernels.generation_bytes or 0])


def packing_seconds(model: DecoderConfig, strategy: ParallelStrategy, kernels: Kernels, device: Device) -> float:
    """Return the seconds of joining or packing matrices before generation, on the slowest stage."""
    found = []
    for stage in set(first_alike(model, strategy.pp, strategy.vpp)):
        mesh_rank = strategy.mesh_rank(pp_rank=stage, dp_rank=0, tp_rank=strategy.tp - 1)
        shard = shard_of(model, strategy, mesh_rank)
        local = local_shape(model, shard, sp=strategy.sp, element_bytes=DTYPE_BYTES[model.dtype])
        made = generation_bytes(local, memory_load.Load(1), kernels=kernels)
        found.append(2 * made.weights / device.stream)
    return max(found)

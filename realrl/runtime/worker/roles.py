"""The roles that one rank hosts: a model for each layout that the rank is in, tokenizer and interfaces.

home layout      parameters, and the optimizer of a trained role; on the device or offloaded
other layouts    a decoder without memory, which a reallocation fills for one call
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from realrl.algo.api import Engine, Model, ModelInterface
from realrl.algo.phases import Phases
from realrl.algo.resolve import resolve_interface
from realrl.config.schema import BUILT_IN
from realrl.data.tokenizer import load_tokenizer
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.groups import Groups
from realrl.engine.parallel import Parallel, parallel_of
from realrl.engine.parameters.offload import Offloader, Residence
from realrl.engine.tensor_parallel import TensorParallelGroup
from realrl.engine.weightless import WeightlessEngine
from realrl.experiment.declaration import Role
from realrl.experiment.models import DTYPES
from realrl.experiment.run_plan import RunPlan
from realrl.graph.mfc import MFCDef, ModelName
from realrl.mesh.device_mesh import Allocation
from realrl.model.decoder import Decoder
from realrl.model.dtypes import torch_dtype
from realrl.model.files.companions import read_companions
from realrl.model.files.hf import load_model
from realrl.model.init import random_model
from realrl.model.lora import add_adapters
from realrl.model.parallel import UNSHARDED, TensorParallel
from realrl.plan.parameters.shards import shard_of
from realrl.shape import DecoderConfig


@dataclass
class HostedRole:
    """One role on this rank.

    Attributes:
        models: allocation -> model, for each allocation of the role's calls whose mesh holds this rank.
        home: the allocation that the parameters live in; None for a role without parameters.
        interfaces: call -> interface. Calls of one role that name the same interface with the same arguments share one
            instance and its state (value statistics, KL controller). The state lives in the home layout, like the
            parameters; a call elsewhere gets a copy.
        offloader: mover of the parameters to host memory and back; None on a rank outside the home.
        is_changed: True if a call or hook changes the parameters, so that a checkpoint must hold them.
        schedule_steps: steps over which the learning-rate schedule goes; None: those of the run.
        companions: files beside the weights that checkpoints keep, by name; on the home's first rank alone.
        visiting: call outside the home -> parameters that were brought for it, by name.
    """

    role: Role
    models: Mapping[Allocation, Model]
    home: Allocation | None
    interfaces: Mapping[str, ModelInterface]
    calls: tuple[MFCDef, ...]
    offloader: Offloader | None = None
    is_changed: bool = False
    calls_per_step: int = 1
    schedule_steps: int | None = None
    algorithm: Any = None
    companions: Mapping[str, bytes] = field(default_factory=dict)
    visiting: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    _shared: dict[str, list[torch.Tensor]] = field(default_factory=dict, repr=False)
    _n_steps: int = field(default=0, repr=False)

    @property
    def has_weights(self) -> bool:
        """True if the role has a model, not just a tokenizer."""
        return self.home is not None

    @property
    def home_engine(self) -> DecoderEngine | None:
        """The engine that holds the parameters; None on a rank that is not in the home, or without parameters."""
        model = None if self.home is None else self.models.get(self.home)
        if model is None:
            return None
        assert isinstance(model.engine, DecoderEngine)
        return model.engine

    @property
    def tokenizer(self) -> Any:
        return next(iter(self.models.values())).tokenizer

    @property
    def version(self) -> int:
        """The number of train_step calls that the parameters have been through."""
        return next(iter(self.models.values())).version

    @version.setter
    def version(self, version: int) -> None:
        for model in self.models.values():
            model.version = version

    def decoder(self, allocation: Allocation) -> Decoder:
        """This rank's shard in the layout of an allocation."""
        engine = self.models[allocation].engine
        assert isinstance(engine, DecoderEngine)
        return engine.decoder

    def record(self, phases: Phases) -> None:
        """Let the engines tell a recorder what they spend their time on."""
        for model in self.models.values():
            if isinstance(model.engine, DecoderEngine):
                model.engine.phases = phases

    def set_schedule_end(self, n_steps: int) -> None:
        """Make the learning-rate schedule end with the run's last step, unless `schedule_steps` says where."""
        engine, n_steps = self.home_engine, self.schedule_steps or n_steps
        if n_steps == self._n_steps or engine is None:
            return
        self._n_steps = n_steps
        train = next(mfc for mfc in self.calls if mfc.is_train)
        n_minibatches = train.n_minibatches * train.n_passes
        per_call = self.interfaces[train.name].optimizer_steps_per_call(n_minibatches, self.algorithm)
        engine.set_total_optimizer_steps(n_steps * self.calls_per_step * per_call)

    @property
    def state_interfaces(self) -> dict[str, ModelInterface]:
        """The distinct interfaces, by the first call that uses each."""
        distinct: dict[int, tuple[str, ModelInterface]] = {}
        for call, interface in self.interfaces.items():
            distinct.setdefault(id(interface), (call, interface))
        return dict(distinct.values())

    # ------------------------------------------------------------ parameters outside the home

    def receive(self, call: str, parameters: Mapping[str, torch.Tensor], shared: list[torch.Tensor]) -> None:
        """Take in the parameters of a call outside the home; those of the home in `shared` lie in the same memory."""
        self.visiting[call] = parameters
        self._shared[call] = shared

    def send_home(self, call: str) -> None:
        """Free the parameters of a call outside the home; those of the home leave the memory that both share.

        Parameters of other calls that are parts of theirs go with them.
        """
        memory = {tensor.untyped_storage().data_ptr() for tensor in self.visiting.pop(call).values()}
        others = [tensor for tensors in self.visiting.values() for tensor in tensors.values()]
        _move_out([p for p in self._shared.pop(call) if p.untyped_storage().data_ptr() in memory], others)

    def forget_visits(self) -> None:
        """Free what was brought for calls, before the home changes: it would be old, or partly new where shared."""
        for call in list(self.visiting):
            self.send_home(call)

    def _separate(self) -> None:
        """Give all parameters of the home memory of their own, before they leave the device."""
        for shared in self._shared.values():
            _move_out(shared)
            shared.clear()

    # ------------------------------------------------------------ host memory

    def prefetch(self) -> None:
        """Start to bring the home's parameters back, if they are in host memory."""
        if self.offloader is not None and self.offloader.residence is Residence.OFFLOADED:
            self.offloader.prefetch()

    @property
    def is_away(self) -> bool:
        """True if the home's parameters are in host memory."""
        return self.offloader is not None and self.offloader.residence is Residence.OFFLOADED

    def wait_resident(self) -> None:
        """Wait until the home's parameters, if this rank has any, can be used."""
        if self.offloader is not None:
            self.offloader.wait()

    def offload(self) -> None:
        """Move the home's parameters to host memory, unless they are there."""
        self._separate()
        if self.offloader is not None:
            if self.offloader.residence is Residence.RETURNING:
                self.offloader.wait()
            if self.offloader.residence is Residence.RESIDENT:
                self.offloader.offload()


def _move_out(shared: Iterable[torch.Tensor], parts: Sequence[torch.Tensor] = ()) -> None:
    """Give tensors memory of their own, one after the other, if they lie in larger memory.

    Args:
        parts: tensors that stay parts of those that they lie in.
    """
    for tensor in shared:
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            old = tensor.data
            tensor.data = old.clone(memory_format=torch.contiguous_format)
            for part in parts:
                if part.untyped_storage().data_ptr() == old.untyped_storage().data_ptr():
                    part.data = tensor.data[_place_in(old, part)]


def _place_in(whole: torch.Tensor, part: torch.Tensor) -> tuple[slice, ...]:
    """Return where a tensor lies in another one of the same memory and strides, which contains it."""
    rest, place = int(part.storage_offset()) - int(whole.storage_offset()), []
    for stride, size in zip(whole.stride(), part.shape, strict=True):
        start, rest = divmod(rest, stride)
        place.append(slice(start, start + size))
    return tuple(place)


def build_roles(
    plan: RunPlan,
    rank: int,
    groups: Groups,
    device: torch.device,
    *,
    configs: Mapping[str, DecoderConfig],
    resume_from: Path | None = None,
) -> dict[str, HostedRole]:
    """Build every role with a call on `rank`.

    Args:
        configs: role -> configuration of its model, for roles with a model.
        resume_from: checkpoint folder that holds the parameters of changed roles; None for their initial weights.

    Raises:
        AssetError: a model or tokenizer folder, or the checkpoint, cannot be used.
        ConfigError: an interface does not exist.
    """
    planned = plan.process_groups
    hosted: dict[str, HostedRole] = {}
    for name, role in plan.roles.items():
        allocations = [allocation for allocation in plan.allocations_of(name) if rank in allocation.ranks]
        if not allocations:
            continue
        calls = plan.calls_of(name)
        builder = _Builder(plan, name, device, configs.get(name), resume_from)
        tokenizer = load_tokenizer(plan.config.models[name].path)
        models = {
            allocation: Model(
                ModelName(name),
                builder.engine(allocation, rank, parallel_of(groups, planned, allocation, rank)),
                tokenizer,
            )
            for allocation in allocations
        }
        trains = [mfc for mfc in calls if mfc.is_train]
        hosted[name] = HostedRole(
            role=role,
            models=models,
            home=plan.home_of(name),
            interfaces=_interfaces((*calls, *plan.eval_calls_of(name))),
            calls=calls,
            is_changed=name in plan.changed_roles,
            calls_per_step=plan.samples_per_step // trains[0].n_seqs if trains else 1,
            schedule_steps=plan.config.models[name].optimizer.schedule_steps,
            algorithm=plan.config.algorithm,
            companions=builder.companions(rank),
        )
        engine = hosted[name].home_engine
        if engine is not None:
            hosted[name].offloader = Offloader(
                engine.kept_tensors(), device, keeps_host_copy=not hosted[name].is_changed
            )
    return hosted


def role_tokenizer(plan: RunPlan) -> Any:
    """Load the dataset's tokenizer: that of the role whose call reads dataset keys first."""
    return load_tokenizer(plan.config.models[plan.dataset_role].path)


class _Builder:
    """Makes the engines of one role.

    Args:
        config: configuration of the model; None for a role without weights.
    """

    def __init__(
        self, plan: RunPlan, name: str, device: torch.device, config: DecoderConfig | None, resume_from: Path | None
    ) -> None:
        self._plan = plan
        self._name = name
        self._device = device
        self._config = config
        self._section = plan.config.models[name]
        self._resume_from = resume_from if name in plan.changed_roles else None

    def engine(self, allocation: Allocation, rank: int, parallel: Parallel) -> Engine:
        """Make the engine of one layout, with its parameters if that is the home."""
        if self._config is None:
            return WeightlessEngine(self._name, self._device, parallel)
        if allocation != self._plan.home_of(self._name):
            decoder = Decoder(
                self._config,
                shard=shard_of(self._config, allocation.strategy, allocation.ranks.index(rank)),
                parallel=_tensor_parallel(parallel),
                device=torch.device("meta"),
            )
            return DecoderEngine(decoder, role=self._name, parallel=parallel)
        is_trainable = self._plan.roles[self._name].trainable
        decoder = self._load(self._config, allocation, rank, _tensor_parallel(parallel))
        decoder.activation_checkpointing = self._section.activation_checkpointing
        return DecoderEngine(
            decoder,
            role=self._name,
            parallel=parallel,
            optimizer=self._section.optimizer if is_trainable else None,
            compute_dtype=torch_dtype(DTYPES[self._plan.config.precision]),
            backend=self._section.backend,
        )

    def companions(self, rank: int) -> dict[str, bytes]:
        """Read the files that checkpoints keep beside the weights, on the home's first rank."""
        home = self._plan.home_of(self._name)
        if self._config is None or home is None or rank != home.ranks[0] or self._section.path == BUILT_IN:
            return {}
        if self._name not in self._plan.changed_roles:
            return {}
        folders = [Path(self._section.path).expanduser()]
        folders += [] if self._resume_from is None else [self._resume_from / self._name]
        return read_companions(folders, generates=not self._config.is_scalar)

    def _load(self, config: DecoderConfig, allocation: Allocation, rank: int, parallel: TensorParallel) -> Decoder:
        role, run = self._plan.roles[self._name], self._plan.config
        # the checkpoint's state holds the adapters; their base model is where it was when the run began
        resume_from = self._resume_from if config.lora is None else None
        path = self._section.path if resume_from is None else str(resume_from / self._name)
        has_masters = (role.trainable and config.lora is None) or self._name in self._plan.averaged_roles
        dtype = "float32" if has_masters else DTYPES[run.precision]
        shard = shard_of(config, allocation.strategy, allocation.ranks.index(rank))
        if path == BUILT_IN:
            config = replace(config, dtype=dtype)
            return random_model(config, run.seed, shard=shard, parallel=parallel, device=self._device)
        decoder = load_model(
            path,
            head=config.head,
            dtype=torch_dtype(dtype),
            shard=shard,
            parallel=parallel,
            device=self._device,
            seed=run.seed,
        )
        decoder.config = replace(decoder.config, moe=config.moe)
        if config.lora is not None:
            add_adapters(decoder, config.lora, seed=run.seed)
        return decoder


def _tensor_parallel(parallel: Parallel) -> TensorParallel:
    if parallel.tp.n_ranks == 1:
        return UNSHARDED
    return TensorParallelGroup(parallel.tp, sp=parallel.strategy.sp)


def _interfaces(calls: tuple[MFCDef, ...]) -> dict[str, ModelInterface]:
    instances: list[tuple[object, ModelInterface]] = []
    by_call: dict[str, ModelInterface] = {}
    for mfc in calls:
        identity = (mfc.interface.name, dict(mfc.interface.args))
        known = next((interface for other, interface in instances if other == identity), None)
        if known is None:
            known = resolve_interface(mfc.interface)
            instances.append((identity, known))
        by_call[mfc.name] = known
    return by_call

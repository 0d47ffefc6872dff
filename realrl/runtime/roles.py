"""The roles that one rank hosts: weights, engine, tokenizer and interfaces, built from a plan and saved to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from realrl.algo.api import Engine, Model, ModelInterface
from realrl.algo.registry import resolve_interface
from realrl.config.schema import BUILT_IN, RunConfig
from realrl.data.tokenizer import load_tokenizer
from realrl.engine.groups import Groups
from realrl.engine.native import NativeEngine
from realrl.engine.weightless import WeightlessEngine
from realrl.errors import AssetError
from realrl.experiment import Role
from realrl.graph.mfc import MFCDef, ModelName
from realrl.model.config import tiny_config
from realrl.model.decoder import Decoder
from realrl.model.hf import load_model
from realrl.model.init import random_model
from realrl.plan.groups import GroupKind, group_of, process_groups
from realrl.runtime.run_plan import RunPlan
from realrl.runtime.state_file import load_state, save_state

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class HostedRole:
    """One role on this rank.

    Attributes:
        interfaces: call -> interface. Calls of one role that name the same interface with the same arguments share one
            instance, and with it what the interface remembers (value statistics, KL controller).
        is_first: whether this rank is the role's first, which saves it for all that hold the same.
    """

    role: Role
    model: Model
    interfaces: Mapping[str, ModelInterface]
    calls: tuple[MFCDef, ...]
    is_first: bool
    calls_per_step: int = 1
    algorithm: Any = None
    _n_steps: int = field(default=0, repr=False)

    def set_schedule_end(self, n_steps: int) -> None:
        """Let the learning-rate schedule end with the run's last step."""
        if n_steps == self._n_steps or not isinstance(self.model.engine, NativeEngine):
            return
        self._n_steps = n_steps
        train = next(mfc for mfc in self.calls if mfc.is_train)
        per_call = self.interfaces[train.name].optimizer_steps_per_call(train.n_minibatches, self.algorithm)
        self.model.engine.set_total_optimizer_steps(n_steps * self.calls_per_step * per_call)

    @property
    def state_interfaces(self) -> dict[str, ModelInterface]:
        """The distinct interfaces, by the first call that uses each."""
        distinct: dict[int, tuple[str, ModelInterface]] = {}
        for call, interface in self.interfaces.items():
            distinct.setdefault(id(interface), (call, interface))
        return dict(distinct.values())


def build_roles(
    plan: RunPlan, rank: int, groups: Groups, device: torch.device, resume_from: Path | None
) -> dict[str, HostedRole]:
    """Load every role whose mesh holds `rank`; from a checkpoint folder when one is given.

    Raises:
        AssetError: a model or tokenizer folder, or the checkpoint, cannot be used.
        ConfigError: an interface does not exist.
    """
    planned = process_groups(plan.allocations.values(), plan.cluster)
    hosted: dict[str, HostedRole] = {}
    for name, role in plan.roles.items():
        ranks = plan.role_ranks(name)
        if rank not in ranks:
            continue
        calls = plan.calls_of(name)
        dp = groups[group_of(planned, GroupKind.DP, plan.allocations[calls[0].name], rank)]
        tokenizer = load_tokenizer(plan.config.models[name].path)
        engine: Engine
        if role.head == "none":
            engine = WeightlessEngine(name, device, dp)
        else:
            section = plan.config.models[name]
            decoder = _load_decoder(plan.config, name, role, len(tokenizer), device, resume_from)
            decoder.activation_checkpointing = section.activation_checkpointing
            engine = NativeEngine(
                decoder,
                role=name,
                dp=dp,
                optimizer=section.optimizer if role.trainable else None,
                compute_dtype=DTYPES[plan.config.precision],
            )
        trains = [mfc for mfc in calls if mfc.is_train]
        hosted[name] = HostedRole(
            role=role,
            model=Model(ModelName(name), engine, tokenizer),
            interfaces=_interfaces(calls),
            calls=calls,
            is_first=rank == ranks[0],
            calls_per_step=plan.samples_per_step // trains[0].n_seqs if trains else 1,
            algorithm=plan.config.algorithm,
        )
        if resume_from is not None:
            _restore(hosted[name], resume_from)
    return hosted


def role_tokenizer(plan: RunPlan) -> Any:
    """The tokenizer of the dataset: that of the role whose call reads dataset keys first."""
    return load_tokenizer(plan.config.models[plan.dataset_role].path)


def save_roles(roles: Mapping[str, HostedRole], folder: Path) -> None:
    """Write what this rank is the first to hold: trainable roles in Hugging Face format, and all state.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    for name, hosted in roles.items():
        engine = hosted.model.engine
        if not hosted.is_first or not isinstance(engine, NativeEngine):
            continue
        if hosted.role.trainable:
            engine.save_hf(folder / name)
            hosted.model.tokenizer.save_pretrained(folder / name)
        state = {
            "version": hosted.model.version,
            "engine": engine.state_dict(),
            "interfaces": {call: interface.state_dict() for call, interface in hosted.state_interfaces.items()},
        }
        (folder / "state").mkdir(parents=True, exist_ok=True)
        save_state(folder / "state" / f"{name}.safetensors", state)


def _load_decoder(
    config: RunConfig, name: str, role: Role, vocab_size: int, device: torch.device, resume_from: Path | None
) -> Decoder:
    assert role.head != "none"
    path = config.models[name].path
    dtype = torch.float32 if role.trainable else DTYPES[config.precision]
    if resume_from is not None and role.trainable:
        path = str(resume_from / name)
    if path == BUILT_IN:
        return random_model(tiny_config(vocab_size, head=role.head, dtype=dtype), config.seed, device=device)
    return load_model(path, head=role.head, dtype=dtype, device=device, seed=config.seed)


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


def _restore(hosted: HostedRole, folder: Path) -> None:
    path = folder / "state" / f"{hosted.model.name.role}.safetensors"
    engine = hosted.model.engine
    if not isinstance(engine, NativeEngine):
        return
    state = load_state(path)
    try:
        hosted.model.version = state["version"]
        engine.load_state_dict(state["engine"])
        for call, interface in hosted.state_interfaces.items():
            interface.load_state_dict(state["interfaces"].get(call, {}))
    except (KeyError, ValueError, RuntimeError) as err:
        raise AssetError(
            f"the state file {path} does not fit this run: {err}",
            remedy="Resume with the same experiment, models and precision.",
        ) from err

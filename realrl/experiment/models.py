"""The models of a plan's roles, and how their parameters move between layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from realrl.config.schema import BUILT_IN
from realrl.data.tiny import VOCAB_SIZE
from realrl.errors import ConfigError
from realrl.experiment.backends import trained_roles
from realrl.experiment.run_plan import RunPlan
from realrl.mesh.device_mesh import Allocation
from realrl.model.files.hf import read_config, read_model_config
from realrl.plan.hooks import Realloc
from realrl.plan.parameters.adapters import LoRA, resolve_targets
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout, parameter_specs
from realrl.plan.parameters.realloc import ReallocPlan, plan_realloc
from realrl.shape import DecoderConfig, tiny_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def role_config(plan: RunPlan, name: str) -> DecoderConfig | None:
    """The model of a role with the dtype that it computes in and its adapters; None for a role without one.

    Raises:
        AssetError: config.json or the tokenizer cannot be used.
        ConfigError: an adapter's target matches no layer of the model, or one without experts has a load-balancing
            loss.
    """
    head = plan.roles[name].head
    if head == "none":
        return None
    path, dtype = plan.config.models[name].path, DTYPES[plan.config.precision]
    if path == BUILT_IN:
        config = tiny_config(VOCAB_SIZE, head=head, dtype=dtype)
    else:
        config = read_model_config(path, head=head, dtype=dtype)
    config = _with_aux_loss_coef(plan, name, config)
    wanted = plan.config.models[name].lora
    if wanted.rank == 0:
        return config
    targets = resolve_targets(wanted.targets, parameter_specs(config), role=name)
    return replace(config, lora=LoRA(wanted.rank, wanted.alpha, targets, base=path))


def _with_aux_loss_coef(plan: RunPlan, name: str, config: DecoderConfig) -> DecoderConfig:
    coefficient = plan.config.models[name].router_aux_loss_coef
    if coefficient is None:
        return config
    if config.moe is None:
        raise ConfigError(
            f"models.{name}.router_aux_loss_coef is {coefficient:g}, but the model of role '{name}' has no experts.",
            remedy="Leave the key out.",
        )
    return replace(config, moe=replace(config.moe, aux_loss_coef=coefficient))


def role_configs(plan: RunPlan) -> dict[str, DecoderConfig]:
    """The models of all roles that have one."""
    configs = {name: role_config(plan, name) for name in plan.roles}
    return {name: config for name, config in configs.items() if config is not None}


def notes_of_heads(plan: RunPlan) -> tuple[str, ...]:
    """What the user should know of trained heads that no checkpoint holds: one sentence for each."""
    notes = []
    for name, role in plan.roles.items():
        path = plan.config.models[name].path
        makes_head = role.trainable and role.head in ("value", "reward") and path != BUILT_IN
        if makes_head and not read_config(path).is_scalar:
            notes.append(
                f"models.{name}.path={path} is a language model: the {role.head} head of role '{name}' starts from "
                "small random numbers"
            )
    return tuple(notes)


class Reallocs:
    """Plans every reallocation of a run once, however many calls need it.

    Args:
        plan: the run.
        configs: from `role_configs`.
    """

    def __init__(self, plan: RunPlan, configs: Mapping[str, DecoderConfig]) -> None:
        self._node_of = plan.cluster.node_of
        self._configs = configs
        self._known: dict[tuple[str, Allocation, Allocation], ReallocPlan] = {}
        trained = list(trained_roles(plan))
        self._trained = {role.name for role in trained}
        self._shares_parameters = {role.name for role in trained if role.shares_parameters}

    def of(self, hook: Realloc) -> ReallocPlan:
        """The reallocation that a hook asks for."""
        key = (hook.source, hook.source_allocation, hook.target_allocation)
        if key not in self._known:
            self._known[key] = plan_realloc(*self._layouts(hook), node_of=self._node_of)
        return self._known[key]

    def parts_of(self, hook: Realloc) -> tuple[ReallocPlan, ...]:
        """The same, one after the other: one for each layer, where a layer at a time must be held beside what lives.

        That is so for a source whose ranks share out its parameters, and for a target that an optimizer must follow.
        """
        is_followed = not hook.is_implied and hook.target in self._trained
        if hook.source not in self._shares_parameters and not is_followed:
            return (self.of(hook),)
        source, target = self._layouts(hook)
        layers = zip(source.by_layer(), target.by_layer(), strict=True)
        return tuple(plan_realloc(a, b, node_of=self._node_of) for a, b in layers)

    def _layouts(self, hook: Realloc) -> tuple[ParameterLayout, ParameterLayout]:
        specs = parameter_specs(self._configs[hook.source])
        source, target = hook.source_allocation, hook.target_allocation
        return (
            parameter_layout(specs, source.strategy, source.ranks),
            parameter_layout(specs, target.strategy, target.ranks),
        )

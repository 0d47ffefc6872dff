"""The models of a run's roles. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from realrl.config.schema import BUILT_IN, RunConfig
from realrl.data.tiny import VOCAB_SIZE
from realrl.errors import ConfigError
from realrl.experiment.declaration import Role
from realrl.experiment.run_plan import RunPlan
from realrl.model.files.config_file import read_config, read_model_config, read_notes
from realrl.plan.fused_calls import FusedModel, FusedModels
from realrl.plan.parameters.adapters import resolve_targets
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.shape import DecoderConfig, DType, LoRA, tiny_config

DTYPES: Mapping[str, DType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""`RunConfig.precision`, settled -> the dtype that models compute in."""


def with_precision(config: RunConfig) -> RunConfig:
    """Return the configuration with `precision=auto` settled by the kind of device alone: bf16 on CUDA, else fp32."""
    if config.precision != "auto":
        return config
    return config.model_copy(update={"precision": "bf16" if config.cluster.device == "cuda" else "fp32"})


def role_config(run: RunConfig, name: str, role: Role) -> DecoderConfig | None:
    """Return the model of a role with its adapters and the dtype of its computations; None for a role without one.

    Args:
        run: configuration with the model's path and settings.
        name: name of the role.
        role: declaration of the role.

    Raises:
        AssetError: config.json or the tokenizer cannot be used.
        ConfigError: an adapter's target matches no layer of the model, or one without experts has a load-balancing
            loss.
    """
    head = role.head
    if head == "none":
        return None
    section, dtype = run.models[name], DTYPES[run.precision]
    path = section.path
    if path == BUILT_IN:
        config = tiny_config(VOCAB_SIZE, head=head, dtype=dtype)
    else:
        config = read_model_config(path, head=head, dtype=dtype)
    config = _with_aux_loss_coef(config, section.router_aux_loss_coef, name)
    wanted = section.lora
    if wanted.rank == 0:
        return config
    targets = resolve_targets(wanted.targets, parameter_specs(config), role=name)
    return replace(config, lora=LoRA(wanted.rank, wanted.alpha, targets, base=path))


def _with_aux_loss_coef(config: DecoderConfig, coefficient: float | None, name: str) -> DecoderConfig:
    if coefficient is None:
        return config
    if config.moe is None:
        raise ConfigError(
            f"models.{name}.router_aux_loss_coef is {coefficient:g}, but the model of role '{name}' has no experts.",
            remedy="Leave the key out.",
        )
    return replace(config, moe=replace(config.moe, aux_loss_coef=coefficient))


def role_configs(plan: RunPlan) -> dict[str, DecoderConfig]:
    """Return the models of all roles that have one."""
    configs = {name: role_config(plan.config, name, role) for name, role in plan.roles.items()}
    return {name: config for name, config in configs.items() if config is not None}


def fused_models(plan: RunPlan, shapes: Mapping[str, DecoderConfig]) -> FusedModels:
    """Return what decides the order of computations of a plan's fused calls.

    Args:
        plan: has a `fusion`.
        shapes: role -> its model.
    """
    assert plan.fusion is not None
    mfcs = {mfc.name: mfc for mfc in plan.mfcs}
    first, second = (
        FusedModel.of(
            shapes[mfc.role],
            plan.allocations[mfc.name].strategy.pp,
            recomputes=plan.config.models[mfc.role].activation_checkpointing,
            n_minibatches=mfc.n_minibatches,
        )
        for mfc in (mfcs[name] for name in plan.fusion.calls)
    )
    return FusedModels(first, second)


def notes_of_models(plan: RunPlan) -> tuple[str, ...]:
    """Return a note to the user for each trained head that no checkpoint holds, and for keys that contradict others."""
    notes = notes_of_files(plan)
    for name, role in plan.roles.items():
        path = plan.config.models[name].path
        makes_head = role.trainable and role.head in ("value", "reward") and path != BUILT_IN
        if makes_head and not read_config(path).is_scalar:
            notes.append(
                f"models.{name}.path={path} is a language model: the {role.head} head of role '{name}' starts from "
                "small random numbers"
            )
    return tuple(notes)


def notes_of_files(plan: RunPlan) -> list[str]:
    """Return a note for each contradiction in the files of a model, once for each folder."""
    folders: dict[str, str] = {}
    for name, role in plan.roles.items():
        path = plan.config.models[name].path
        if role.head != "none" and path != BUILT_IN:
            folders.setdefault(path, f"models.{name}.path={path}")
    return [f"{named}: {note}" for path, named in folders.items() for note in read_notes(path)]

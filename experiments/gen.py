"""Responses to the prompts of a file, once each, with rewards where some are configured. Nothing is trained."""

from __future__ import annotations

from realrl.config.algorithms import GenOptions
from realrl.config.schema import RunConfig
from realrl.errors import ConfigError
from realrl.experiment import DatasetKind, Experiment, Role
from realrl.experiment.calls import REWARD_ROLES
from realrl.experiment.rewards import reward_calls, reward_roles
from realrl.graph.mfc import InterfaceType, MFCDef


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    actor_gen = MFCDef(
        name="actor_gen",
        model_name="actor",
        interface_type=InterfaceType.GENERATE,
        interface_impl="ppo_actor",
        input_keys=("prompt_ids",),
        output_keys=("input_ids", "prompt_mask", "truncated"),
        n_seqs=config.n_seqs,
    )
    rewards = reward_calls(config) if config.algorithm.has_rewards else []
    if any(call.may_drop for call in rewards):
        raise ConfigError(
            "a response whose reward function fails cannot be dropped: every prompt of the file is answered",
            remedy="Set on_failure (algorithm.reward_on_failure, or that of the part) to zero or error.",
        )
    return [actor_gen, *rewards]


def role_changes(config: RunConfig) -> dict[str, Role | None]:
    """The roles that give rewards, if any do."""
    needed = reward_roles(config) if config.algorithm.has_rewards else {}
    return {**dict.fromkeys(REWARD_ROLES), **needed}


EXPERIMENT = Experiment(
    name="gen",
    description="responses to the prompts of a file, without training",
    roles={"actor": Role(trainable=False), **REWARD_ROLES},
    dataset=DatasetKind.PROMPT,
    options=GenOptions,
    mfcs=mfcs,
    role_changes=role_changes,
    defaults={"steps": 1_000_000, "epochs": 1, "dataset": {"shuffle": False}, "save": {"n_generations": None}},
)

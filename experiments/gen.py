"""Responses to the prompts of a file, once each, with rewards where some are configured. Nothing is trained."""

from __future__ import annotations

from realrl import DatasetKind, Experiment, InterfaceType, MFCDef, Role, RunConfig
from realrl.config.algorithms import GenOptions
from realrl.experiment import policy_calls as add


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step: who runs, what it reads, what it gives."""
    return [
        MFCDef("actor_gen", "actor", InterfaceType.GENERATE, "ppo_actor",
               ("prompt_ids",), ("input_ids", "prompt_mask", "truncated"), n_seqs=config.n_seqs),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    name="gen",
    description="responses to the prompts of a file, without training",
    roles={
        "actor": Role(trainable=False),
        "reward": Role(trainable=False, head="reward"),
        "scorer": Role(trainable=False, head="none", path_from="actor"),  # adds up several rewards
    },
    dataset=DatasetKind.PROMPT,
    options=GenOptions,
    mfcs=mfcs,
    adds=(add.wanted_rewards,),  # algorithm.reward_function, algorithm.rewards: add rew_inf and scorer_inf
    role_changes=add.wanted_reward_roles,
    defaults={"steps": 1_000_000, "epochs": 1, "dataset": {"shuffle": False}, "save": {"n_generations": None}},
)

"""PPO with a critic and a KL penalty; the reward is a model or a Python function. Four roles, six calls."""

from __future__ import annotations

from realrl.config.policy_options import PPOOptions
from realrl.config.schema import RunConfig
from realrl.experiment import DatasetKind, Experiment
from realrl.experiment.calls import (
    ACTOR,
    CRITIC,
    REFERENCE,
    REWARD_ROLES,
    check_policy,
    critic_call,
    critic_train_call,
    filter_calls,
    generate_call,
    policy_roles,
    recompute_calls,
    reference_calls,
    train_call,
)
from realrl.experiment.rewards import reward_calls
from realrl.graph.mfc import MFCDef


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    check_policy(config)
    return [
        generate_call(config),
        *recompute_calls(config),
        *reward_calls(config),
        *filter_calls(config),
        *reference_calls(config),
        critic_call(config),
        train_call(config),
        critic_train_call(config),
    ]


EXPERIMENT = Experiment(
    name="ppo",
    description="proximal policy optimisation with a critic and a reward model or function",
    roles={"actor": ACTOR, "critic": CRITIC, "ref": REFERENCE, **REWARD_ROLES},
    dataset=DatasetKind.PROMPT,
    options=PPOOptions,
    mfcs=mfcs,
    role_changes=policy_roles,
)

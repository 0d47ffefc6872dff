"""PPO whose reference follows the actor: after each training it moves a little towards it (an averaging hook)."""

from __future__ import annotations

from realrl.config.policy_options import MovingReferenceOptions
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
    follow_hook,
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
        train_call(config, post_hooks=(follow_hook(config),)),
        critic_train_call(config),
    ]


EXPERIMENT = Experiment(
    name="ppo_ref_ema",
    description="PPO whose reference follows the actor by an exponential moving average",
    roles={"actor": ACTOR, "critic": CRITIC, "ref": REFERENCE, **REWARD_ROLES},
    dataset=DatasetKind.PROMPT,
    options=MovingReferenceOptions,
    mfcs=mfcs,
    role_changes=policy_roles,
)

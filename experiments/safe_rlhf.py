"""Safe RLHF: PPO on rewards less lambda times costs, each with its critic; lambda follows the limit on mean cost."""

from __future__ import annotations

from realrl.config.policy_options import SafeRLHFOptions
from realrl.config.schema import RunConfig
from realrl.experiment import DatasetKind, Experiment, Role
from realrl.experiment.calls import (
    ACTOR,
    CRITIC,
    REFERENCE,
    REWARD_ROLES,
    check_policy,
    cost_calls,
    cost_roles,
    critic_call,
    critic_train_call,
    filter_calls,
    generate_call,
    recompute_calls,
    reference_calls,
    train_call,
)
from realrl.experiment.rewards import reward_calls
from realrl.graph.mfc import MFCDef

COST = Role(trainable=False, head="reward")
REWARD_SIDE = {"kl_weight": 0.5}  # half of the KL penalty is a reward, half a cost
COST_SIDE = {"kl_weight": -0.5, "shaped": False}


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    check_policy(config, DEFAULTS)
    return [
        generate_call(config),
        *recompute_calls(config),
        *reward_calls(config),
        *cost_calls(config),
        *filter_calls(config),
        *reference_calls(config),
        critic_call(config, **REWARD_SIDE),
        critic_call(config, "cost_critic", prefix="cost_", **COST_SIDE),
        train_call(config),
        critic_train_call(config, **REWARD_SIDE),
        critic_train_call(config, "cost_critic", prefix="cost_", rewards="costs", **COST_SIDE),
    ]


DEFAULTS = {"algorithm": {"advantage": "lagrangian"}}
EXPERIMENT = Experiment(
    name="safe_rlhf",
    description="reward under a limit on the mean cost, with a Lagrange multiplier and two critics",
    roles={"actor": ACTOR, "critic": CRITIC, "cost_critic": CRITIC, "ref": REFERENCE, **REWARD_ROLES, "cost": COST},
    dataset=DatasetKind.PROMPT,
    options=SafeRLHFOptions,
    mfcs=mfcs,
    defaults=DEFAULTS,
    role_changes=cost_roles,
)

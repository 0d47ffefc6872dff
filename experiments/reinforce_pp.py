"""REINFORCE++: token rewards with a KL penalty, summed up and whitened over the batch; no critic."""

from __future__ import annotations

from realrl.config.policy_options import PolicyOptions
from realrl.config.schema import RunConfig
from realrl.experiment import DatasetKind, Experiment
from realrl.experiment.calls import (
    ACTOR,
    REFERENCE,
    REWARD_ROLES,
    check_policy,
    filter_calls,
    generate_call,
    policy_roles,
    recompute_calls,
    reference_calls,
    train_call,
)
from realrl.experiment.rewards import reward_calls
from realrl.graph.mfc import MFCDef

DEFAULTS = {
    "algorithm": {"advantage": "reinforce_pp", "kl_coef": 0.01, "normalise_advantages": True, "n_minibatches": 4},
}


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    check_policy(config, DEFAULTS)
    return [
        generate_call(config),
        *recompute_calls(config),
        *reward_calls(config),
        *filter_calls(config),
        *reference_calls(config),
        train_call(config),
    ]


EXPERIMENT = Experiment(
    name="reinforce_pp",
    description="REINFORCE with token rewards, a KL penalty and whitened advantages",
    roles={"actor": ACTOR, "ref": REFERENCE, **REWARD_ROLES},
    dataset=DatasetKind.PROMPT,
    options=PolicyOptions,
    mfcs=mfcs,
    defaults=DEFAULTS,
    role_changes=policy_roles,
)

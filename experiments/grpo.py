"""GRPO: a response is better than the others to its prompt by so many standard deviations; no critic."""

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
    "algorithm": {"advantage": "grpo", "loss_normaliser": "sequences", "kl_loss_coef": 0.04},
    "generation": {"n_responses": 8},
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
    name="grpo",
    description="group-relative policy optimisation: no critic, KL to the reference in the loss",
    roles={"actor": ACTOR, "ref": REFERENCE, **REWARD_ROLES},
    dataset=DatasetKind.PROMPT,
    options=PolicyOptions,
    mfcs=mfcs,
    defaults=DEFAULTS,
    role_changes=policy_roles,
)

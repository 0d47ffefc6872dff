"""Dr. GRPO: GRPO without the standard deviation and with a constant length, which both favour some responses."""

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
    "algorithm": {"advantage": "dr_grpo", "loss_normaliser": "constant"},
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
    name="dr_grpo",
    description="GRPO without its biases: no standard deviation, a constant normaliser",
    roles={"actor": ACTOR, "ref": REFERENCE, **REWARD_ROLES},
    dataset=DatasetKind.PROMPT,
    options=PolicyOptions,
    mfcs=mfcs,
    defaults=DEFAULTS,
    role_changes=policy_roles,
)

"""Self-play: two policies answer the same prompt, and a response earns what it wins against the other one's."""

from __future__ import annotations

from functools import partial

from realrl.config.policy_options import PolicyOptions
from realrl.config.schema import RunConfig
from realrl.experiment import DatasetKind, Experiment, Role
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

DEFAULTS = {"algorithm": {"advantage": "versus"}, "generation": {"n_responses": 4}}
OTHER = "opponent_"  # before the keys of the second player


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    check_policy(config, DEFAULTS)
    return [
        generate_call(config),
        generate_call(config, "opponent", prefix=OTHER),
        *recompute_calls(config),
        *recompute_calls(config, "opponent", prefix=OTHER),
        *reward_calls(config),
        *reward_calls(config, prefix=OTHER),
        *filter_calls(config),
        *reference_calls(config),
        *reference_calls(config, "opponent", prefix=OTHER),
        train_call(config, other_prefix=OTHER),
        train_call(config, "opponent", prefix=OTHER),
    ]


EXPERIMENT = Experiment(
    name="self_play",
    description="two policies in one graph, each rewarded for what it wins against the other",
    roles={"actor": ACTOR, "opponent": Role(trainable=True, path_from="actor"), "ref": REFERENCE, **REWARD_ROLES},
    dataset=DatasetKind.PROMPT,
    options=PolicyOptions,
    mfcs=mfcs,
    defaults=DEFAULTS,
    role_changes=partial(policy_roles, policies=("actor", "opponent")),
)

"""On-policy distillation: the student answers, and the teacher judges each of its tokens. Two roles, three calls."""

from __future__ import annotations

from functools import partial

from realrl.config.policy_options import DistillOptions
from realrl.config.schema import RunConfig
from realrl.experiment import DatasetKind, Experiment, Role
from realrl.experiment.calls import (
    ACTOR,
    REFERENCE,
    check_policy,
    generate_call,
    policy_roles,
    recompute_calls,
    reference_calls,
    teacher_call,
    train_call,
)
from realrl.graph.mfc import MFCDef

DEFAULTS = {"algorithm": {"advantage": "reverse_kl", "policy_loss": "clip"}}


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    check_policy(config, DEFAULTS)
    return [
        generate_call(config),
        *recompute_calls(config),
        teacher_call(config),
        *reference_calls(config),
        train_call(config),
    ]


EXPERIMENT = Experiment(
    name="distill",
    description="on-policy distillation: reverse KL to a teacher on the student's own responses",
    roles={"actor": ACTOR, "teacher": Role(trainable=False), "ref": REFERENCE},
    dataset=DatasetKind.PROMPT,
    options=DistillOptions,
    mfcs=mfcs,
    defaults=DEFAULTS,
    role_changes=partial(policy_roles, rewards=False),
)

"""On-policy distillation: the student answers, and the teacher judges each of its tokens. Two roles, three calls."""

from __future__ import annotations

from functools import partial

from realrl import DatasetKind, Experiment, InterfaceType, MFCDef, Role, RunConfig
from realrl.config.policy_options import DistillOptions
from realrl.experiment import policy_calls as add

TOKENS = ("input_ids", "prompt_mask")


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step: who runs, what it reads, what it gives."""
    n = config.n_seqs
    return [
        MFCDef("actor_gen", "actor", InterfaceType.GENERATE, "ppo_actor",
               ("prompt_ids",), (*TOKENS, "old_logprobs", "truncated"), n_seqs=n),
        MFCDef("teacher_inf", "teacher", InterfaceType.INFERENCE, "ppo_actor", TOKENS, ("teacher_logprobs",),
               output_key_remap={"logprobs": "teacher_logprobs"}, n_seqs=n),
        MFCDef("ref_inf", "ref", InterfaceType.INFERENCE, "ppo_actor", TOKENS, ("ref_logprobs",),
               output_key_remap={"logprobs": "ref_logprobs"}, n_seqs=n),
        MFCDef("actor_train", "actor", InterfaceType.TRAIN_STEP, "ppo_actor",
               (*TOKENS, "old_logprobs", "truncated", "teacher_logprobs"), n_seqs=n,
               n_minibatches=config.algorithm.n_minibatches, n_passes=config.algorithm.ppo_epochs,
               log_return_value=True),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    name="distill",
    description="on-policy distillation: reverse KL to a teacher on the student's own responses",
    roles={
        "actor": Role(trainable=True),
        "teacher": Role(trainable=False),
        "ref": Role(trainable=False, path_from="actor"),
    },
    dataset=DatasetKind.PROMPT,
    options=DistillOptions,
    mfcs=mfcs,
    adds=(
        add.run_ahead,  # max_staleness, importance_cap, half precision, CUDA: adds actor_inf
        add.own_reference,  # models.actor.lora.rank: ref_inf runs on the actor without its adapter
        add.teacher_keys,  # algorithm.policy_loss=teacher_kl: teacher_inf gives its likeliest tokens
        add.chosen_keys,  # KL to a reference: training reads ref_logprobs, without it there is no ref_inf
    ),
    check=add.check_policy,
    role_changes=partial(add.policy_roles, rewards=False),
    defaults={"algorithm": {"advantage": "reverse_kl", "policy_loss": "clip"}},
)

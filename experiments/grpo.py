"""GRPO: a response is better than the others to its prompt by so many standard deviations; no critic."""

from __future__ import annotations

from realrl import DatasetKind, Experiment, InterfaceType, MFCDef, PolicyOptions, Role, RunConfig
from realrl.experiment import policy_calls as add

GENERATE, INFERENCE, TRAIN_STEP = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
TOKENS = ("input_ids", "prompt_mask")
ROLES = {
    "actor": Role(trainable=True),
    "ref": Role(trainable=False, path_from="actor"),
    "reward": Role(trainable=False, head="reward"),
    "scorer": Role(trainable=False, head="none", path_from="actor"),  # adds up several rewards
    "filter": Role(trainable=False, head="none", path_from="actor"),  # drops samples
}


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step: who runs, what it reads, what it gives."""
    n = config.n_seqs
    return [  # name, role, kind, interface, keys that it reads, keys that it gives
        MFCDef("actor_gen", "actor", GENERATE, "ppo_actor",
               ("prompt_ids",), (*TOKENS, "old_logprobs", "truncated"), n_seqs=n),
        MFCDef("rew_inf", "reward", INFERENCE, "reward_model", ("input_ids",), ("rewards",), n_seqs=n),
        MFCDef("ref_inf", "ref", INFERENCE, "ppo_actor", TOKENS, ("ref_logprobs",),
               output_key_remap={"logprobs": "ref_logprobs"}, n_seqs=n),
        MFCDef("actor_train", "actor", TRAIN_STEP, "ppo_actor",
               (*TOKENS, "old_logprobs", "truncated", "rewards", "ref_logprobs"), n_seqs=n,
               n_minibatches=config.algorithm.n_minibatches, n_passes=config.algorithm.ppo_epochs,
               log_return_value=True),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    name="grpo",
    description="group-relative policy optimisation: no critic, KL to the reference in the loss",
    roles=ROLES,
    dataset=DatasetKind.PROMPT,
    options=PolicyOptions,
    mfcs=mfcs,
    adds=(
        add.run_ahead,  # max_staleness, importance_cap, half precision, CUDA: adds actor_inf
        add.reward_functions,  # algorithm.reward_function: rew_inf runs it; algorithm.rewards: adds scorer_inf
        add.sample_filter,  # algorithm.filter: adds filter
        add.own_reference,  # models.actor.lora.rank: ref_inf runs on the actor without its adapter
        add.chosen_keys,  # algorithm.advantage, policy_loss, KL: training reads what they need, and no more
    ),
    check=add.check_policy,
    role_changes=add.policy_roles,
    defaults={
        "algorithm": {"advantage": "grpo", "loss_normaliser": "sequences", "kl_loss_coef": 0.04},
        "generation": {"n_responses": 8},
    },
)

"""PPO with a critic and a KL penalty; the reward is a model or a Python function. Four roles, six calls."""

from __future__ import annotations

from realrl import DatasetKind, Experiment, InterfaceType, MFCDef, PPOOptions, Role, RunConfig
from realrl.experiment import policy_calls as add

GENERATE, INFERENCE, TRAIN_STEP = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
TOKENS = ("input_ids", "prompt_mask")
ROLES = {
    "actor": Role(trainable=True),
    "critic": Role(trainable=True, head="value", path_from="actor"),
    "ref": Role(trainable=False, path_from="actor"),
    "reward": Role(trainable=False, head="reward"),
    "scorer": Role(trainable=False, head="none", path_from="actor"),  # adds up several rewards
    "filter": Role(trainable=False, head="none", path_from="actor"),  # drops samples
}


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step: who runs, what it reads, what it gives."""
    n, options = config.n_seqs, config.algorithm
    train = {"n_minibatches": options.n_minibatches, "n_passes": options.ppo_epochs, "log_return_value": True}
    return [  # name, role, kind, interface, keys that it reads, keys that it gives
        MFCDef("actor_gen", "actor", GENERATE, "ppo_actor",
               ("prompt_ids",), (*TOKENS, "old_logprobs", "truncated"), n_seqs=n),
        MFCDef("rew_inf", "reward", INFERENCE, "reward_model", ("input_ids",), ("rewards",), n_seqs=n),
        MFCDef("ref_inf", "ref", INFERENCE, "ppo_actor", TOKENS, ("ref_logprobs",),
               output_key_remap={"logprobs": "ref_logprobs"}, n_seqs=n),
        MFCDef("critic_inf", "critic", INFERENCE, "ppo_critic", ("input_ids",), ("values",), n_seqs=n),
        MFCDef("actor_train", "actor", TRAIN_STEP, "ppo_actor",
               (*TOKENS, "old_logprobs", "truncated", "rewards", "values", "ref_logprobs"), n_seqs=n, **train),
        MFCDef("critic_train", "critic", TRAIN_STEP, "ppo_critic",
               (*TOKENS, "old_logprobs", "rewards", "values", "truncated", "ref_logprobs"), n_seqs=n, **train),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    name="ppo",
    description="proximal policy optimisation with a critic and a reward model or function",
    roles=ROLES,
    dataset=DatasetKind.PROMPT,
    options=PPOOptions,
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
)

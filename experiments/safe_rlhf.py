"""Safe RLHF: PPO on rewards less lambda times costs, each with its critic; lambda follows the limit on mean cost."""

from realrl import InterfaceRef, InterfaceType, MFCDef, Role, RunConfig
from realrl.config.policy_options import SafeRLHFOptions
from realrl.experiment import policy_calls as add
from realrl_experiments.ppo import EXPERIMENT as PPO

GENERATE, INFERENCE, TRAIN_STEP = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
TOKENS = ("input_ids", "prompt_mask")
REWARD_CRITIC = InterfaceRef("ppo_critic", {"kl_weight": 0.5})  # half of the KL penalty is a reward, half a cost
COST_CRITIC = InterfaceRef("ppo_critic", {"kl_weight": -0.5, "shaped": False})
ROLES = {
    "actor": Role(trainable=True),
    "critic": Role(trainable=True, head="value", path_from="actor"),
    "cost_critic": Role(trainable=True, head="value", path_from="actor"),
    "ref": Role(trainable=False, path_from="actor"),
    "reward": Role(trainable=False, head="reward"),
    "scorer": Role(trainable=False, head="none", path_from="actor"),  # adds up several rewards
    "filter": Role(trainable=False, head="none", path_from="actor"),  # drops samples
    "cost": Role(trainable=False, head="reward"),
}


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step: who runs, what it reads, what it gives."""
    n, options = config.n_seqs, config.algorithm
    train = {"n_minibatches": options.n_minibatches, "n_passes": options.ppo_epochs, "log_return_value": True}
    return [
        MFCDef("actor_gen", "actor", GENERATE, "ppo_actor",
               ("prompt_ids",), (*TOKENS, "old_logprobs", "truncated"), n_seqs=n),
        MFCDef("rew_inf", "reward", INFERENCE, "reward_model", ("input_ids",), ("rewards",), n_seqs=n),
        MFCDef("cost_inf", "cost", INFERENCE, "reward_model", ("input_ids",), ("costs",),
               output_key_remap={"rewards": "costs"}, n_seqs=n),
        MFCDef("ref_inf", "ref", INFERENCE, "ppo_actor", TOKENS, ("ref_logprobs",),
               output_key_remap={"logprobs": "ref_logprobs"}, n_seqs=n),
        MFCDef("critic_inf", "critic", INFERENCE, REWARD_CRITIC, ("input_ids",), ("values",), n_seqs=n),
        MFCDef("cost_critic_inf", "cost_critic", INFERENCE, COST_CRITIC, ("input_ids",), ("cost_values",),
               output_key_remap={"values": "cost_values"}, n_seqs=n),
        MFCDef("actor_train", "actor", TRAIN_STEP, "ppo_actor",
               (*TOKENS, "old_logprobs", "truncated", "rewards", "costs", "values", "cost_values", "ref_logprobs"),
               n_seqs=n, **train),
        MFCDef("critic_train", "critic", TRAIN_STEP, REWARD_CRITIC,
               (*TOKENS, "old_logprobs", "rewards", "values", "truncated", "ref_logprobs"), n_seqs=n, **train),
        MFCDef("cost_critic_train", "cost_critic", TRAIN_STEP, COST_CRITIC,
               (*TOKENS, "old_logprobs", "costs", "cost_values", "truncated", "ref_logprobs"),
               input_key_remap={"costs": "rewards", "cost_values": "values"}, n_seqs=n, **train),
    ]  # fmt: skip


EXPERIMENT = PPO.variant(
    "safe_rlhf",
    "reward under a limit on the mean cost, with a Lagrange multiplier and two critics",
    roles=ROLES,
    options=SafeRLHFOptions,
    mfcs=mfcs,
    adds=(add.cost_functions, *PPO.adds),  # algorithm.cost_function: cost_inf runs it; the others are PPO's
    role_changes=add.cost_roles,
    defaults={"algorithm": {"advantage": "lagrangian"}},
)

"""ReMax: REINFORCE whose baseline is the reward of the greedy response to the same prompt; no critic."""

from realrl import InterfaceRef, InterfaceType, MFCDef, RunConfig
from realrl.experiment.policy_calls import prefixed
from realrl_experiments.grpo import EXPERIMENT as GRPO
from realrl_experiments.grpo import TOKENS


def mfcs(config: RunConfig) -> list[MFCDef]:
    """GRPO's calls; two more answer each prompt greedily and judge that answer, with keys that begin with greedy_."""
    n, greedy = config.n_seqs, InterfaceRef("ppo_actor", {"greedy": True})
    actor_gen, rew_inf, ref_inf, actor_train = GRPO.mfcs(config)
    actor_gen_greedy = MFCDef("actor_gen_greedy", "actor", InterfaceType.GENERATE, greedy,
                              ("prompt_ids",), (*TOKENS, "truncated"), n_seqs=n)  # fmt: skip
    greedy_rew_inf = MFCDef("greedy_rew_inf", "reward", InterfaceType.INFERENCE, "reward_model",
                            ("input_ids",), ("rewards",), n_seqs=n)  # fmt: skip
    greedy_calls = [prefixed("greedy_", call) for call in (actor_gen_greedy, greedy_rew_inf)]
    return [actor_gen, greedy_calls[0], rew_inf, greedy_calls[1], ref_inf, actor_train]


EXPERIMENT = GRPO.variant(
    "remax",
    "REINFORCE with the greedy response's reward as baseline",
    mfcs=mfcs,
    defaults={
        "algorithm": {
            "advantage": "remax",
            "policy_loss": "reinforce",
            "kl_coef": 0.01,
            "kl_loss_coef": 0.0,
            "loss_normaliser": "tokens",
        },
        "generation": {"n_responses": 1},
    },
)

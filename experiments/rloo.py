"""RLOO: REINFORCE with the mean reward of the other responses to the prompt as baseline; no critic."""

from realrl_experiments.grpo import EXPERIMENT as GRPO

EXPERIMENT = GRPO.variant(
    "rloo",
    "REINFORCE with a leave-one-out baseline and the KL in the reward",
    defaults={
        "algorithm": {"advantage": "rloo", "policy_loss": "response_clip", "kl_coef": 0.05, "kl_loss_coef": 0.0},
        "generation": {"n_responses": 4},
    },
)

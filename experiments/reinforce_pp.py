"""REINFORCE++: token rewards with a KL penalty, summed up and whitened over the batch; no critic."""

from realrl_experiments.grpo import EXPERIMENT as GRPO

EXPERIMENT = GRPO.variant(
    "reinforce_pp",
    "REINFORCE with token rewards, a KL penalty and whitened advantages",
    defaults={
        "algorithm": {
            "advantage": "reinforce_pp",
            "kl_coef": 0.01,
            "kl_loss_coef": 0.0,
            "loss_normaliser": "tokens",
            "normalise_advantages": True,
            "n_minibatches": 4,
        },
        "generation": {"n_responses": 1},
    },
)

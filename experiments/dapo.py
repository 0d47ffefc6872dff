"""DAPO: GRPO with a wider upper clip, a mean over tokens, no reference, and groups of equal rewards replaced."""

from realrl_experiments.grpo import EXPERIMENT as GRPO

EXPERIMENT = GRPO.variant(
    "dapo",
    "GRPO with a wider upper clip, token means, and groups of equal rewards replaced",
    defaults={
        "algorithm": {
            "clip_ratio_high": 0.28,
            "loss_normaliser": "tokens",
            "kl_loss_coef": 0.0,  # so nobody reads the reference, and there is none
            "filter": "equal_rewards",  # adds the call filter
        },
    },
)

"""GSPO: GRPO whose policy ratio, and its clip, are of the whole response; no reference."""

from realrl_experiments.grpo import EXPERIMENT as GRPO

EXPERIMENT = GRPO.variant(
    "gspo",
    "group sequence policy optimisation: ratio and clip of whole responses",
    defaults={
        "algorithm": {
            "policy_loss": "sequence_clip",
            "clip_ratio": 3e-4,
            "clip_ratio_high": 4e-4,
            "kl_loss_coef": 0.0,
        },
    },
)

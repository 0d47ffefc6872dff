"""Dr. GRPO: GRPO without the standard deviation and with a constant length, which both favour some responses."""

from realrl_experiments.grpo import EXPERIMENT as GRPO

EXPERIMENT = GRPO.variant(
    "dr_grpo",
    "GRPO without its biases: no standard deviation, a constant normaliser",
    defaults={"algorithm": {"advantage": "dr_grpo", "loss_normaliser": "constant", "kl_loss_coef": 0.0}},
)

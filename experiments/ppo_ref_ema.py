"""PPO whose reference follows the actor: after each training it moves a little towards it (an averaging hook)."""

from realrl.config.policy_options import MovingReferenceOptions
from realrl.experiment import policy_calls as add
from realrl_experiments.ppo import EXPERIMENT as PPO

EXPERIMENT = PPO.variant(
    "ppo_ref_ema",
    "PPO whose reference follows the actor by an exponential moving average",
    options=MovingReferenceOptions,
    adds=(*PPO.adds, add.moving_reference),  # after actor_train, ref = ref_ema_eta * actor + (1 - ref_ema_eta) * ref
)

"""Self-play: two policies answer the same prompt, and a response earns what it wins against the other one's."""

from __future__ import annotations

from functools import partial
from itertools import chain

from realrl import InterfaceRef, InterfaceType, MFCDef, Role, RunConfig
from realrl.experiment import policy_calls as add
from realrl_experiments.grpo import EXPERIMENT as GRPO

GENERATE, INFERENCE, TRAIN_STEP = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
TOKENS = ("input_ids", "prompt_mask")
OTHER = "opponent_"  # begins the names and keys of the second player


def player(config: RunConfig, role: str, prefix: str, other_prefix: str) -> list[MFCDef]:
    """One player's calls; its keys begin with `prefix`, and it reads the other player's rewards as `other_rewards`."""
    n, policy = config.n_seqs, InterfaceRef("ppo_actor", {"prefix": prefix} if prefix else {})
    calls = [
        MFCDef(f"{role}_gen", role, GENERATE, policy,
               ("prompt_ids",), (*TOKENS, "old_logprobs", "truncated"), n_seqs=n),
        MFCDef(f"{prefix}rew_inf", "reward", INFERENCE, "reward_model", ("input_ids",), ("rewards",), n_seqs=n),
        MFCDef(f"{prefix}ref_inf", "ref", INFERENCE, "ppo_actor", TOKENS, ("ref_logprobs",),
               output_key_remap={"logprobs": "ref_logprobs"}, n_seqs=n),
        MFCDef(f"{role}_train", role, TRAIN_STEP, policy, (*TOKENS, "old_logprobs", "truncated", "rewards"), n_seqs=n,
               n_minibatches=config.algorithm.n_minibatches, n_passes=config.algorithm.ppo_epochs,
               log_return_value=True),
    ]  # fmt: skip
    *others, train = [add.prefixed(prefix, call) for call in calls]
    return [*others, add.reading(train, {f"{other_prefix}rewards": "other_rewards"})]


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step: those of both players, in pairs."""
    pairs = zip(player(config, "actor", "", OTHER), player(config, "opponent", OTHER, ""), strict=True)
    return list(chain.from_iterable(pairs))


EXPERIMENT = GRPO.variant(
    "self_play",
    "two policies in one graph, each rewarded for what it wins against the other",
    roles={"actor": GRPO.roles["actor"], "opponent": Role(trainable=True, path_from="actor"), **GRPO.roles},
    mfcs=mfcs,
    role_changes=partial(add.policy_roles, policies=("actor", "opponent")),
    defaults={
        "algorithm": {"advantage": "versus", "loss_normaliser": "tokens", "kl_loss_coef": 0.0},
        "generation": {"n_responses": 4},
    },
)

"""PPO with a critic and a KL penalty; the reward is a model or a Python function. Four roles, six calls."""

from __future__ import annotations

from functools import partial

from realrl.algo.ppo_config import check_ppo, reward_interface
from realrl.config.algorithms import PPOOptions
from realrl.config.schema import RunConfig
from realrl.experiment import DatasetKind, Experiment, Role
from realrl.graph.mfc import InterfaceType, MFCDef

GENERATE, INFERENCE, TRAIN_STEP = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
TOKENS = ("input_ids", "prompt_mask")
EXPERIENCE = (*TOKENS, "old_logprobs", "ref_logprobs", "rewards", "values", "truncated")


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    check_ppo(config)
    options: PPOOptions = config.algorithm
    call = partial(MFCDef, n_seqs=config.n_seqs)
    train = partial(call, input_keys=EXPERIENCE, n_minibatches=options.n_minibatches, log_return_value=True)
    reads = TOKENS if options.reward_function else ("input_ids",)
    generated = (*TOKENS, "old_logprobs", "truncated")
    remap = {"logprobs": "ref_logprobs"}
    return [
        call("actor_gen", "actor", GENERATE, "ppo_actor", ("prompt_ids",), generated),
        call("rew_inf", "reward", INFERENCE, reward_interface(config), reads, ("rewards",)),
        call("ref_inf", "ref", INFERENCE, "ppo_actor", TOKENS, ("ref_logprobs",), output_key_remap=remap),
        call("critic_inf", "critic", INFERENCE, "ppo_critic", ("input_ids",), ("values",)),
        train("actor_train", "actor", TRAIN_STEP, "ppo_actor"),
        train("critic_train", "critic", TRAIN_STEP, "ppo_critic"),
    ]


def role_changes(config: RunConfig) -> dict[str, Role]:
    """A reward function needs a tokenizer but no weights."""
    has_function = config.algorithm.reward_function is not None
    return {"reward": Role(trainable=False, head="none", path_from="actor")} if has_function else {}


EXPERIMENT = Experiment(
    name="ppo",
    description="proximal policy optimisation with a critic and a reward model or function",
    roles={
        "actor": Role(trainable=True),
        "critic": Role(trainable=True, head="value", path_from="actor"),
        "ref": Role(trainable=False, path_from="actor"),
        "reward": Role(trainable=False, head="reward"),
    },
    dataset=DatasetKind.PROMPT,
    options=PPOOptions,
    mfcs=mfcs,
    role_changes=role_changes,
)

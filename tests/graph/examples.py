"""Lists of calls that the tests of the graph, of plans and of pictures share."""

from realrl.graph.mfc import InterfaceType, MFCDef, ModelName, OffloadHook, ParamReallocHook

GENERATE, INFERENCE, TRAIN = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP

PPO_KEYS = ("input_ids", "prompt_mask", "old_logprobs", "truncated", "rewards", "ref_logprobs", "values")
GENERATED = PPO_KEYS[:4]


def ppo(n_seqs=32, *, max_staleness=0):
    """Four roles; actor and critic are trained."""
    return [
        MFCDef(
            "actor_gen", "actor", GENERATE, "ppo_actor", ("prompt_ids",), GENERATED, n_seqs=n_seqs,
            max_staleness=max_staleness,
        ),
        MFCDef("rew_inf", "reward", INFERENCE, "reward", ("input_ids",), ("rewards",), n_seqs=n_seqs),
        MFCDef("ref_inf", "ref", INFERENCE, "ppo_ref", ("input_ids",), ("ref_logprobs",), n_seqs=n_seqs),
        MFCDef("critic_inf", "critic", INFERENCE, "ppo_critic", ("input_ids", "truncated"), ("values",), n_seqs=n_seqs),
        MFCDef("actor_train", "actor", TRAIN, "ppo_actor", PPO_KEYS, n_seqs=n_seqs, n_minibatches=4),
        MFCDef("critic_train", "critic", TRAIN, "ppo_critic", PPO_KEYS, n_seqs=n_seqs, n_minibatches=4),
    ]  # fmt: skip


def sft():
    """One call."""
    return [MFCDef("sft_train", "actor", TRAIN, "sft", ("input_ids", "prompt_mask"), n_seqs=64)]


def chain(length):
    """`length` inference calls, each reading all keys so far: k0 from the dataset, call i produces key i."""
    return [
        MFCDef(f"c{i}", f"r{i % 4}", INFERENCE, "x", tuple(f"k{j}" for j in range(i)), (f"k{i}",), n_seqs=4)
        for i in range(1, length + 1)
    ]


def seventeen():
    """17 calls over nine roles: safe PPO with two critics, an ensemble of judges, a teacher, and a moving average."""
    ids, n = ("input_ids",), 128
    scored = (*GENERATED, "rewards", "costs", "ref_logprobs", "values", "cost_values", "actor_logprobs")
    average = ParamReallocHook(target=ModelName("teacher"), eta=0.05)
    return [
        MFCDef("rewrite_gen", "rewriter", GENERATE, "rewriter", ("prompt_ids",), ("rewritten_ids",), n_seqs=n),
        MFCDef("actor_gen", "actor", GENERATE, "ppo_actor", ("rewritten_ids",), GENERATED, n_seqs=n, max_staleness=2),
        MFCDef("actor_inf", "actor", INFERENCE, "ppo_actor", ids, ("actor_logprobs",), n_seqs=n),
        MFCDef("ref_inf", "ref", INFERENCE, "ppo_ref", ids, ("ref_logprobs",), n_seqs=n, post_hooks=(OffloadHook(),)),
        MFCDef("helpful_inf", "helpful", INFERENCE, "reward", ids, ("helpful_scores",), n_seqs=n),
        MFCDef("harmless_inf", "harmless", INFERENCE, "reward", ids, ("harmless_scores",), n_seqs=n, min_n_seqs=16),
        MFCDef("judge_gen", "judge", GENERATE, "judge", (*ids, "prompt_ids"), ("judgement_ids",), n_seqs=n),
        MFCDef("judge_inf", "judge", INFERENCE, "judge", ("judgement_ids",), ("judge_scores",), n_seqs=n),
        MFCDef(
            "reward_mix", "mixer", INFERENCE, "mix", ("helpful_scores", "judge_scores"), ("rewards",), n_seqs=n
        ),
        MFCDef("cost_mix", "mixer", INFERENCE, "mix", ("harmless_scores", "judge_scores"), ("costs",), n_seqs=n),
        MFCDef("critic_inf", "critic", INFERENCE, "ppo_critic", (*ids, "truncated"), ("values",), n_seqs=n),
        MFCDef(
            "cost_critic_inf", "cost_critic", INFERENCE, "ppo_critic", (*ids, "truncated"), ("cost_values",), n_seqs=n
        ),
        MFCDef("teacher_inf", "teacher", INFERENCE, "ppo_ref", ids, ("teacher_logprobs",), n_seqs=n),
        MFCDef(
            "actor_train", "actor", TRAIN, "safe_ppo", (*scored, "teacher_logprobs"), n_seqs=n, n_minibatches=4,
            post_hooks=(average,),
        ),
        MFCDef("critic_train", "critic", TRAIN, "ppo_critic", (*GENERATED, "rewards", "values"), n_seqs=n),
        MFCDef("cost_critic_train", "cost_critic", TRAIN, "ppo_critic", (*GENERATED, "costs", "cost_values"), n_seqs=n),
        MFCDef("judge_train", "judge", TRAIN, "judge", ("judgement_ids", "judge_scores", "rewards"), n_seqs=n),
    ]  # fmt: skip


DATASET_KEYS = {"ppo": ["prompt_ids"], "sft": ["input_ids", "prompt_mask"], "seventeen": ["prompt_ids"]}

"""Algorithms with one mistake each: a right one, and what is written differently in it."""

from __future__ import annotations

from dataclasses import dataclass

RIGHT = '''"""REINFORCE whose advantages are a call of their own."""

import random
import time

import torch

from realrl import DatasetKind, Experiment, InterfaceRef, InterfaceType, LossOutput, MFCDef, ModelInterface
from realrl import Moments, Role, register_interface, response_mask, to_transitions, train_minibatches
from realrl.sched.messages import KeySchema, Per

SEQUENCE, TRANSITION = KeySchema("float32", Per.SEQUENCE), KeySchema("float32", Per.TRANSITION)
LEFT = {}


def reward(prompt_ids, response_ids):
    return sum(97 <= token <= 122 for token in response_ids) / len(response_ids) + len(set(response_ids)) / 10


@register_interface("wrong_advantages")
class Advantages(ModelInterface):
    def inference(self, model, batch, ctx):
        rewards = batch["rewards"]
        moments = Moments.of(rewards, model.engine.all_reduce)
        advantages = ((rewards - moments.mean) / (moments.std + 1e-3)).float()
        weights = torch.where(response_mask(batch), to_transitions(advantages, batch), 0.0)
        ctx.metrics.add("advantage/square", float(advantages.square().sum()), len(advantages))
        values = {"advantages": (SEQUENCE, advantages), "weights": (TRANSITION, weights)}
        return batch.derive("input_ids", values)


@register_interface("wrong_reinforce")
class Reinforce(ModelInterface):
    def __init__(self):
        self.baseline = 0.0

    def train_step(self, model, batch, ctx):
        rewards = Moments.of(batch["rewards"], model.engine.all_reduce)
        temperature = ctx.generation.temperature
        baseline = self.baseline
        kept = []

        def loss(out, part):
            mask = response_mask(part)
            weights = part["weights"][mask] + 0.5 - baseline
            logprobs = out.logprobs(temperature, mask)[mask]
            total = -(weights * logprobs).sum()
            kept.append(float(logprobs.detach().mean()))
            return LossOutput(total, {"neg_logprob": -logprobs.detach().sum()})

        def count(part):
            return int(response_mask(part).sum())

        summary = train_minibatches(model, batch, ctx, loss, count=count)
        self.baseline = 0.5 * self.baseline + 0.5 * rewards.mean
        return {**summary.metrics("actor"), "reward/mean": rewards.mean}

    def state_dict(self):
        return {"baseline": self.baseline}

    def load_state_dict(self, state):
        self.baseline = state["baseline"]


def calls(config):
    tokens, n = ("input_ids", "prompt_mask"), config.n_seqs
    score = InterfaceRef("function_reward", {"function": f"{__file__}:reward", "in_process": True})
    return [
        MFCDef("actor_gen", "actor", InterfaceType.GENERATE, "ppo_actor", ("prompt_ids",), tokens, n_seqs=n),
        MFCDef("rew_inf", "reward", InterfaceType.INFERENCE, score, tokens, ("rewards",), n_seqs=n),
        MFCDef("adv_inf", "judge", InterfaceType.INFERENCE, "wrong_advantages", (*tokens, "rewards"),
               ("advantages", "weights"), n_seqs=n),
        MFCDef("actor_train", "actor", InterfaceType.TRAIN_STEP, "wrong_reinforce",
               (*tokens, "rewards", "advantages", "weights"), n_seqs=n, log_return_value=True),
    ]  # fmt: skip


ROLES = {
    "actor": Role(trainable=True),
    "reward": Role(trainable=False, head="none", path_from="actor"),
    "judge": Role(trainable=False, head="none", path_from="actor"),
}
EXPERIMENT = Experiment("wrong", "one mistake", ROLES, DatasetKind.PROMPT, calls)
'''


@dataclass(frozen=True)
class Wrong:
    """A mistake.

    Attributes:
        edits: text of `RIGHT` -> what stands there instead.
        cause: name of the cause that must be found, and no other.
        call: call in which it must be found.
        at: text of the line that must be pointed at; empty for any.
        with_engines: tensor-parallel and pipeline workers are needed to see it.
    """

    edits: tuple[tuple[str, str], ...]
    cause: str
    call: str = "actor_train"
    at: str = ""
    with_engines: bool = False

    @property
    def text(self) -> str:
        """The file."""
        text = RIGHT
        for old, new in self.edits:
            assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        return text


_ADVANTAGES = "((rewards - moments.mean) / (moments.std + 1e-3)).float()"
_LOGPROBS = "logprobs = out.logprobs(temperature, mask)[mask]\n            total = -(weights * logprobs).sum()"
_WEIGHTS = 'part["weights"][mask] + 0.5 - baseline'

WRONG = {
    "rank_local_metric": Wrong(
        (('"reward/mean": rewards.mean}', '"reward/mean": batch["rewards"].mean()}'),),
        "rank-local-metric",
        at='"reward/mean"',
    ),
    "mean_loss": Wrong((("-(weights * logprobs).sum()", "-(weights * logprobs).mean()"),), "mean-loss", at="def loss"),
    "loss_per_sequence": Wrong(
        (("-(weights * logprobs).sum()", "-(weights * logprobs).sum() / len(part)"),), "mean-loss", at="def loss"
    ),
    "mean_statistic": Wrong((("-logprobs.detach().sum()", "-logprobs.detach().mean()"),), "mean-statistic"),
    "torch_generator": Wrong(
        ((_ADVANTAGES, f"{_ADVANTAGES} + 0.1 * torch.randn(len(rewards))"),),
        "rank-generator",
        "adv_inf",
        at='"advantages"',
    ),
    "own_generator": Wrong(
        (
            (
                _ADVANTAGES,
                f"{_ADVANTAGES} + torch.rand(len(rewards), generator=torch.Generator().manual_seed(ctx.step))",
            ),
        ),
        "by-position",
        "adv_inf",
    ),
    "python_generator": Wrong(
        ((_ADVANTAGES, f"{_ADVANTAGES} * random.uniform(0.9, 1.1)"),), "not-repeatable", "adv_inf"
    ),
    "per_rank": Wrong(
        ((_ADVANTAGES, "((rewards - rewards.mean()) / (rewards.std() + 1e-3)).float()"),), "per-rank", "adv_inf"
    ),
    "per_rank_in_training": Wrong(
        (("baseline = self.baseline\n", 'baseline = float(batch["rewards"].mean())\n'),), "per-rank"
    ),
    "undeclared": Wrong(
        (
            ('values = {"advantages"', 'LEFT["now"] = weights\n        values = {"advantages"'),
            (
                "        kept = []\n",
                "        kept = []\n"
                '        left = batch.derive("input_ids", {"weights": (TRANSITION, LEFT["now"])})\n'
                "        batch = batch.update(left)\n",
            ),
        ),
        "undeclared-data",
    ),
    "first_sample": Wrong(((_ADVANTAGES, "(rewards - rewards[0]).float()"),), "order-dependent", "adv_inf"),
    "running_sum": Wrong(((_ADVANTAGES, "rewards.cumsum(0).float()"),), "order-dependent", "adv_inf"),
    "mask_dropped": Wrong(
        (
            (
                _LOGPROBS,
                "logprobs = out.logprobs(temperature, mask)[mask]\n            "
                'total = -(part["weights"] * out.logprobs(temperature)).sum()',
            ),
        ),
        "mask-dropped",
    ),
    "per_micro_batch": Wrong(
        ((_WEIGHTS, '(part["weights"][mask] - part["weights"][mask].mean() + 0.5)'),), "per-micro-batch", at="def loss"
    ),
    "padding": Wrong(
        (("-(weights * logprobs).sum()", '-(weights * logprobs).sum() / max(part.flat_seqlens("input_ids"))'),),
        "per-micro-batch",
    ),
    "clock": Wrong(((_ADVANTAGES, f"{_ADVANTAGES} + time.time() % 1.0"),), "not-repeatable", "adv_inf"),
    "order_of_a_set": Wrong(
        ((_ADVANTAGES, f"{_ADVANTAGES} + len(next(iter({{'a', 'bb', 'ccc', 'dddd', 'eeeee', 'ffffff'}})))"),),
        "not-repeatable",
        "adv_inf",
    ),
    "state": Wrong((("0.5 * rewards.mean\n", '0.5 * float(batch["rewards"].mean())\n'),), "state-between-steps"),
    "not_saved": Wrong(
        (('return {"baseline": self.baseline}', "return {}"), ('self.baseline = state["baseline"]', "return")),
        "state-not-saved",
        at="self.baseline = 0.5",
    ),
    "not_saved_in_a_module": Wrong(
        (
            ("baseline = self.baseline\n", 'baseline = LEFT.get("baseline", 0.0)\n'),
            ("self.baseline = 0.5 * self.baseline + 0.5", 'LEFT["baseline"] = 0.5 * baseline + 0.5'),
        ),
        "state-not-saved",
    ),
    "local_normaliser": Wrong(
        (
            (
                "summary = train_minibatches(model, batch, ctx, loss, count=count)",
                "summary = model.engine.train_batch(batch, loss, normaliser=count(batch), "
                "micro_batching=ctx.micro_batching)",
            ),
            ('**summary.metrics("actor")', '"actor/grad_norm": summary.grad_norm'),
        ),
        "local-normaliser",
    ),
    "recorded_mean": Wrong(
        (("float(advantages.square().sum()), len(advantages))", "float(advantages.square().mean()), 1)"),),
        "mean-of-means",
        "adv_inf",
        at='"advantage/square"',
    ),
    "mean_of_means": Wrong(
        (
            (
                '"reward/mean": rewards.mean}',
                '"reward/mean": model.engine.all_reduce(torch.stack([batch["rewards"].mean(), torch.ones(())]))'
                ".tolist()[0] / model.engine.all_reduce(torch.ones(1)).item()}",
            ),
        ),
        "mean-of-means",
    ),
    "metric_of_pieces": Wrong(
        (('"reward/mean": rewards.mean}', '"reward/mean": rewards.mean, "actor/logprob": sum(kept) / len(kept)}'),),
        "metric-of-pieces",
        at='"actor/logprob"',
    ),
    "by_rank": Wrong(
        ((_ADVANTAGES, f"(lambda a: a if len(rewards) > 8 else a * a.abs())({_ADVANTAGES})"),),
        "by-rank",
        "adv_inf",
    ),
}

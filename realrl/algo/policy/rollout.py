"""The input of advantages: a rank's share of a batch of responses, and quantities that several advantages need."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from realrl.algo.normalise import AllReduce, Moments
from realrl.algo.packed import Actions, action_mask
from realrl.algo.policy.kl import sequence_kl, shape_scores, token_rewards
from realrl.data.checks import SampleError
from realrl.data.sample import SequenceSample
from realrl.sched.messages import Per

GRANULARITY = {
    "input_ids": Per.TOKEN,
    "prompt_mask": Per.TOKEN,
    "old_logprobs": Per.TRANSITION,
    "behavior_logprobs": Per.TRANSITION,
    "ref_logprobs": Per.TRANSITION,
    "teacher_logprobs": Per.TRANSITION,
    "teacher_top_tokens": Per.TRANSITION,
    "teacher_top_logprobs": Per.TRANSITION,
    "rewards": Per.SEQUENCE,
    "other_rewards": Per.SEQUENCE,
    "greedy_rewards": Per.SEQUENCE,
    "greedy_truncated": Per.SEQUENCE,
    "costs": Per.SEQUENCE,
    "values": Per.TOKEN,
    "cost_values": Per.TOKEN,
    "truncated": Per.SEQUENCE,
}


def check_granularity(batch: SequenceSample) -> None:
    """Refuse a key with another granularity than the formulas assume.

    Raises:
        SampleError: names the key.
    """
    for key in batch.keys:
        found, needed = batch.schemas[key].per, GRANULARITY.get(key, batch.schemas[key].per)
        if found is not needed:
            raise SampleError(f"key {key!r} is per {found.value}, and training needs it per {needed.value}")


@dataclass(frozen=True)
class Rollout:
    """A rank's share of a batch: S responses with T tokens, and R actions among the T - S transitions.

    A group is what one sample holds: the responses to one prompt. It is never spread over ranks.

    Attributes:
        batch: holds the keys that the piece declared; `key in rollout.batch` is False for an absent optional one.
        options: the configuration's ``algorithm`` section.
        all_reduce: sum, or maximum with "max" as its second argument, over the ranks that hold different samples.
        kl_coef: weight of the KL penalty in the token rewards of this batch.
        state: numbers that a piece keeps from step to step and checkpoints save. All ranks must write the same, those
            without samples too: `moments`, `maximum` and `all_reduce` give the same on all of them.
        metrics: numbers that a piece logs. The same holds for them.
    """

    batch: SequenceSample
    options: Any
    all_reduce: AllReduce
    kl_coef: float = 0.0
    state: MutableMapping[str, float] = field(default_factory=dict)
    metrics: MutableMapping[str, float] = field(default_factory=dict)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 [S + 1], offsets of the sequences' tokens."""
        return self.batch.cu_seqlens("input_ids")

    @cached_property
    def mask(self) -> torch.Tensor:
        """bool [T - S], the actions."""
        return action_mask(self.batch["prompt_mask"], self.cu_seqlens)

    @cached_property
    def actions(self) -> Actions:
        return Actions.find(self.mask, self.cu_seqlens)

    @cached_property
    def group_sizes(self) -> torch.Tensor:
        """int64 [samples]: responses of each sample."""
        sizes = [len(lengths) for lengths in self.batch.seqlens["input_ids"]]
        return torch.tensor(sizes, dtype=torch.int64, device=self.mask.device)

    @cached_property
    def group(self) -> torch.Tensor:
        """int64 [S]: index of each response's sample."""
        numbers = torch.arange(len(self.batch), device=self.mask.device)
        return torch.repeat_interleave(numbers, self.group_sizes)

    @cached_property
    def scores(self) -> torch.Tensor:
        """float32 [S]: rewards, shifted, scaled and clipped as the options say."""
        return self.shaped(self.batch["rewards"], self.batch["truncated"])

    def shaped(self, rewards: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """float32 [S]: rewards, shifted, scaled and clipped like `scores`."""
        o = self.options
        return shape_scores(rewards, truncated, o.reward_scaling, o.reward_bias, o.reward_clip, o.score_truncated)

    @cached_property
    def sequence_kl(self) -> torch.Tensor | None:
        """float64 [S]: log pi_old - log pi_ref summed over each response; None without `ref_logprobs`."""
        if "ref_logprobs" not in self.batch:
            return None
        return sequence_kl(self.batch["old_logprobs"], self.batch["ref_logprobs"], self.actions)

    def token_rewards(self, scores: torch.Tensor, kl_weight: float = 1.0) -> torch.Tensor:
        """float32 [T - S]: -kl_weight kl_coef (log pi_old - log pi_ref) on each action, plus the score on the last one.

        Args:
            scores: [S].
            kl_weight: factor of `kl_coef`; without a reference there is no penalty.
        """
        old = self.batch["old_logprobs"]
        ref = old if self.sequence_kl is None else self.batch["ref_logprobs"]
        return token_rewards(old, ref, scores, self.actions, kl_weight * self.kl_coef)

    def group_sum(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [S]: sum of `values` [S] over each response's group."""
        sums = torch.segment_reduce(values.double(), "sum", lengths=self.group_sizes, initial=0.0, unsafe=True)
        return sums[self.group]

    def group_mean(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [S]: mean of `values` [S] over each response's group."""
        return self.group_sum(values) / self.group_sizes[self.group]

    def per_transition(self, values: torch.Tensor) -> torch.Tensor:
        """float32 [T - S]: each response's `values` [S] on all its actions, 0 elsewhere."""
        return self.actions.spread(values.double()[self.actions.sequence], self.mask.shape[0])

    def moments(self, values: torch.Tensor) -> Moments:
        """Count, mean and variance of `values` over all ranks."""
        return Moments.of(values, self.all_reduce)

    def maximum(self, values: torch.Tensor) -> float:
        """Largest of `values` over all ranks; 0 if no rank has any, as are `moments`."""
        values = values.double()
        largest = values.max() if values.numel() else values.new_tensor(-torch.inf)
        found, is_any = self.all_reduce(torch.stack([largest, values.new_tensor(values.numel() > 0)]), "max").tolist()
        return float(found) if is_any else 0.0

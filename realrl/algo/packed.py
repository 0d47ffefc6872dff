"""Index arithmetic on packed sequences: T tokens in S sequences, T - S transitions, offsets `cu_seqlens` [S + 1].

Transition t of a sequence predicts its token t + 1. An *action* is a transition whose predicted token belongs to the
response. Losses and rewards are defined on actions only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from realrl.data.sample import SequenceSample


def response_mask(batch: SequenceSample) -> torch.Tensor:
    """bool [T - S]: the actions of a batch that holds `input_ids` and `prompt_mask`."""
    return action_mask(batch["prompt_mask"], batch.cu_seqlens("input_ids"))


def n_actions(batch: SequenceSample) -> int:
    """The number of True in `response_mask`."""
    return int(response_mask(batch).sum())


def to_transitions(per_sequence: torch.Tensor, batch: SequenceSample) -> torch.Tensor:
    """[T - S]: each sequence's row of `per_sequence` [S], repeated for every transition of its `input_ids`."""
    lengths = batch.cu_seqlens("input_ids").diff().long()
    return torch.repeat_interleave(per_sequence, lengths - 1)


def action_mask(prompt_mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """bool [T - S]: True where a transition predicts a response token.

    Args:
        prompt_mask: bool [T], True on prompt tokens.
        cu_seqlens: [S + 1].
    """
    predicted = torch.ones_like(prompt_mask)
    predicted[cu_seqlens[:-1].long()] = False
    return ~prompt_mask[predicted]


def before_transition(per_token: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T - S]: rows of `per_token` [T] at the tokens that transitions start from."""
    starts = torch.ones(per_token.shape[0], dtype=torch.bool, device=per_token.device)
    starts[cu_seqlens[1:].long() - 1] = False
    return per_token[starts]


def last_token(per_token: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[S]: the row of each sequence's last token."""
    return per_token[cu_seqlens[1:].long() - 1]


@dataclass(frozen=True)
class Actions:
    """Indices of the R actions of a packed batch.

    Attributes:
        transition: int64 [R], index among the T - S transitions, increasing.
        token: int64 [R], index among the T tokens of the token before the predicted one.
        sequence: int64 [R], index of the sequence.
        remaining: int64 [R], number of later actions in the same sequence.
        counts: int64 [S], actions per sequence.
    """

    transition: torch.Tensor
    token: torch.Tensor
    sequence: torch.Tensor
    remaining: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def find(cls, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> Actions:
        """The actions that `mask` (bool [T - S]) selects."""
        lengths = cu_seqlens.diff().long()
        n_sequences = lengths.shape[0]
        numbers = torch.arange(n_sequences, device=mask.device)
        transition = mask.nonzero().squeeze(1)
        sequence = torch.repeat_interleave(numbers, lengths - 1)[transition]
        counts = torch.bincount(sequence, minlength=n_sequences)
        remaining = counts.cumsum(0)[sequence] - 1 - torch.arange(transition.shape[0], device=mask.device)
        return cls(transition, transition + sequence, sequence, remaining, counts)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[S]: sum per sequence of `values` [R]; 0 for a sequence without actions."""
        return torch.segment_reduce(values, "sum", lengths=self.counts, initial=0.0, unsafe=True)

    def spread(self, values: torch.Tensor, n_transitions: int) -> torch.Tensor:
        """float32 [T - S]: `values` [R] at the actions, 0 elsewhere."""
        out = torch.zeros(n_transitions, dtype=torch.float32, device=values.device)
        out[self.transition] = values.float()
        return out

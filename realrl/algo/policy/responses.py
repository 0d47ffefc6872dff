"""Responses as the rows that a generation gives to the graph: each behind its prompt, packed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from realrl.algo.api import GenerationResult
from realrl.data.sample import SequenceSample
from realrl.sched.messages import KeySchema, Per

PER_TRANSITION = KeySchema("float32", Per.TRANSITION)
BEHAVIOR = "behavior_logprobs"


def pack_responses(prompts: SequenceSample, result: GenerationResult) -> SequenceSample:
    """Return `input_ids`, `prompt_mask`, `old_logprobs`, `behavior_logprobs` and `truncated`, on the prompts' device.

    A column takes a few operations however many responses there are, and comes from the host in one piece.

    Args:
        prompts: has `prompt_ids`.
        result: equally many responses to each prompt, all on one device.
    """
    device, own = prompts["prompt_ids"].device, prompts.samples("prompt_ids")
    n = len(result.responses) // len(own)
    repeated = [prompt for prompt in own for _ in range(n)]
    before, new = [len(prompt) for prompt in repeated], [len(response) for response in result.responses]

    def joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return torch.cat(list(parts)).to(device, dtype)

    given = None if result.given is None else joined(result.given, torch.bool)
    is_new, is_action = _ends(before, new).to(device), _ends([length - 1 for length in before], new).to(device)

    def per_transition(logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
        column = joined(logprobs, torch.float32)
        column = column if given is None else column.masked_fill(given, 0.0)
        return torch.zeros(len(is_action), device=device).masked_scatter_(is_action, column)

    tokens = torch.empty(len(is_new), dtype=torch.int64, device=device).masked_scatter_(~is_new, torch.cat(repeated))
    lengths = [sum(pair) for pair in zip(before, new, strict=True)]
    sequences = SequenceSample(
        prompts.ids,
        {"input_ids": KeySchema("int64", Per.TOKEN)},
        {"input_ids": tuple(tuple(lengths[i : i + n]) for i in range(0, len(lengths), n))},
        {"input_ids": tokens.masked_scatter_(is_new, joined(result.responses, torch.int64))},
    )
    columns = {
        "prompt_mask": (
            KeySchema("bool", Per.TOKEN),
            ~is_new if given is None else (~is_new).masked_scatter_(is_new, given),
        ),
        "old_logprobs": (PER_TRANSITION, per_transition(result.policy_logprobs)),
        BEHAVIOR: (PER_TRANSITION, per_transition(result.logprobs)),
        "truncated": (KeySchema("bool", Per.SEQUENCE), torch.tensor(result.truncated, dtype=torch.bool, device=device)),
    }
    return sequences.update(sequences.derive("input_ids", columns))


def _ends(before: Sequence[int], new: Sequence[int]) -> torch.Tensor:
    """Bool [sum of both]: True for the last `new` rows of each stretch of `before` + `new` rows."""
    lengths = torch.tensor(list(chain.from_iterable(zip(before, new, strict=True))))
    return torch.tensor([False, True]).repeat(len(new)).repeat_interleave(lengths)

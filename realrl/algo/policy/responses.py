"""Responses as the rows that a generation gives to the graph: each behind its prompt, packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from realrl.algo.api import GenerationResult
from realrl.algo.packed import action_mask
from realrl.data.sample import SequenceSample
from realrl.sched.messages import KeySchema, Per

PER_TRANSITION = KeySchema("float32", Per.TRANSITION)
BEHAVIOR = "behavior_logprobs"


def pack_responses(prompts: SequenceSample, result: GenerationResult) -> SequenceSample:
    """Return `input_ids`, `prompt_mask`, `old_logprobs`, `behavior_logprobs` and `truncated`, on the prompts' device.

    A column takes a few operations however many responses there are, and comes from the host in one piece.

    Args:
        prompts: has `prompt_ids`, none of them empty.
        result: equally many responses to each prompt, all on one device.
    """
    device, own = prompts["prompt_ids"].device, prompts.samples("prompt_ids")
    n = len(result.responses) // len(own)
    repeated = [prompt for prompt in own for _ in range(n)]
    stretches = [len(part) for pair in zip(repeated, result.responses, strict=True) for part in pair]
    lengths = [sum(stretches[i : i + 2]) for i in range(0, len(stretches), 2)]

    def joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return torch.cat(list(parts)).to(device, dtype)

    is_prompt = torch.tensor([True, False]).repeat(len(repeated)).repeat_interleave(torch.tensor(stretches)).to(device)
    tokens = torch.empty(len(is_prompt), dtype=torch.int64, device=device)
    tokens.masked_scatter_(is_prompt, torch.cat(repeated))
    tokens.masked_scatter_(~is_prompt, joined(result.responses, torch.int64))
    sequences = SequenceSample(
        prompts.ids,
        {"input_ids": KeySchema("int64", Per.TOKEN)},
        {"input_ids": tuple(tuple(lengths[i : i + n]) for i in range(0, len(lengths), n))},
        {"input_ids": tokens},
    )
    follows_prompt = action_mask(is_prompt, sequences.cu_seqlens("input_ids"))
    given = None if result.given is None else joined(result.given, torch.bool)

    def per_transition(logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
        column = joined(logprobs, torch.float32)
        column = column if given is None else column.masked_fill(given, 0.0)
        return torch.zeros(len(follows_prompt), device=device).masked_scatter_(follows_prompt, column)

    columns = {
        "prompt_mask": (
            KeySchema("bool", Per.TOKEN),
            is_prompt if given is None else is_prompt.masked_scatter(~is_prompt, given),
        ),
        "old_logprobs": (PER_TRANSITION, per_transition(result.policy_logprobs)),
        BEHAVIOR: (PER_TRANSITION, per_transition(result.logprobs)),
        "truncated": (KeySchema("bool", Per.SEQUENCE), torch.tensor(result.truncated, dtype=torch.bool, device=device)),
    }
    return sequences.update(sequences.derive("input_ids", columns))

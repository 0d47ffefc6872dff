"""Packed batches for the algorithms' tests: hypothesis strategies and plain builders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from realrl.data.sample import SequenceSample
from realrl.sched.messages import KeySchema, Per

TOKEN, TRANSITION, SEQUENCE = (KeySchema("float32", per) for per in (Per.TOKEN, Per.TRANSITION, Per.SEQUENCE))
IDS = KeySchema("int64", Per.TOKEN)
FLAGS = KeySchema("bool", Per.TOKEN)
FLAG = KeySchema("bool", Per.SEQUENCE)


@dataclass
class Sequence1:
    """One sequence in lists: `n_prompt` prompt tokens, then one action per entry of `rewards`."""

    n_prompt: int
    rewards: list[float]
    values: list[float]
    truncated: bool

    @property
    def length(self) -> int:
        return self.n_prompt + len(self.rewards)


numbers = st.floats(-10, 10, width=32)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence1:
    n_prompt = draw(st.integers(1, 4))
    n_actions = draw(st.integers(0, 12))
    rewards = draw(st.lists(numbers, min_size=n_actions, max_size=n_actions))
    values = draw(st.lists(numbers, min_size=n_prompt + n_actions, max_size=n_prompt + n_actions))
    return Sequence1(n_prompt, rewards, values, draw(st.booleans()))


@dataclass
class Packed:
    """Tensors of several `Sequence1`; what no action reads is `junk`."""

    rewards: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    prompt_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    truncated: torch.Tensor


def pack(parts: Sequence[Sequence1], junk: float = 0.0) -> Packed:
    rewards: list[float] = []
    values: list[float] = []
    prompt_mask: list[bool] = []
    for s in parts:
        n = s.n_prompt
        rewards += [junk] * (n - 1) + s.rewards
        last = s.values[-1] if s.truncated and s.rewards else junk
        values += [junk] * (n - 1) + s.values[n - 1 : -1] + [last] if s.rewards else [junk] * n
        prompt_mask += [True] * n + [False] * len(s.rewards)
    mask = [not p for s in parts for p in ([True] * (s.n_prompt - 1) + [False] * len(s.rewards))]
    return Packed(
        torch.tensor(rewards),
        torch.tensor(values),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(prompt_mask, dtype=torch.bool),
        torch.tensor([0, *(s.length for s in parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        torch.tensor([s.truncated for s in parts], dtype=torch.bool),
    )


def experience_batch(
    n_samples: int, *, n_tokens: int, seed: int = 0, n_responses: int = 1, junk: float = 0.0
) -> SequenceSample:
    """A batch with every key that PPO's train_step reads; prompt positions hold `junk`."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def normal(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator)

    columns: dict[str, list[list[torch.Tensor]]] = {}
    for _ in range(n_samples):
        sample: dict[str, list[torch.Tensor]] = {}
        n_prompt = integers(1, 4)
        for _ in range(n_responses):
            n = integers(1, 6)
            empty = torch.full((n_prompt - 1,), junk)
            logprobs = -0.5 - normal(n).abs()
            row = {
                "input_ids": torch.randint(0, n_tokens, (n_prompt + n,), generator=generator),
                "prompt_mask": torch.arange(n_prompt + n) < n_prompt,
                "old_logprobs": torch.cat([empty, logprobs]),
                "ref_logprobs": torch.cat([empty, logprobs + 0.3 * normal(n)]),
                "rewards": normal(1) * 2 + 1,
                "values": torch.cat([empty, normal(n + 1)]),
                "truncated": torch.tensor([integers(0, 2) == 1]),
            }
            for key, tensor in row.items():
                sample.setdefault(key, []).append(tensor)
        for key, tensors in sample.items():
            columns.setdefault(key, []).append(tensors)
    schemas = {
        "input_ids": IDS,
        "prompt_mask": FLAGS,
        "old_logprobs": TRANSITION,
        "ref_logprobs": TRANSITION,
        "rewards": SEQUENCE,
        "values": TOKEN,
        "truncated": FLAG,
    }
    ids = tuple(f"0/{i}" for i in range(n_samples))
    return SequenceSample.from_lists(ids, {key: (schemas[key], columns[key]) for key in schemas})


def token_batch(parts: Sequence[Sequence[tuple[list[int], list[int]]]]) -> SequenceSample:
    """`input_ids` and `prompt_mask` of samples, each a list of (prompt, response)."""
    ids = tuple(f"0/{i}" for i in range(len(parts)))
    tokens = [[torch.tensor(p + r) for p, r in sample] for sample in parts]
    masks = [[torch.tensor([True] * len(p) + [False] * len(r)) for p, r in sample] for sample in parts]
    return SequenceSample.from_lists(ids, {"input_ids": (IDS, tokens), "prompt_mask": (FLAGS, masks)})


def metadata(ids: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> SequenceSample:
    """The key `metadata` of samples that were made of these rows."""
    packed = [[torch.tensor(list(json.dumps(row).encode()), dtype=torch.uint8)] for row in rows]
    return SequenceSample.from_lists(tuple(ids), {"metadata": (KeySchema("uint8", Per.TOKEN), packed)})

"""Sequences that begin alike, computed once: hidden states and gradients of the copies that are not computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from realrl.model.decoder import Decoder
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.model.shared_prefix import SharedPrefixes
from realrl.plan.samples.prefixes import is_worth_sharing
from realrl.shape import DecoderConfig

CONFIG = DecoderConfig(61, 128, 2, 4, 2, 32, 96)
TOL = 1e-10
BIG = 4096  # a hidden size for which even one token is worth sharing


def batch(samples: Sequence[tuple[int, Sequence[int]]]) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Of each sample, the tokens of its prompt and of its answers; answers begin with a token of their own."""
    generator = torch.Generator().manual_seed(1)
    parts, seqlens = [], []
    for n_shared, tails in samples:
        prompt = torch.randint(0, 50, (n_shared,), generator=generator)
        for i, n_tail in enumerate(tails):
            tail = torch.randint(0, 50, (n_tail,), generator=generator)
            tail[:1] = 50 + i
            parts += [prompt, tail]
        seqlens.append(tuple(n_shared + n for n in tails))
    return torch.cat(parts), seqlens


BOUNDED = {"score_softcap": 0.02}
SAMPLES = {
    "responses": [(9, (5, 3, 8)), (4, (2, 2))],
    "even": [(9, (4, 4, 4))],
    "beside_single_ones": [(3, (6,)), (11, (1, 5)), (2, (7,))],
    "nothing_follows": [(6, (0, 3, 0)), (5, (0, 0))],
    "not_shared": [(0, (6, 5)), (8, (2, 9))],
}


def gradients(decoder: Decoder, hidden: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    decoder.zero_grad()
    out = hidden()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weights).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 5}, {"sliding_window": 5, "sinks": True}, BOUNDED], ids=str)
def test_states_and_gradients_are_those_of_copies(name: str, changes: dict[str, Any]) -> None:
    decoder = random_model(replace(CONFIG, **changes), seed=3).double()  # the order of sums differs
    tokens, seqlens = batch(SAMPLES[name])
    flat = [n for lengths in seqlens for n in lengths]
    positions = torch.cat([torch.arange(n) for n in flat])
    shared = SharedPrefixes(tokens, seqlens, BIG)
    assert not shared.is_trivial
    assert len(shared.tokens) < len(tokens)

    def once() -> torch.Tensor:
        return decoder(tokens[shared.tokens], shared.positions, shared.attention())[shared.expand]

    found, found_gradients = gradients(decoder, once)
    expected, expected_gradients = gradients(decoder, lambda: decoder(tokens, positions, PackedAttention(flat)))
    torch.testing.assert_close(found, expected, atol=TOL, rtol=TOL)
    for key, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[key], gradient, atol=TOL, rtol=TOL)


def test_each_token_is_computed_once() -> None:
    tokens, seqlens = batch(SAMPLES["responses"])
    shared = SharedPrefixes(tokens, seqlens, BIG)
    assert len(shared.tokens) == (9 + 5 + 3 + 8) + (4 + 2 + 2)
    assert torch.equal(tokens[shared.tokens][shared.expand], tokens)
    positions = torch.cat([torch.arange(n) for lengths in seqlens for n in lengths])
    assert torch.equal(shared.positions[shared.expand], positions)


@pytest.mark.parametrize("seqlens", [[], [()], [(0,)], [(0, 4)], [(4,), (3,)]])
def test_nothing_to_share(seqlens: list[tuple[int, ...]]) -> None:
    tokens = torch.zeros(sum(map(sum, seqlens)), dtype=torch.int64)
    shared = SharedPrefixes(tokens, seqlens, BIG)
    assert shared.is_trivial
    assert torch.equal(shared.tokens, torch.arange(len(tokens)))


@pytest.mark.parametrize(
    ("n_shared", "tails", "hidden_size", "expected"),
    [
        (96, (48,) * 8, 576, True),  # prompts and responses of a usual size
        (200, (100, 120), 576, True),  # the two answers of a pair
        (3, (5, 5), 64, False),  # a few tokens of a small model
        (50, (2000,) * 8, 576, False),  # attention among the tails is most of the work
        (1000, (10,) * 7 + (3000,), 576, False),  # padded to the longest
        (1000, (9000, 9000), 4096, False),  # the mask alone would be large
    ],
)
def test_what_is_worth_sharing(n_shared: int, tails: tuple[int, ...], hidden_size: int, expected: bool) -> None:
    assert is_worth_sharing(n_shared, [n_shared + n for n in tails], hidden_size) is expected

"""Attention over the cache against exact sums, and grouped heads with and without repeated keys and values."""

from __future__ import annotations

import pytest
import torch

from realrl.cpu import attend_grouped, window_mask
from realrl.cpu.attention import decode_scores, fits_flash


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_repeated_heads_attend_like_grouped_ones(window: int | None, n_kv_heads: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 7, 8, dtype=torch.float64, requires_grad=True) for n in (4, n_kv_heads, n_kv_heads))
    mask = None if window is None else window_mask(7, window, q.device)
    outputs, gradients = [], []
    for repeats in (False, True):
        out = attend_grouped(q, k, v, mask, repeats=repeats)
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.sin().sum(), (q, k, v)))
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


def test_scores_of_half_precision_are_not_rounded_to_it() -> None:
    torch.manual_seed(0)
    queries, keys = (torch.randn(3, n, 64).bfloat16() for n in (2, 50))
    mask = torch.zeros(3, 2, 50)
    mask[:, :, 40:] = -torch.inf
    exact = queries.double() @ keys.double().transpose(1, 2) * 64**-0.5 + mask
    scores = decode_scores(queries, keys, mask)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "fits"),
    [
        (torch.bfloat16, 128, (8, 0), True),
        (torch.float16, 256, (9, 0), True),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.bfloat16, 60, (9, 0), False),
        (torch.bfloat16, 128, (7, 5), False),
        (torch.float32, 128, (9, 0), False),
    ],
)
def test_what_flash_attention_takes(dtype: torch.dtype, head_dim: int, capability: tuple[int, int], fits: bool) -> None:
    assert fits_flash(dtype, head_dim, capability) is fits

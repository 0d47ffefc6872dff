"""The variable-length kernel behind the signatures that torch gave it, by a stand-in that computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.attention.varlen as library

from realrl.model.layers import attention
from realrl.model.layers.attention import PackedAttention

LENGTHS = [5, 0, 1, 9]


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, window_size: tuple[int, int]
) -> torch.Tensor:
    """Attention of each sequence by itself, with grouped heads, over the window's earlier tokens and none later."""
    assert window_size[1] == 0
    outputs = [q[:0]]
    for start, end in pairwise(starts.tolist()):
        heads = [x[start:end].transpose(0, 1) for x in (q, k, v)]
        ages = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (ages >= 0) & ((window_size[0] < 0) | (ages <= window_size[0]))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def of_torch_2_11(q, k, v, starts_q, starts_k, max_q, max_k, *, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
    assert max_q == max_k == max(LENGTHS)
    assert torch.equal(starts_q, starts_k)
    return exact(q, k, v, starts_q, window_size)


def of_torch_2_13(*args, window_size=(-1, -1), enable_gqa=False):  # type: ignore[no-untyped-def]
    assert enable_gqa is (args[0].shape[1] != args[1].shape[1])
    return of_torch_2_11(*args, window_size=window_size)


@pytest.mark.parametrize("kernel", [of_torch_2_11, of_torch_2_13])
@pytest.mark.parametrize(("n_kv_heads", "window"), [(4, None), (2, None), (2, 3)])
def test_the_variable_length_kernel_attends_as_padded_groups_do(
    kernel: Callable[..., torch.Tensor], n_kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), n, 8, requires_grad=True) for n in (4, n_kv_heads, n_kv_heads))
    padded = PackedAttention(LENGTHS).attend(0, q, k, v, window=window)
    monkeypatch.setattr(library, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda q: True)
    ours = PackedAttention(LENGTHS).attend(0, q, k, v, window=window)
    torch.testing.assert_close(ours, padded)
    gradients = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (ours, padded)]
    torch.testing.assert_close(*gradients)

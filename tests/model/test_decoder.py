"""The decoder on packed sequences, its pieces against plain references."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from realrl.cpu import machine, matmul
from realrl.model import lm_logprobs as lm_module
from realrl.model.decoder import Decoder
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.model.layers.linear import Linear
from realrl.model.lm_logprobs import lm_logprobs
from realrl.shape import DecoderConfig, tiny_config

SEQLENS = [5, 1, 9, 0, 9, 3]


def run(decoder: Decoder, seqlens: list[int], ids: torch.Tensor) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in seqlens])
    return decoder(ids, positions, PackedAttention(seqlens))


@pytest.fixture
def decoder() -> Decoder:
    model = random_model(tiny_config(61), seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0)
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 61, (sum(SEQLENS),), generator=torch.Generator().manual_seed(0))


def test_a_packed_sequence_sees_only_itself(decoder: Decoder, ids: torch.Tensor) -> None:
    packed = run(decoder, SEQLENS, ids)
    alone = torch.cat([run(decoder, [len(part)], part) for part in ids.split(SEQLENS)])
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)


def test_a_token_does_not_see_later_ones(decoder: Decoder, ids: torch.Tensor) -> None:
    changed = ids.clone()
    changed[14] = (changed[14] + 1) % 61  # last token of the third sequence
    before, after = run(decoder, SEQLENS, ids), run(decoder, SEQLENS, changed)
    others = torch.arange(len(ids)) != 14
    torch.testing.assert_close(before[others], after[others], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(before[14], after[14], atol=1e-3)


def test_activation_checkpointing_changes_no_gradient(decoder: Decoder, ids: torch.Tensor) -> None:
    grads = []
    for flag in (False, True):
        decoder.activation_checkpointing = flag
        decoder.zero_grad()
        run(decoder, SEQLENS, ids).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)


@pytest.mark.parametrize("seqlens", [[4, 4, 4], [2, 30, 1, 17, 5, 29], [64], [1, 1]])
@pytest.mark.parametrize(("n_kv_heads", "window"), [(1, None), (2, None), (4, None), (2, 1), (1, 5), (4, 29)])
def test_packed_attention_against_one_sequence_at_a_time(
    seqlens: list[int], n_kv_heads: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(seqlens), 4, 8, generator=generator, requires_grad=True)
    k = torch.randn(sum(seqlens), n_kv_heads, 8, generator=generator, requires_grad=True)
    v = torch.randn(sum(seqlens), n_kv_heads, 8, generator=generator, requires_grad=True)
    weights = torch.randn(sum(seqlens), 4, 8, generator=generator)

    def reference() -> torch.Tensor:
        rows = []
        for qs, ks, vs in zip(q.split(seqlens), k.split(seqlens), v.split(seqlens), strict=True):
            ks, vs = (t.repeat_interleave(4 // n_kv_heads, dim=1) for t in (ks, vs))
            scores = torch.einsum("inD,jnD->nij", qs, ks) / 8**0.5
            distance = torch.arange(len(qs))[:, None] - torch.arange(len(qs))
            is_hidden = (distance < 0) | (distance >= (window or len(qs)))
            scores = scores.masked_fill(is_hidden, float("-inf"))
            rows.append(torch.einsum("nij,jnD->inD", scores.softmax(-1), vs))
        return torch.cat(rows)

    attention = PackedAttention(seqlens)
    attention.attend(0, q, k, v)  # of a layer without a window: masks are kept from layer to layer
    out = attention.attend(1, q, k, v, window=window)
    expected = reference()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad((out * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 8), (7, 160, 130), (300, 128, 320)])
def test_linear_equals_torch(shape: tuple[int, int, int], bias: bool) -> None:
    n_rows, n_in, n_out = shape
    torch.manual_seed(0)
    layer = Linear(n_in, n_out, bias=bias)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(n_rows, n_in, requires_grad=True)
    weights = torch.randn(n_rows, n_out)
    leaves = [x, *layer.parameters()]
    ours = layer(x)
    theirs = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), leaves),
        torch.autograd.grad((theirs * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), theirs, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(matmul(weights.T, x), weights.T @ x, atol=1e-4, rtol=1e-4)


def test_linear_without_onednn(monkeypatch: pytest.MonkeyPatch, decoder: Decoder, ids: torch.Tensor) -> None:
    fast = run(decoder, SEQLENS, ids)
    monkeypatch.setattr(machine, "TRAINS_WITH_ONEDNN", False)
    torch.testing.assert_close(run(decoder, SEQLENS, ids), fast, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- log-probabilities


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize(("chunk_rows", "block_rows"), [(1000, 1000), (1000, 3), (4, 3), (1, 1)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_lm_logprobs_and_gradients(
    chunk_rows: int, block_rows: int, temperature: float, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_module, "LOGITS_CHUNK", 37 * chunk_rows)
    monkeypatch.setattr(lm_module, "LOGITS_BLOCK", 37 * block_rows)
    torch.manual_seed(0)
    hidden = torch.randn(11, 16, requires_grad=True)
    weight = torch.randn(37, 16, requires_grad=True)
    targets = torch.randint(0, 37, (11,))
    a, b = torch.randn(11), torch.randn(11) * with_entropy
    logprobs, entropy = lm_logprobs(hidden, weight, targets, temperature=temperature, with_entropy=with_entropy)
    expected, expected_entropy = naive(hidden, weight, targets, temperature)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    loss = (a * logprobs).sum()
    if with_entropy:
        assert entropy is not None
        torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
        loss = loss + (b * entropy).sum()
    ours = torch.autograd.grad(loss, (hidden, weight))
    theirs = torch.autograd.grad((a * expected).sum() + (b * expected_entropy).sum(), (hidden, weight))
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_lm_logprobs_twice_backward_through_one_graph() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    logprobs, _ = lm_logprobs(hidden, weight, torch.arange(5))
    first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_lm_logprobs_at_temperature_zero_are_those_at_one() -> None:
    hidden, weight, targets = torch.randn(5, 8), torch.randn(9, 8), torch.arange(5)
    zero, one = (lm_logprobs(hidden, weight, targets, temperature=t)[0] for t in (0.0, 1.0))
    assert torch.equal(zero, one)


def test_lm_logprobs_of_no_rows() -> None:
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    logprobs, entropy = lm_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), with_entropy=True)
    assert logprobs.shape == (0,)
    assert entropy is not None
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_lm_logprobs_in_bf16_are_close_to_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 64), torch.randn(300, 64) * 0.1
    targets = torch.randint(0, 300, (40,))
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        logprobs, _ = lm_logprobs(h, w, targets)
        assert logprobs.dtype == torch.float32
        grads.append([logprobs.detach(), *(g.float() for g in torch.autograd.grad(logprobs.sum(), (h, w)))])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=0.06, rtol=0.05)


@pytest.mark.parametrize(
    "sizes", [{"n_heads": 3, "n_kv_heads": 2}, {"head_dim": 7}, {"vocab_size": 0}, {"n_layers": -1}]
)
def test_impossible_shapes_are_refused(sizes: dict[str, int]) -> None:
    shape = {
        "vocab_size": 9,
        "hidden_size": 8,
        "n_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": 4,
        "intermediate_size": 8,
    }
    with pytest.raises(ValueError, match=r"heads|even|at least 1"):
        DecoderConfig(**(shape | sizes))

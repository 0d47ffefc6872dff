"""The engine on CUDA: the CPU's numbers in float32, the variable-length kernel in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from realrl.algo.api import MicroBatching
from realrl.engine import device as devices
from realrl.engine.decoder_engine import DecoderEngine
from realrl.errors import ConfigError
from realrl.model.init import random_model
from realrl.model.layers import attention as attention_module
from realrl.model.layers.attention import PackedAttention
from realrl.shape import tiny_config
from tests.helpers.training import OPTIMIZER, VOCAB_SIZE, make_batch, masked_nll, n_masked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SEQLENS = [3, 64, 0, 17, 1, 200]


def engine_on(device: torch.device, compute_dtype: torch.dtype, *, checkpointing: bool = False) -> DecoderEngine:
    decoder = random_model(tiny_config(VOCAB_SIZE), seed=1, device=device)
    decoder.activation_checkpointing = checkpointing
    return DecoderEngine(
        decoder, role="actor", optimizer=OPTIMIZER, total_optimizer_steps=20, compute_dtype=compute_dtype
    )


def test_float32_training_has_the_numbers_of_the_cpu() -> None:
    batch = make_batch()
    results = []
    for device in (torch.device("cpu"), devices.resolve_device("cuda")):
        engine = engine_on(device, torch.float32)
        for _ in range(3):
            result = engine.train_batch(
                batch, masked_nll, normaliser=n_masked(batch), micro_batching=MicroBatching(n_mbs=2)
            )
        results.append(result)
    assert results[1].stats == pytest.approx(results[0].stats, rel=1e-4)
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bf16_training_lowers_the_loss(checkpointing: bool) -> None:
    batch = make_batch()
    engine = engine_on(devices.resolve_device("cuda"), torch.bfloat16, checkpointing=checkpointing)
    losses = [
        engine.train_batch(batch, masked_nll, normaliser=n_masked(batch), micro_batching=MicroBatching()).stats["nll"]
        for _ in range(15)
    ]
    assert losses[-1] < 0.8 * losses[0]


def test_variable_length_kernel_against_padded_groups() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(sum(SEQLENS), heads, 64) for heads in (9, 3, 3, 9)]
    q, k, v, weights = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=generator, requires_grad=True) for s in shapes
    )
    attention = PackedAttention(SEQLENS)
    fast = attention.attend(0, q, k, v)
    assert isinstance(attention._attend, attention_module._VarlenKernel)
    fast_grads = torch.autograd.grad((fast * weights).sum(), (q, k, v))
    plain = PackedAttention(SEQLENS).attend(0, q.float(), k.float(), v.float())
    plain_grads = torch.autograd.grad((plain * weights.float()).sum(), (q, k, v))
    torch.testing.assert_close(fast.float(), plain, atol=2e-2, rtol=2e-2)
    for a, b in zip(fast_grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)


def test_memory_is_that_of_the_allocator() -> None:
    device = devices.resolve_device("cuda")
    assert devices.backend_name(device) == "nccl"
    before = devices.memory_gb(device)
    block = torch.ones(250_000_000, dtype=torch.float32, device=device)
    devices.synchronize(device)
    assert devices.memory_gb(device) - before == pytest.approx(1.0, rel=0.01)
    assert devices.peak_memory_gb(device) >= before + 1.0
    del block
    devices.release_cached_memory(device)
    assert devices.memory_gb(device) == pytest.approx(before, abs=0.01)


def test_more_workers_than_devices() -> None:
    with pytest.raises(ConfigError, match=r"needs a CUDA device of its own, the node has \d"):
        devices.resolve_device("cuda", torch.cuda.device_count())


def test_value_head_in_bf16_scores_in_float32() -> None:
    config = replace(tiny_config(VOCAB_SIZE, head="value"), dtype="bfloat16")
    engine = DecoderEngine(random_model(config, seed=1, device=devices.resolve_device("cuda")), role="critic")
    batch = make_batch()
    scores = engine.forward(batch, lambda out, _: out.scores(), micro_batching=MicroBatching(n_mbs=2))
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()

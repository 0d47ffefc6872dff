"""Experts and rows of samples on a CUDA device; their CPU twins are `test_moe` and `test_rows_on_device`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from realrl.data.rows import SampleStore, decode_rows, encode_rows
from realrl.model.layers.moe import mix_experts, route
from tests.data.samples import make_sample
from tests.model.layers.test_moe import MOE, tokens, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
CUDA = torch.device("cuda")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("n_tokens", [64, 1])  # one token leaves experts without rows, whose gradient is 0
def test_experts_equal_those_of_the_cpu(n_tokens: int) -> None:
    results = []
    for device in (torch.device("cpu"), CUDA):
        x, *params = (
            t.detach().to(device).requires_grad_()
            for t in (tokens(n_tokens, dtype=torch.bfloat16), *weights(dtype=torch.bfloat16))
        )
        y = mix_experts(x, route(x, params[0], MOE), *params[1:])
        (y * 0.5).sum().backward()
        results.append([t.cpu() for t in (y.detach(), x.grad, *(p.grad for p in params))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=5e-2, rtol=5e-2)


def test_the_host_waits_for_no_expert(no_waiting: None) -> None:
    x = torch.ones(32, 16, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    experts = [torch.ones(shape, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
               for shape in ((5, 16), (5, 8, 16), (5, 8, 16), (5, 16, 8))]  # fmt: skip
    mix_experts(x, route(x, experts[0], replace(MOE, top_k=2)), *experts[1:]).sum().backward()


def test_rows_stay_on_the_device_up_to_the_limit() -> None:
    x = make_sample([[4], [2, 3]])
    store = SampleStore(device_limit_bytes=1 << 20)
    store.put(x.to(CUDA))
    assert store.device_bytes == store.size_bytes > 0
    assert store.get(x.ids, x.keys, device=CUDA)["input_ids"].is_cuda
    assert decode_rows(encode_rows(store.get(x.ids, x.keys))) == x
    full = SampleStore()
    full.put(x.to(CUDA))
    assert full.device_bytes == 0
    assert full.get(x.ids, x.keys) == x

"""Decode steps as CUDA graphs; their CPU twin is `tests/engine/generate/test_recorded_steps`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from realrl.algo.api import GenerationResult
from realrl.config.schema import GenerationConfig
from realrl.engine.generate import GenerateRequest, generate
from realrl.engine.generate.cuda_graphs import CudaGraphs
from realrl.engine.generate.replay import Replays
from realrl.errors import CallError
from realrl.model.init import random_model
from realrl.shape import MoEConfig, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
CUDA = torch.device("cuda", 0)
VOCAB_SIZE = 997
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "windows": {"qk_norm": "head", "sliding_window": 9, "windowed_layers": (1, 3)},
    "soft caps": {"norm_place": "both", "score_softcap": 0.4, "logit_softcap": 0.1},
    "experts": {"moe": MoEConfig(n_experts=5, top_k=2, intermediate_size=24)},
}


def responses(dtype: str = "float32", changes: dict[str, Any] | None = None, **options: Any) -> GenerationResult:
    torch.manual_seed(0)
    decoder = random_model(replace(tiny_config(VOCAB_SIZE), dtype=dtype, **(changes or {})), seed=1, device=CUDA)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,)) for n in (5, 40, 3, 9, 1, 7, 2, 17)]
    generation = GenerationConfig(**{"max_new_tokens": 150, "n_responses": 3, "max_batch_size": 13, **options})
    request = GenerateRequest(prompts, [f"0/{i}" for i in range(8)], generation, seed=3, step=4, eos_id=0)
    return generate(decoder, request)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "min_new_tokens": 30, "stop_ids": tuple(range(3, 60))},
        {"top_k": 8, "temperature": 1.3, "top_p": 0.9},
        {"top_p": 0.8, "min_new_tokens": 3},
        {"max_batch_size": 1, "max_new_tokens": 9},
    ],
    ids=str,
)
def test_tokens_are_those_of_single_operations(options: dict[str, Any]) -> None:
    ours, expected = responses(**options), responses(cuda_graphs=False, **options)
    assert [r.tolist() for r in ours.responses] == [r.tolist() for r in expected.responses]
    for a, b in zip(ours.policy_logprobs, expected.policy_logprobs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    changes = FAMILIES[family]
    ours, expected = responses(changes=changes), responses(changes=changes, cuda_graphs=False)
    assert [r.tolist() for r in ours.responses] == [r.tolist() for r in expected.responses]


@pytest.mark.parametrize("family", ["llama", "experts"])
def test_bfloat16(family: str) -> None:
    result = responses("bfloat16", FAMILIES[family])
    assert all(torch.isfinite(logprobs).all() for logprobs in result.logprobs)


def test_graphs_leave_no_memory_behind() -> None:
    responses()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        responses()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before + (256 << 20)


def test_work_that_waits_is_refused_by_name_and_the_device_goes_on() -> None:
    x = torch.ones(4, device=CUDA)
    waits: Callable[[], None] = lambda: x.add_(float(x.sum()))  # noqa: E731
    replays = Replays(CudaGraphs(CUDA))
    replays.run("waits", waits)
    with pytest.raises(CallError, match=r"cannot be recorded as a CUDA graph(.|\n)*generation.cuda_graphs=false"):
        replays.run("waits", waits)
    torch.cuda.synchronize()
    assert x.tolist() == [5.0] * 4

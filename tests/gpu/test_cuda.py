"""The CUDA twins of what the other tests check on the CPU; skipped without a device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from realrl.algo.api import MicroBatching
from realrl.config.schema import GenerationConfig
from realrl.engine.decoder_engine import DecoderEngine
from realrl.model.init import random_model
from tests.helpers.runs import assert_same_numbers, run_ppo
from tests.helpers.training import CONFIG, OPTIMIZER, make_batch, masked_nll, n_masked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
ONE = MicroBatching()


def engines(*, trainable: bool) -> tuple[DecoderEngine, DecoderEngine]:
    """The same model on the CPU and on the first GPU."""
    decoder = random_model(CONFIG, seed=1)
    optimizer = OPTIMIZER if trainable else None
    return tuple(
        DecoderEngine(copy.deepcopy(decoder).to(d), role="actor", optimizer=optimizer, total_optimizer_steps=10)
        for d in ("cpu", "cuda")
    )


def test_logprobs_and_gradients_equal_those_of_the_cpu() -> None:
    batch = make_batch()
    cpu, gpu = engines(trainable=True)
    for engine in (cpu, gpu):
        for _ in range(3):
            engine.train_batch(batch, masked_nll, normaliser=n_masked(batch), micro_batching=MicroBatching(n_mbs=2))
    ours, theirs = (e.forward(batch, lambda out, _: out.logprobs(), micro_batching=ONE).cpu() for e in (cpu, gpu))
    torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generated_tokens_equal_those_of_the_cpu(temperature: float) -> None:
    prompts = make_batch().remap({"input_ids": "prompt_ids"})
    generation = GenerationConfig(n_responses=2, max_new_tokens=8, temperature=temperature, max_batch_size=7)
    ours, theirs = (e.generate(prompts, generation, seed=1, step=1, eos_id=2) for e in engines(trainable=False))
    for a, b in zip(ours.responses, theirs.responses, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_ppo_gives_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    cpu = run_ppo(tmp_path / "cpu", "cluster.device=cpu", is_here=False)
    same = ("precision=fp32", "algorithm.recompute_logprobs=false")
    gpu = run_ppo(tmp_path / "gpu", "cluster.device=cuda", *same, is_here=False)
    assert_same_numbers(cpu, gpu, rel=1e-2, floor=1e-3)

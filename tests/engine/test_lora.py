"""The native engine with adapters on one rank: what is trained and kept, the base model, generation, exact resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realrl.algo.api import LossOutput, MicroBatching, TrainResult
from realrl.config.schema import GenerationConfig
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.errors import CallError
from realrl.model.decoder import Decoder
from realrl.model.dtypes import dtype_name
from realrl.model.files.hf import load_model
from realrl.model.init import random_model
from realrl.plan.parameters.adapters import is_adapter
from realrl.sched.messages import KeySchema, Per
from realrl.shape import HeadKind, LoRA
from tests.helpers.adapters import LORA, fill_adapters, merged
from tests.helpers.sharded import save_engine
from tests.helpers.training import CONFIG, OPTIMIZER, make_batch, masked_nll, n_masked

ONE = MicroBatching()


def make_decoder(
    head: HeadKind = "lm", lora: LoRA | None = LORA, dtype: torch.dtype = torch.float32, **changes: Any
) -> Decoder:
    decoder = random_model(
        replace(CONFIG, o_bias=True, head=head, lora=lora, dtype=dtype_name(dtype), **changes), seed=1
    )
    for name, p in decoder.named_parameters():
        if p.dim() > 1 and not is_adapter(name):
            p.data.mul_(5)  # a trained model's activations, not the near-zero ones of initialisation
    return decoder


def make_engine(decoder: Decoder, dtype: torch.dtype = torch.float32) -> DecoderEngine:
    return DecoderEngine(decoder, role="actor", optimizer=OPTIMIZER, total_optimizer_steps=10, compute_dtype=dtype)


def train(engine: DecoderEngine, n: int = 3, micro_batching: MicroBatching = ONE) -> TrainResult:
    batch = make_batch()
    for _ in range(n):
        result = engine.train_batch(batch, masked_nll, normaliser=n_masked(batch), micro_batching=micro_batching)
    return result


def logprobs(engine: DecoderEngine, *, adapter: bool = True) -> torch.Tensor:
    return engine.forward(make_batch(), lambda out, _: out.logprobs(), micro_batching=ONE, adapter=adapter)


def parameters(engine: DecoderEngine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.decoder.named_shards()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_learn_and_the_base_stays_bit_for_bit(dtype: torch.dtype) -> None:
    engine = make_engine(make_decoder(dtype=dtype), dtype)
    before, first = parameters(engine), train(engine, 1)
    last = train(engine, 8)
    assert last.stats["nll"] < first.stats["nll"]
    for name, p in parameters(engine).items():
        assert torch.equal(p, before[name]) != is_adapter(name), name
        assert p.dtype == (torch.float32 if is_adapter(name) else dtype), name


def test_only_what_is_trained_takes_optimizer_memory() -> None:
    engine = make_engine(make_decoder("value"), torch.bfloat16)
    batch = make_batch()
    with_scores = engine.train_batch(
        batch,
        lambda out, _: LossOutput(out.scores().square().sum()),
        normaliser=1.0,
        micro_batching=ONE,
    )
    assert with_scores.stepped
    trained = {name for name in parameters(engine) if is_adapter(name)} | {"head.weight"}
    state = engine.state_dict()
    assert state["parameters"].keys() == trained
    assert all("master" in stored for stored in state["parameters"].values())
    assert all(p.grad is None for p in engine.decoder.parameters())
    frozen = [p for name, p in engine.decoder.named_shards() if name not in trained]
    assert frozen
    assert not any(p.requires_grad for p in frozen)


def test_training_does_not_depend_on_micro_batches() -> None:
    whole, split = (make_engine(fill_adapters(make_decoder(), std=0.02)) for _ in range(2))
    expected, result = train(whole, 2), train(split, 2, MicroBatching(n_mbs=3))
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    for name, p in parameters(split).items():
        torch.testing.assert_close(p, whole.decoder.get_parameter(name).detach(), atol=1e-4, rtol=1e-4)


def test_forward_without_adapter_is_the_base_model() -> None:
    engine = make_engine(fill_adapters(make_decoder()))
    base = DecoderEngine(make_decoder(lora=None), role="ref")
    assert torch.equal(logprobs(engine, adapter=False), logprobs(base))
    assert not torch.allclose(logprobs(engine), logprobs(base), atol=0.01)
    train(engine)
    assert torch.equal(logprobs(engine, adapter=False), logprobs(base))


def test_forward_without_an_adapter_that_does_not_exist() -> None:
    engine = DecoderEngine(make_decoder(lora=None), role="actor")
    with pytest.raises(CallError, match=r"role 'actor' has no adapters, so it is no base model"):
        logprobs(engine, adapter=False)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_results_are_those_of_the_merged_model(head: HeadKind) -> None:
    decoder = fill_adapters(make_decoder(head))
    engines = [DecoderEngine(d, role="actor") for d in (decoder, merged(decoder))]
    ours, expected = (
        e.forward(make_batch(), lambda out, _: out.scores() if head == "value" else out.logprobs(), micro_batching=ONE)
        for e in engines
    )
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "layer", "activation": "gelu_tanh", "gated_mlp": False, "learned_positions": True},
        {"qk_norm": "head"},
    ],
    ids=["llama", "gpt2", "qwen3"],
)
def test_generation_is_token_for_token_that_of_the_merged_model(changes: dict[str, Any]) -> None:
    decoder = fill_adapters(make_decoder(**changes))
    generation = GenerationConfig(n_responses=2, max_new_tokens=12)
    prompts = make_batch(5).remap({"input_ids": "prompt_ids"})

    def generate(decoder: Decoder) -> list[list[int]]:
        engine = DecoderEngine(decoder, role="actor")
        result = engine.generate(prompts, generation, seed=1, step=1, eos_id=2)
        return [tokens.tolist() for tokens in result.responses]

    assert generate(decoder) == generate(merged(decoder))
    assert generate(decoder) != generate(make_decoder(**changes))


def test_generation_in_bf16() -> None:
    engine = make_engine(fill_adapters(make_decoder(dtype=torch.bfloat16)), torch.bfloat16)
    prompts = make_batch(5).remap({"input_ids": "prompt_ids"})
    result = engine.generate(prompts, GenerationConfig(max_new_tokens=4), seed=1, step=1, eos_id=2)
    assert len(result.responses) == 5


def test_generated_logprobs_are_those_of_a_forward_pass() -> None:
    engine = make_engine(fill_adapters(make_decoder()))
    train(engine)
    prompts = make_batch(4).remap({"input_ids": "prompt_ids"})
    result = engine.generate(prompts, GenerationConfig(max_new_tokens=6), seed=1, step=1, eos_id=2)
    whole = [torch.cat([p, r]) for p, r in zip(prompts.samples("prompt_ids"), result.responses, strict=True)]
    batch = SequenceSample.from_lists(prompts.ids, {"input_ids": (KeySchema("int64", Per.TOKEN), [[w] for w in whole])})
    recomputed = engine.forward(batch, lambda out, _: out.logprobs(), micro_batching=ONE)
    for row, tokens, expected in zip(
        torch.split(recomputed, [len(w) - 1 for w in whole]), result.responses, result.policy_logprobs, strict=True
    ):
        torch.testing.assert_close(row[-len(tokens) :], expected, atol=2e-5, rtol=1e-4)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_continues_bit_exactly_on_the_base_model(dtype: torch.dtype, tmp_path: Path) -> None:
    engine = make_engine(make_decoder(dtype=dtype), dtype)
    train(engine, 3)
    torch.save(engine.state_dict(), tmp_path / "state.pt")
    expected = train(engine, 2)
    resumed = make_engine(make_decoder(dtype=dtype), dtype)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert train(resumed, 2) == expected
    for name, p in parameters(resumed).items():
        assert torch.equal(p, parameters(engine)[name]), name


def test_state_of_other_adapters_is_refused() -> None:
    engine, full = make_engine(make_decoder()), make_engine(make_decoder(lora=None))
    train(engine, 1)
    train(full, 1)
    with pytest.raises(
        ValueError, match=r"28 parameters that are not trained here, the first is 'blocks\.0\.attention\.k"
    ):
        full.load_state_dict(engine.state_dict())
    with pytest.raises(ValueError, match=r"29 parameters that are not trained here, the first is 'blocks\.0"):
        engine.load_state_dict(full.state_dict())
    lacking = engine.state_dict()
    del lacking["parameters"]["blocks.0.attention.q.lora_a"]
    with pytest.raises(KeyError, match=r"blocks\.0\.attention\.q\.lora_a"):
        engine.load_state_dict(lacking)
    fewer = make_engine(make_decoder(lora=replace(LORA, targets=("q",))))
    with pytest.raises(ValueError, match="not trained here"):
        fewer.load_state_dict(engine.state_dict())
    lower = make_engine(make_decoder(lora=replace(LORA, rank=2)))
    with pytest.raises(ValueError, match=r"its 'blocks\.0\.attention\.q\.lora_a' is \[3, 32\], here it is \[2, 32\]"):
        lower.load_state_dict(engine.state_dict())


def test_saved_folder_holds_the_merged_model_and_the_adapters(tmp_path: Path) -> None:
    engine = make_engine(make_decoder())
    train(engine)
    save_engine(engine, tmp_path)
    loaded = DecoderEngine(load_model(tmp_path), role="actor")
    torch.testing.assert_close(logprobs(loaded), logprobs(engine), atol=2e-5, rtol=1e-5)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == LORA.rank
    assert "lora" not in (tmp_path / "config.json").read_text()

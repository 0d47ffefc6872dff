"""Adapters against the dense model whose weights are W + (alpha / rank) B A."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.decoder import Decoder
from realrl.model.files.adapter_files import save_adapters
from realrl.model.files.hf import load_model, save_model
from realrl.model.init import random_model
from realrl.model.lora import add_adapters, trained_parameters, without_adapters
from realrl.plan.parameters.adapters import LORA_A, LORA_B, is_adapter
from realrl.plan.parameters.shards import shard_of
from realrl.shape import DecoderConfig, LoRA
from tests.helpers.adapters import ALL, LORA, fill_adapters, merged
from tests.helpers.sharded import CONFIGS, backward, results_of, run_stages, whole_model


def adapted(config: DecoderConfig, lora: LoRA = LORA) -> Decoder:
    return fill_adapters(whole_model(replace(config, lora=lora)))


UNGATED = replace(
    CONFIGS["biases"],
    n_kv_heads=8,
    family="gpt2",
    norm="layer",
    activation="gelu_tanh",
    gated_mlp=False,
    learned_positions=True,
    tied_embeddings=True,
)
ALL_CONFIGS = {**CONFIGS, "ungated": UNGATED}


@pytest.mark.parametrize("config", ALL_CONFIGS.values(), ids=list(ALL_CONFIGS))
def test_results_and_gradients_are_those_of_the_dense_model(config: DecoderConfig) -> None:
    decoder = adapted(config)
    dense = merged(decoder)
    for model in (decoder, dense):
        backward(results_of(run_stages([model], config.vocab_size), config))
    for ours, theirs in zip(
        results_of(run_stages([decoder], config.vocab_size), config),
        results_of(run_stages([dense], config.vocab_size), config),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    n_checked = 0
    for name, a in decoder.named_parameters():
        if name.endswith(LORA_A):
            layer = name.removesuffix(LORA_A)
            b, dense_grad = decoder.get_parameter(layer + LORA_B), dense.get_parameter(layer + ".weight").grad
            assert dense_grad is not None
            # d/dA of W + s B A is s B^T dW, d/dB is s dW A^T
            torch.testing.assert_close(a.grad, LORA.scale * b.T @ dense_grad, atol=5e-5, rtol=1e-4)
            torch.testing.assert_close(b.grad, LORA.scale * dense_grad @ a.T, atol=5e-5, rtol=1e-4)
            n_checked += 1
    n_dense = config.n_layers if config.moe is None else len(config.moe.dense_layers)  # experts have none
    assert n_checked == 4 * config.n_layers + (3 if config.gated_mlp else 2) * n_dense


def test_recomputed_activations_give_the_same_gradients() -> None:
    config = CONFIGS["biases"]
    plain, recomputing = adapted(config), adapted(config)
    recomputing.activation_checkpointing = True
    for model in (plain, recomputing):
        for name, p in model.named_parameters():
            p.requires_grad_(is_adapter(name))
        backward(results_of(run_stages([model], config.vocab_size), config))
    for (name, p), (_, q) in zip(plain.named_parameters(), recomputing.named_parameters(), strict=True):
        assert (p.grad is None) == (not is_adapter(name))
        assert (q.grad is None) == (p.grad is None)
        if p.grad is not None and q.grad is not None:
            assert torch.equal(p.grad, q.grad), name


def test_without_adapters_the_base_model_computes_bit_for_bit() -> None:
    config = CONFIGS["tied"]
    decoder, base = adapted(config), whole_model(config)
    base.set_parameters({name: p.detach() for name, p in decoder.named_shards() if not is_adapter(name)})

    def logprobs(model: Decoder) -> torch.Tensor:
        return run_stages([model], config.vocab_size).logprobs().detach()

    with_adapters, expected = logprobs(decoder), logprobs(base)
    with without_adapters(decoder):
        assert torch.equal(logprobs(decoder), expected)
    assert torch.equal(logprobs(decoder), with_adapters)
    assert not torch.allclose(with_adapters, expected, atol=1e-2)


def test_new_adapters_change_nothing_and_follow_from_the_seed_alone() -> None:
    config = CONFIGS["biases"]
    base, decoder = random_model(config, 1), random_model(config, 1)
    add_adapters(decoder, LORA, seed=1)
    assert decoder.config.lora == LORA
    out = [run_stages([model], config.vocab_size).logprobs() for model in (base, decoder)]
    assert torch.equal(*out)
    born_with = random_model(replace(config, lora=LORA), 1)
    assert [name for name, _ in decoder.named_shards()] == list(decoder.specs) == list(born_with.specs)
    for (name, p), (_, q) in zip(decoder.named_shards(), born_with.named_shards(), strict=True):
        assert torch.equal(p, q), name
        if name.endswith(LORA_A):
            bound = decoder.specs[name].shape[1] ** -0.5
            assert 0.8 * bound < p.abs().max() <= bound
    other = random_model(replace(config, lora=LORA), 2)
    name = "blocks.0.attention.q" + LORA_A
    assert not torch.equal(other.get_parameter(name), decoder.get_parameter(name))
    for strategy in (ParallelStrategy(tp=2), ParallelStrategy(tp=8), ParallelStrategy(tp=2, pp=3)):
        for mesh_rank in range(strategy.n_devices):
            shard = shard_of(config, strategy, mesh_rank)
            part = random_model(config, 1, shard=shard)
            add_adapters(part, LORA, seed=1)
            for name, p in part.named_shards():
                assert torch.equal(p, born_with.get_parameter(name)[part.place_of(name)]), (strategy, name)


@pytest.mark.parametrize(("model", "n_heads_trained"), [("tied", 0), ("value", 1)])
def test_only_adapters_and_scalar_heads_are_trained(model: str, n_heads_trained: int) -> None:
    decoder = adapted(CONFIGS[model], LoRA(2, 1.0, ("q", "v")))
    names = [name for name, _ in trained_parameters(decoder)]
    assert len([name for name in names if is_adapter(name)]) == 2 * 2 * decoder.config.n_layers
    assert [name for name in names if not is_adapter(name)] == ["head.weight"] * n_heads_trained
    whole = whole_model(CONFIGS[model])
    assert [name for name, _ in trained_parameters(whole)] == [name for name, _ in whole.named_shards()]


def test_bf16_activations_keep_float32_adapters() -> None:
    config = replace(CONFIGS["biases"], dtype="bfloat16", lora=LORA)
    decoder = random_model(config, 1)
    dtypes = {is_adapter(name): p.dtype for name, p in decoder.named_shards()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}
    backward([run_stages([decoder], config.vocab_size).logprobs()])
    b = decoder.get_parameter("blocks.1.mlp.down" + LORA_B)
    assert b.grad is not None
    assert b.grad.dtype == torch.float32
    assert b.grad.abs().max() > 0


# ---------------------------------------------------------------- on disk


def test_saved_model_has_its_adapters_merged(tmp_path: Path) -> None:
    decoder = adapted(CONFIGS["tied"])
    save_model(decoder, tmp_path)
    loaded = load_model(tmp_path)
    for name, p in merged(decoder).named_parameters():
        assert torch.equal(loaded.get_parameter(name), p), name


def test_peft_files(tmp_path: Path) -> None:
    lora = LoRA(3, 6.0, ("q", "down"), base="/models/base")
    decoder = adapted(CONFIGS["value"], lora)
    tensors = {name: p.detach() for name, p in trained_parameters(decoder)}
    assert save_adapters(decoder.config, tmp_path / "adapter", tensors)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "/models/base"
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (3, 6, "SEQ_CLS")
    assert config["target_modules"] == ["q_proj", "down_proj"]
    assert config["modules_to_save"] == ["score"]
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == 2 * 2 * decoder.config.n_layers + 1
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"
    assert torch.equal(stored[name], decoder.get_parameter("blocks.2.mlp.down" + LORA_A))
    assert torch.equal(stored["base_model.model.score.weight"], decoder.get_parameter("head.weight"))


def test_a_format_that_joins_layers_has_no_place_for_their_adapters(tmp_path: Path) -> None:
    """GPT-2 stores q, k and v as one matrix; its other layers are transposed there."""
    for targets, is_written in ((("q", "o"), False), (("o", "up", "down"), True)):
        decoder = adapted(UNGATED, LoRA(2, 4.0, targets))
        tensors = dict(trained_parameters(decoder))
        assert save_adapters(decoder.config, tmp_path / "adapter", tensors) is is_written
        assert (tmp_path / "adapter").is_dir() is is_written
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] is True
    assert config["target_modules"] == ["c_proj", "c_fc"]


def test_targets_that_a_short_name_would_not_tell_apart(tmp_path: Path) -> None:
    decoder = adapted(UNGATED, LoRA(2, 4.0, ("down",)))
    assert save_adapters(decoder.config, tmp_path, dict(trained_parameters(decoder)))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == [f"transformer.h.{i}.mlp.c_proj" for i in range(UNGATED.n_layers)]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers for an attribute of old
def test_peft_reads_the_files(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    config = replace(CONFIGS["biases"], eos_token_ids=(1,))
    decoder = adapted(config, LoRA(3, 5.0, ALL))
    base = load_base(decoder, tmp_path / "base")
    assert save_adapters(decoder.config, tmp_path / "adapter", dict(trained_parameters(decoder)))
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    ids = torch.randint(0, config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    save_model(decoder, tmp_path / "merged")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


def load_base(decoder: Decoder, folder: Path) -> Path:
    base = Decoder(replace(decoder.config, lora=None))
    base.set_parameters({name: p.detach() for name, p in decoder.named_shards() if not is_adapter(name)})
    save_model(base, folder)
    return folder

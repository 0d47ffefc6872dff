import dataclasses

import pytest
import torch

from realrl.cpu import CacheShape, KVCache, NewTokens, TorchKernels, choose_kernels, machine
from realrl.engine.generate.network import FusedNetwork
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.shape import RopeScaling, tiny_config

CPU = torch.device("cpu")


def make_model(**changes):
    decoder = random_model(dataclasses.replace(tiny_config(99), **changes), seed=5)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim > 1 and "embedding" not in name:
                parameter.mul_(5)  # a trained model's activations, not the near-zero ones of initialisation
            elif name.endswith("bias") or "norm" in name:
                parameter.normal_()
    return decoder


def make_cache(network, *, n_rows, max_tokens):
    shape = CacheShape(network.n_layers, n_rows, network.n_kv_heads, network.config.head_dim, max_tokens)
    return KVCache(shape, dtype=network.dtype, device=CPU, grows=not network.fuses_attention)


def prefill(network, tokens, cache, seqlens, *, first_row=0):
    entering = NewTokens.of_prompts(seqlens, first_row=first_row, device=CPU)
    return network.hidden(tokens, network.attention(cache, entering))


def packed_logits(decoder, sequences):
    seqlens = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(n) for n in seqlens])
    hidden = decoder(torch.cat(sequences), positions, PackedAttention(seqlens))
    return decoder.head(hidden).split(seqlens)


@pytest.mark.parametrize(
    "kernels", [TorchKernels(torch.float32), choose_kernels(CPU, torch.float32)], ids=["torch", "chosen"]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 1},
        {"n_kv_heads": 4, "tied_embeddings": False},
        {"attention_bias": True, "o_bias": True, "mlp_bias": True},
        {"activation": "gelu_tanh", "norm_offset": True, "embedding_scale": 3.0},
        {"activation": "gelu_tanh", "gated_mlp": False, "mlp_bias": True, "norm": "layer", "learned_positions": True},
        {"qk_norm": "head", "sliding_window": 3, "windowed_layers": (1, 3)},
        {"sliding_window": 1, "n_kv_heads": 4},
        {"rope_scaling": RopeScaling("yarn", 8.0, original_max_positions=4)},
        {"norm_place": "both", "score_softcap": 0.4, "logit_softcap": 0.1, "sliding_window": 2, "score_size": 9},
        {"norm_place": "both", "sliding_window": 3, "windowed_layers": (0, 2), "local_rope_theta": 50.0},
        {"norm_place": "after", "qk_norm": "all", "attention_bias": True},
        {"rotary_dim": 4},
        {"score_size": 3},
    ],
    ids=str,
)
def test_prefill_and_decode_give_the_decoders_logits(changes, kernels):
    torch.manual_seed(0)
    decoder = make_model(**changes)
    sequences = [torch.randint(0, 99, (n,)) for n in (9, 4, 6)]
    prompt_lengths = [5, 1, 3]
    with torch.inference_mode():
        expected = packed_logits(decoder, sequences)
        network = FusedNetwork(decoder, kernels)
        cache = make_cache(network, n_rows=4, max_tokens=9)
        cache.reserve(5)
        prompts = torch.cat([sequence[:n] for sequence, n in zip(sequences, prompt_lengths, strict=True)])
        actual = network.logits(prefill(network, prompts, cache, prompt_lengths)).split(prompt_lengths)
        for part, whole in zip(actual, expected, strict=True):
            torch.testing.assert_close(part, whole[: len(part)], rtol=1e-5, atol=1e-5)

        for offset in range(3):  # the rows keep their different lengths
            lengths = torch.tensor(prompt_lengths) + offset
            cache.reserve(int(lengths.max()) + 1)
            attention = network.attention(cache, NewTokens(lengths))
            tokens = torch.stack([sequence[n] for sequence, n in zip(sequences, lengths, strict=True)])
            logits = network.logits(network.hidden(tokens, attention))
            wanted = torch.stack([whole[n] for whole, n in zip(expected, lengths, strict=True)])
            torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def test_a_prefill_into_later_rows_leaves_earlier_ones_alone():
    torch.manual_seed(1)
    decoder = make_model()
    with torch.inference_mode():
        network = FusedNetwork(decoder, choose_kernels(CPU, torch.float32))
        cache = make_cache(network, n_rows=3, max_tokens=8)
        cache.reserve(6)
        for first_slot, seqlens in ((0, [6]), (1, [2, 3])):
            prefill(network, torch.randint(0, 99, (sum(seqlens),)), cache, seqlens, first_row=first_slot)
            if first_slot == 0:
                before = cache.save(0, 6)
        after = cache.save(0, 6)
    for (k0, v0), (k1, v1) in zip(before, after, strict=True):
        assert torch.equal(k0, k1)
        assert torch.equal(v0, v1)


@pytest.mark.parametrize("has_bf16_kernels", [False, True])
def test_a_bf16_model_computes_in_float32_where_the_cpu_has_no_bf16_arithmetic(has_bf16_kernels, monkeypatch):
    monkeypatch.setattr(machine, "has_bf16_kernels", lambda: has_bf16_kernels)
    torch.manual_seed(2)
    decoder = make_model(attention_bias=True, mlp_bias=True, dtype="bfloat16")
    exact = make_model(attention_bias=True, mlp_bias=True)
    exact.load_state_dict(decoder.state_dict())  # bf16 values in float32
    sequence = torch.randint(0, 99, (7,))
    with torch.inference_mode():
        network = FusedNetwork(decoder, choose_kernels(CPU, torch.bfloat16))
        assert network.dtype == (torch.bfloat16 if has_bf16_kernels else torch.float32)
        cache = make_cache(network, n_rows=1, max_tokens=7)
        cache.reserve(7)
        logits = network.logits(prefill(network, sequence, cache, [7]))
        assert logits.dtype == network.dtype
        if not has_bf16_kernels:
            torch.testing.assert_close(logits, packed_logits(exact, [sequence])[0], rtol=1e-5, atol=1e-5)

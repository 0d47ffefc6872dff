import dataclasses

import pytest
import torch

from realrl.engine.generate.attention import DecodeAttention, PrefillAttention
from realrl.engine.generate.cache import CacheShape, KVCache
from realrl.engine.generate.network import FusedNetwork
from realrl.model.dtypes import torch_dtype
from realrl.model.init import random_model
from realrl.model.layers import linear as linear_module
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


def packed_logits(decoder, sequences):
    seqlens = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(n) for n in seqlens])
    hidden = decoder(torch.cat(sequences), positions, PackedAttention(seqlens))
    return decoder.head(hidden).split(seqlens)


@pytest.mark.parametrize("pack", [False, None])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 1},
        {"n_kv_heads": 4, "tied_embeddings": False},
        {"attention_bias": True, "o_bias": True, "mlp_bias": True},
        {"activation": "gelu_tanh", "norm_offset": True, "embedding_scale": 3.0},
        {"activation": "gelu_tanh", "gated_mlp": False, "mlp_bias": True, "norm": "layer", "learned_positions": True},
        {"qk_norm": True, "sliding_window": 3, "windowed_layers": (1, 3)},
        {"sliding_window": 1, "n_kv_heads": 4},
        {"rope_scaling": RopeScaling("yarn", 8.0, original_max_positions=4)},
    ],
    ids=str,
)
def test_prefill_and_decode_give_the_decoders_logits(changes, pack):
    torch.manual_seed(0)
    decoder = make_model(**changes)
    config = decoder.config
    sequences = [torch.randint(0, 99, (n,)) for n in (9, 4, 6)]
    prompt_lengths = [5, 1, 3]
    with torch.inference_mode():
        expected = packed_logits(decoder, sequences)
        network = FusedNetwork(decoder, decoder.head, pack=pack)
        shape = CacheShape(config.n_layers, 4, config.n_kv_heads, config.head_dim, 9)
        cache = KVCache(shape, dtype=torch_dtype(config.dtype), device=CPU, fused=pack)
        cache.reserve(5)
        prefill = PrefillAttention(cache, 0, prompt_lengths, CPU)
        prompts = torch.cat([sequence[:n] for sequence, n in zip(sequences, prompt_lengths, strict=True)])
        actual = network.logits(network.hidden(prompts, prefill)).split(prompt_lengths)
        for part, whole in zip(actual, expected, strict=True):
            torch.testing.assert_close(part, whole[: len(part)], rtol=1e-5, atol=1e-5)

        for offset in range(3):  # the rows keep their different lengths
            lengths = torch.tensor(prompt_lengths) + offset
            cache.reserve(int(lengths.max()) + 1)
            attention = DecodeAttention(cache, lengths, n_heads=config.n_heads, dtype=torch_dtype(config.dtype))
            tokens = torch.stack([sequence[n] for sequence, n in zip(sequences, lengths, strict=True)])
            logits = network.logits(network.hidden(tokens, attention))
            wanted = torch.stack([whole[n] for whole, n in zip(expected, lengths, strict=True)])
            torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def test_a_prefill_into_later_rows_leaves_earlier_ones_alone():
    torch.manual_seed(1)
    decoder = make_model()
    config = decoder.config
    with torch.inference_mode():
        network = FusedNetwork(decoder, decoder.head)
        cache = KVCache(CacheShape(config.n_layers, 3, 2, 32, 8), dtype=torch_dtype(config.dtype), device=CPU)
        cache.reserve(6)
        for first_slot, seqlens in ((0, [6]), (1, [2, 3])):
            prefill = PrefillAttention(cache, first_slot, seqlens, CPU)
            network.hidden(torch.randint(0, 99, (sum(seqlens),)), prefill)
            if first_slot == 0:
                before = cache.save(0, 6)
        after = cache.save(0, 6)
    for (k0, v0), (k1, v1) in zip(before, after, strict=True):
        assert torch.equal(k0, k1)
        assert torch.equal(v0, v1)


@pytest.mark.parametrize("has_bf16_kernels", [False, True])
def test_a_bf16_model_computes_in_float32_where_the_cpu_has_no_bf16_arithmetic(has_bf16_kernels, monkeypatch):
    monkeypatch.setattr(linear_module, "has_bf16_kernels", lambda: has_bf16_kernels)
    torch.manual_seed(2)
    decoder = make_model(attention_bias=True, mlp_bias=True, dtype="bfloat16")
    exact = make_model(attention_bias=True, mlp_bias=True)
    exact.load_state_dict(decoder.state_dict())  # bf16 values in float32
    sequence = torch.randint(0, 99, (7,))
    with torch.inference_mode():
        network = FusedNetwork(decoder, decoder.head)
        assert network.dtype == (torch.bfloat16 if has_bf16_kernels else torch.float32)
        shape = CacheShape(network.n_layers, 1, network.n_kv_heads, network.config.head_dim, 7)
        cache = KVCache(shape, dtype=network.dtype, device=CPU)
        cache.reserve(7)
        prefill = PrefillAttention(cache, 0, [7], CPU)
        logits = network.logits(network.hidden(sequence, prefill))
        assert logits.dtype == network.dtype
        if not has_bf16_kernels:
            torch.testing.assert_close(logits, packed_logits(exact, [sequence])[0], rtol=1e-5, atol=1e-5)

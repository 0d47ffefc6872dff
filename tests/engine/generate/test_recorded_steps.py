"""Recorded decode steps give what steps of single operations give; tapes stand for CUDA graphs here."""

import dataclasses
import gc
import weakref

import pytest
import torch

from realrl.config.schema import GenerationConfig
from realrl.cpu import KVCache, Sampler, TorchKernels, attention
from realrl.engine.generate import GenerateRequest, decode_batch, generator, network
from realrl.engine.generate.recorded_steps import padded_rows
from realrl.engine.generate.replay import Replays
from realrl.errors import CallError
from realrl.model.init import random_model
from realrl.shape import MoEConfig, tiny_config
from tests.helpers.tape import Tapes

VOCAB_SIZE, EOS = 61, 0
LENGTHS = (5, 3, 9, 1, 7, 2)


def make_model(**changes):
    decoder = random_model(dataclasses.replace(tiny_config(VOCAB_SIZE), **changes), seed=1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return decoder


@pytest.fixture(scope="module")
def prompts():
    rng = torch.Generator().manual_seed(2)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=rng) for n in LENGTHS]


@pytest.fixture
def tapes(monkeypatch):
    tapes = Tapes()
    monkeypatch.setattr(generator, "choose_kernels", lambda device, dtype, n_rows: TorchKernels(dtype))
    monkeypatch.setattr(generator, "make_recorder", lambda device: tapes)
    monkeypatch.setattr(decode_batch, "CACHE_GROWTH", 4)
    return tapes


def generate(decoder, prompts, **options):
    options = {"max_new_tokens": 24, "n_responses": 3, "max_batch_size": 13, **options}
    ids = [f"0/{i}" for i in range(len(prompts))]
    return generator.generate(decoder, GenerateRequest(prompts, ids, GenerationConfig(**options), 3, 4, EOS))


def assert_equal(ours, expected):
    assert [r.tolist() for r in ours.responses] == [r.tolist() for r in expected.responses]
    assert ours.truncated == expected.truncated
    for name in ("logprobs", "policy_logprobs"):
        for a, b in zip(getattr(ours, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "min_new_tokens": 6, "stop_ids": (7, 9)},
        {"top_k": 8, "temperature": 1.3, "top_p": 0.9},
        {"top_p": 0.8, "min_new_tokens": 3},
        {"max_batch_size": 1},
    ],
    ids=str,
)
def test_tokens_and_logprobs_are_those_of_single_operations(options, prompts, tapes):
    decoder = make_model()
    ours = generate(decoder, prompts, **options)
    assert tapes.n_replayed > tapes.n_recorded > 0
    assert_equal(ours, generate(decoder, prompts, cuda_graphs=False, **options))


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": "head", "sliding_window": 3, "windowed_layers": (1, 3)},
        {"norm_place": "both", "score_softcap": 0.4, "logit_softcap": 0.1},
        {"activation": "gelu_tanh", "gated_mlp": False, "norm": "layer", "learned_positions": True},
    ],
    ids=str,
)
def test_families(changes, prompts, tapes):
    decoder = make_model(**changes)
    ours = generate(decoder, prompts)
    assert_equal(ours, generate(decoder, prompts, cuda_graphs=False))


def test_experts_that_make_the_host_wait_are_not_recorded(prompts, tapes):
    generate(make_model(moe=MoEConfig(n_experts=5, top_k=2, intermediate_size=24)), prompts)
    assert tapes.n_warmed == 0


def exact_flash(q, k, v, rows, window):
    """The twin of FlashAttention's kernel, from the same places of the same rows."""
    assert rows.queries.tolist() == list(range(len(q) + 1))
    out = torch.empty_like(q)
    for row, (start, n_tokens) in enumerate(zip(rows.starts.tolist(), rows.n_tokens.tolist(), strict=False)):
        assert n_tokens <= rows.capacity
        first = start + (0 if window is None else max(0, n_tokens - window))
        keys, values = (x[first : start + n_tokens].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        weights = (torch.einsum("nd,tnd->nt", q[row], keys) * q.shape[-1] ** -0.5).softmax(-1)
        out[row] = torch.einsum("nt,tnd->nd", weights, values)
    return out


@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 1}, {"sliding_window": 3, "windowed_layers": (1, 3)}], ids=str)
def test_flash_attention_to_a_token_major_cache(changes, prompts, monkeypatch):
    monkeypatch.setattr(generator, "choose_kernels", lambda device, dtype, n_rows: TorchKernels(dtype))
    decoder = make_model(**changes)
    expected = generate(decoder, prompts)
    monkeypatch.setattr(network, "has_flash", lambda device, dtype, head_dim: True)
    monkeypatch.setattr(attention, "flash_decode", exact_flash)
    assert_equal(generate(decoder, prompts), expected)


def test_rows_that_a_record_cannot_settle_are_drawn_again(prompts, tapes, monkeypatch):
    decoder = make_model()
    expected = generate(decoder, prompts, cuda_graphs=False, top_p=0.9)
    drawn_again = []
    original = Sampler.sample
    monkeypatch.setattr(Sampler, "sample", lambda self, *args: drawn_again.append(1) or original(self, *args))
    monkeypatch.setattr("realrl.cpu.sampler._FIRST_CANDIDATES", 2)
    assert_equal(generate(decoder, prompts, top_p=0.9), expected)
    assert len(drawn_again) > 20


def test_a_policy_that_all_but_stops_too_early(prompts, tapes, monkeypatch):
    monkeypatch.setattr("realrl.cpu.sampler._ALL_BUT_STOPPING", 0.05)
    decoder = make_model()
    options = {"min_new_tokens": 5, "stop_ids": (3, 4, 5, 6)}
    expected = generate(decoder, prompts, cuda_graphs=False, **options)
    drawn_again = []
    original = Sampler.sample
    monkeypatch.setattr(Sampler, "sample", lambda self, *args: drawn_again.append(1) or original(self, *args))
    assert_equal(generate(decoder, prompts, **options), expected)
    assert len(drawn_again) > 4


def test_logits_that_stop_being_finite_name_the_sample(prompts, tapes):
    decoder = make_model()
    with torch.no_grad():
        decoder.embedding.weight[60] = float("nan")
    decoder.head = make_model().head
    with pytest.raises(CallError, match=r"logits for sample '0/[0-9]' are not finite"):
        generate(decoder, [prompt.clamp(max=59) for prompt in prompts], temperature=1.5, max_new_tokens=60)
    assert tapes.n_replayed


def test_the_cache_is_freed_after_the_call(prompts, tapes, monkeypatch):
    caches = []
    original = KVCache.__init__

    def recording(self, *args, **kwargs):
        caches.append(weakref.ref(self))
        original(self, *args, **kwargs)

    monkeypatch.setattr(KVCache, "__init__", recording)
    generate(make_model(), prompts)
    gc.collect()
    assert [cache() for cache in caches] == [None]


def test_work_is_warmed_up_recorded_and_replayed():
    tapes, total = Tapes(), torch.zeros(())
    replays = Replays(tapes)
    for _ in range(4):
        replays.run("a", lambda: total.add_(1))
    assert (tapes.n_warmed, tapes.n_recorded, tapes.n_replayed) == (1, 1, 3)
    replays.forget()
    replays.run("a", lambda: total.add_(1))
    assert (tapes.n_warmed, tapes.n_recorded, tapes.n_replayed) == (1, 2, 4)


def test_padding_is_a_quarter_at_most_and_within_the_rows():
    for most in (1, 7, 100, 1000):
        sizes = {padded_rows(n, most) for n in range(1, most + 1)}
        assert all(n <= padded_rows(n, most) <= min(most, max(n, 1.25 * n)) for n in range(1, most + 1))
        assert len(sizes) <= 5 + 4 * max(0, most.bit_length() - 2)

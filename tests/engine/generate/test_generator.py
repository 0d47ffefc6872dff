import gc
import itertools
import weakref

import pytest
import torch

from realrl.algo.api import GenerationResult
from realrl.config.schema import GenerationConfig
from realrl.cpu import KVCache, NewTokens
from realrl.engine.generate import GenerateRequest, generator
from realrl.engine.generate.philox import hash_words, step_key, uniforms
from realrl.errors import CallError, ConfigError
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.plan.samples import slot_table
from realrl.shape import tiny_config

VOCAB_SIZE, EOS = 61, 0
PROMPT_LENGTHS = (5, 3, 9, 1, 7, 2)


@pytest.fixture(scope="module")
def decoder():
    decoder = random_model(tiny_config(VOCAB_SIZE), seed=1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return decoder


@pytest.fixture(scope="module")
def prompts():
    rng = torch.Generator().manual_seed(2)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=rng) for n in PROMPT_LENGTHS]


SAMPLE_IDS = [f"0/{i}" for i in range(len(PROMPT_LENGTHS))]


def generate(decoder, prompts, sample_ids=SAMPLE_IDS, *, seed=3, step=4, **options) -> GenerationResult:
    options = {"max_new_tokens": 12, "n_responses": 3, **options}
    request = GenerateRequest(prompts, sample_ids, GenerationConfig(**options), seed, step, EOS)
    return generator.generate(decoder, request)


def tokens(result):
    return [response.tolist() for response in result.responses]


def naive(decoder, prompt, sample_id, response_index, *, stop_ids=(EOS,), **options):
    """One response without cache, batching or clever sampling: the specification."""
    generation = GenerationConfig(**{"max_new_tokens": 12, **options})
    words = torch.tensor(hash_words(sample_id)).numpy().astype("uint64")[None]
    sequence, chosen, logprobs = prompt, [], []
    for position in range(generation.max_new_tokens):
        hidden = decoder(sequence, torch.arange(len(sequence)), PackedAttention([len(sequence)]))
        logits = decoder.head(hidden[-1:])[0].double() / (generation.temperature or 1.0)
        policy = torch.log_softmax(logits, -1)
        probs = policy.exp()
        if position < generation.min_new_tokens:
            probs[list(stop_ids)] = 0.0
        if generation.temperature == 0:
            token = int(probs.argmax())
        else:
            number = uniforms(
                step_key(3, 4), words, torch.tensor([response_index]).numpy(), torch.tensor([position]).numpy()
            )[0]
            token = int(torch.searchsorted(probs.cumsum(-1), number * probs.sum(), right=True))
        chosen.append(token)
        logprobs.append(float(policy[token]))
        if token in stop_ids:
            break
        sequence = torch.cat((sequence, torch.tensor([token])))
    return chosen, logprobs


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 0.7, "min_new_tokens": 6}])
@torch.no_grad()
def test_tokens_and_logprobs_equal_those_of_a_plain_loop_without_cache(decoder, prompts, options):
    n_responses = 2
    result = generate(decoder, prompts, n_responses=n_responses, max_batch_size=4, stop_ids=(7, 9), **options)
    for i, (prompt, sample_id) in enumerate(zip(prompts, SAMPLE_IDS, strict=True)):
        for response in range(n_responses):
            wanted, logprobs = naive(decoder, prompt, sample_id, response, stop_ids=(EOS, 7, 9), **options)
            row = i * n_responses + response
            assert result.responses[row].tolist() == wanted
            torch.testing.assert_close(result.policy_logprobs[row], torch.tensor(logprobs), rtol=1e-4, atol=1e-4)
            assert result.truncated[row] == (wanted[-1] not in (EOS, 7, 9))


@pytest.mark.parametrize("options", [{}, {"top_k": 8, "temperature": 1.3}, {"top_p": 0.8, "min_new_tokens": 3}])
def test_tokens_do_not_depend_on_batching_order_or_company(decoder, prompts, options):
    reference = generate(decoder, prompts, max_batch_size=64, **options)
    assert len(set(map(tuple, tokens(reference)))) > len(prompts)  # sampling, not one repeated response
    for max_batch_size in (1, 2, 4, 7):
        result = generate(decoder, prompts, max_batch_size=max_batch_size, **options)
        assert tokens(result) == tokens(reference)
        for actual, wanted in zip(result.logprobs, reference.logprobs, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)

    reverse = generate(decoder, prompts[::-1], SAMPLE_IDS[::-1], **options)
    by_sample = [tokens(reverse)[3 * i : 3 * i + 3] for i in range(len(prompts))][::-1]
    assert list(itertools.chain.from_iterable(by_sample)) == tokens(reference)

    halves = [generate(decoder, prompts[part], SAMPLE_IDS[part], **options) for part in (slice(0, 2), slice(2, None))]
    assert tokens(halves[0]) + tokens(halves[1]) == tokens(reference)

    fewer = generate(decoder, prompts, n_responses=2, **options)
    assert tokens(fewer)[:2] == tokens(reference)[:2]


def test_seed_and_step_change_the_tokens(decoder, prompts):
    results = [generate(decoder, prompts, seed=seed, step=step) for seed, step in ((1, 1), (1, 2), (2, 1))]
    assert len({str(tokens(result)) for result in results}) == 3
    assert tokens(generate(decoder, prompts, seed=1, step=1)) == tokens(results[0])


def test_a_small_prefill_budget_changes_nothing(decoder, prompts, monkeypatch):
    reference = generate(decoder, prompts)
    monkeypatch.setattr(slot_table, "PREFILL_TOKENS", 8)
    assert tokens(generate(decoder, prompts)) == tokens(reference)


def test_responses_of_a_prompt_share_its_prefill(decoder, prompts, monkeypatch):
    computed = []
    of_prompts = NewTokens.of_prompts

    def counting(seqlens, **options):
        computed.extend(seqlens)
        return of_prompts(seqlens, **options)

    monkeypatch.setattr(NewTokens, "of_prompts", counting)
    generate(decoder, prompts, n_responses=5, max_batch_size=3)
    assert sorted(computed) == sorted(PROMPT_LENGTHS)


def test_results_have_the_promised_types_and_lengths(decoder, prompts):
    result = generate(decoder, prompts, min_new_tokens=2, max_new_tokens=5)
    assert len(result.responses) == len(result.truncated) == 3 * len(prompts)
    for response, logprobs, policy, truncated in zip(
        result.responses, result.logprobs, result.policy_logprobs, result.truncated, strict=True
    ):
        assert response.dtype == torch.int64
        assert logprobs.dtype == policy.dtype == torch.float32
        assert len(response) == len(logprobs) == len(policy)
        assert 2 <= len(response) <= 5
        assert truncated == (response[-1] != EOS)
        assert EOS not in response[:-1]
        torch.testing.assert_close(logprobs[2:], policy[2:], rtol=1e-4, atol=1e-4)
    scale = torch.ones((), requires_grad=True)
    (scale * result.logprobs[0]).sum().backward()  # inference tensors would refuse


def test_a_single_new_token_and_no_prompts(decoder, prompts):
    result = generate(decoder, prompts, max_new_tokens=1, max_batch_size=2)
    assert [len(response) for response in result.responses] == [1] * 18
    assert generate(decoder, [], []) == GenerationResult([], [], [], [])


def test_new_weights_are_used_by_the_next_call(prompts):
    decoder = random_model(tiny_config(VOCAB_SIZE), seed=1)
    before = tokens(generate(decoder, prompts))
    for parameter in decoder.parameters():
        parameter.data.mul_(1.5)  # invisible to version counters
    fresh = random_model(tiny_config(VOCAB_SIZE), seed=1)
    fresh.load_state_dict(decoder.state_dict())
    assert tokens(generate(decoder, prompts)) == tokens(generate(fresh, prompts)) != before


def test_the_cache_is_freed_after_the_call(decoder, prompts, monkeypatch):
    caches = []
    original = KVCache.__init__

    def recording(self, *args, **kwargs):
        caches.append(weakref.ref(self))
        original(self, *args, **kwargs)

    monkeypatch.setattr(KVCache, "__init__", recording)
    generate(decoder, prompts)
    gc.collect()
    assert len(caches) == 1
    assert caches[0]() is None


def test_bfloat16(prompts):
    decoder = random_model(tiny_config(VOCAB_SIZE, dtype="bfloat16"), seed=1)
    result = generate(decoder, prompts, max_batch_size=5)
    assert all(torch.isfinite(logprobs).all() for logprobs in result.logprobs)


class TestBadInput:
    def test_empty_prompt(self, decoder, prompts):
        with pytest.raises(CallError, match=r"the prompt of sample '0/1' is empty\n  Remove the sample") as caught:
            generate(decoder, [prompts[0], torch.empty(0, dtype=torch.int64)], SAMPLE_IDS[:2])
        assert caught.value.step == 4

    def test_prompt_too_long(self, decoder, prompts):
        with pytest.raises(CallError, match=r"sample '0/0': a prompt of 5 tokens .*=1020 exceed the model's 1024"):
            generate(decoder, prompts, max_new_tokens=1020)

    def test_token_outside_of_the_vocabulary(self, decoder):
        with pytest.raises(CallError, match="sample 'a' holds token 61, outside of the vocabulary of 61"):
            generate(decoder, [torch.tensor([1, 61])], ["a"])

    def test_stop_ids_outside_of_the_vocabulary(self, decoder, prompts):
        with pytest.raises(ConfigError, match=r"stop tokens \[61\] are outside of the vocabulary of 61"):
            generate(decoder, prompts, stop_ids=(5, 61))

    def test_every_token_stops(self, decoder, prompts):
        with pytest.raises(ConfigError, match=r"all 61 tokens stop, but generation.min_new_tokens=1"):
            generate(decoder, prompts, min_new_tokens=1, stop_ids=tuple(range(61)))

    def test_logits_that_are_not_finite(self, prompts):
        decoder = random_model(tiny_config(VOCAB_SIZE), seed=1)
        with torch.no_grad():
            decoder.embedding.weight[60] = float("nan")
        decoder.head = random_model(tiny_config(VOCAB_SIZE), seed=1).head
        mixed = [prompts[0].clamp(max=50), prompts[1].clamp(max=50), torch.tensor([60])]
        with pytest.raises(CallError, match="logits for sample '0/2' are not finite"):
            generate(decoder, mixed, SAMPLE_IDS[:3])

    def test_duplicate_sample_ids(self, decoder, prompts):
        with pytest.raises(ValueError, match="distinct sample ids"):
            generate(decoder, prompts[:2], ["a", "a"])

import math

import numpy as np
import pytest
import torch

from realrl.config.schema import GenerationConfig
from realrl.cpu import InvalidLogitsError, choice, choose_kernels

N_DRAWS = 4000


@pytest.fixture(autouse=True, params=[True, False], ids=["fused", "plain"])
def fused(request, monkeypatch):
    """Every test twice: with the kernels where this machine has them, and with torch's operations."""
    if not request.param:
        monkeypatch.setattr(choice, "can_use", lambda device, dtype: False)


def sample(logits, uniforms, generation, forbidden=None, stop_ids=()):
    kernels, (n_rows, vocab_size) = choose_kernels(logits.device, logits.dtype), logits.shape
    sampler = kernels.sampler(generation, stop_ids, max_rows=n_rows, vocab_size=vocab_size, device=logits.device)
    is_early = np.zeros(len(logits), dtype=bool) if forbidden is None else forbidden
    return sampler(logits, uniforms, is_early)


def reference(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The filtered distribution of one row, written the slow and obvious way."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    order = probs.argsort(descending=True).tolist()
    if top_k:
        order = order[:top_k]
    mass = sum(probs[i].item() for i in order)
    kept, total = [], 0.0
    for i in order:
        if total < top_p * mass:
            kept.append(i)
        total += probs[i].item()
    result = torch.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"top_p": 0.8},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.6},
        {"top_k": 1000},
        {"top_k": 1},
        {"top_p": 0.01},
    ],
)
def test_frequencies_and_logprobs_match_the_distribution(filters):
    torch.manual_seed(0)
    logits = torch.randn(40) * 2
    uniforms = (torch.arange(N_DRAWS, dtype=torch.float64) + 0.5) / N_DRAWS
    uniforms = (uniforms + torch.rand((), dtype=torch.float64)) % 1.0
    generation = GenerationConfig(**filters)
    result = sample(logits.expand(N_DRAWS, -1), uniforms[torch.randperm(N_DRAWS)], generation)
    expected = reference(logits, **filters)
    counts = torch.bincount(result.tokens, minlength=40)
    # uniforms on a grid: each count is within one or two of its expectation, far tighter than chance
    assert (counts - expected * N_DRAWS).abs().max() <= 2
    torch.testing.assert_close(result.logprobs, expected.log().float()[result.tokens], rtol=1e-4, atol=1e-5)
    policy = torch.log_softmax(logits / filters.get("temperature", 1.0), dim=-1)
    torch.testing.assert_close(result.policy_logprobs, policy[result.tokens], rtol=1e-4, atol=1e-5)


def test_chi_square_with_random_numbers():
    torch.manual_seed(1)
    logits = torch.randn(30)
    result = sample(logits.expand(N_DRAWS, -1), torch.rand(N_DRAWS, dtype=torch.float64), GenerationConfig())
    expected = torch.softmax(logits, -1) * N_DRAWS
    counts = torch.bincount(result.tokens, minlength=30)
    assert ((counts - expected) ** 2 / expected).sum() < 63.2  # 99.98% quantile with 29 degrees of freedom


def test_a_large_nucleus_falls_back_to_more_candidates():
    torch.manual_seed(2)
    logits = torch.cat((torch.randn(1, 6000) * 0.1, torch.randn(1, 6000) * 4))
    for uniform in (0.0, 0.3, 0.999999):
        result = sample(logits, torch.full((2,), uniform, dtype=torch.float64), GenerationConfig(top_p=0.9))
        for row in range(2):
            expected = reference(logits[row], top_p=0.9)
            cumulative = expected.cumsum(-1)
            token = int(result.tokens[row])
            assert cumulative[token] - expected[token] - 1e-5 <= uniform <= cumulative[token] + 1e-5
            assert math.isclose(result.logprobs[row].item(), expected[token].log().item(), abs_tol=1e-4)


def test_greedy_takes_the_largest_and_reports_the_policy_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.5]])
    result = sample(logits, torch.zeros(2, dtype=torch.float64), GenerationConfig(temperature=0.0))
    assert result.tokens.tolist() == [1, 0]
    assert result.logprobs.tolist() == [0.0, 0.0]
    torch.testing.assert_close(result.policy_logprobs, torch.log_softmax(logits, -1).amax(-1))


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}])
def test_early_rows_cannot_stop_but_the_policy_is_not_masked(filters):
    logits = torch.tensor([[9.0, 0.0, 1.0, 2.0], [9.0, 0.0, 1.0, 2.0]])
    result = sample(
        logits,
        torch.full((2,), 0.5, dtype=torch.float64),
        GenerationConfig(**filters),
        forbidden=np.array([True, False]),
        stop_ids=(0,),
    )
    assert result.tokens[0] != 0
    assert result.tokens[1] == 0
    policy = torch.log_softmax(logits[0], -1)
    torch.testing.assert_close(result.policy_logprobs, policy[result.tokens], rtol=1e-4, atol=1e-6)
    if not filters:
        masked = logits[0].masked_fill(torch.tensor([True, False, False, False]), -torch.inf)
        expected = torch.log_softmax(masked, -1)[result.tokens[0]]
        torch.testing.assert_close(result.logprobs[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"temperature": 0.1}, {"top_k": 3}, {"top_p": 0.8}])
@pytest.mark.parametrize("lead", [2.0, 15.0, 120.0, 1000.0])
def test_rows_that_want_to_stop_choose_among_the_other_tokens(filters, lead):
    generation = GenerationConfig(**filters)
    others = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15]).log() * generation.temperature
    logits = torch.cat((others[:2], torch.tensor([lead]), others[2:]))[None].repeat(200, 1)
    uniforms = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    drawn = sample(logits, uniforms, generation, forbidden=np.ones(200, dtype=bool), stop_ids=(2,))
    if generation.temperature == 0.0:
        expected = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # all are equal
    else:
        barred = logits[0].double()
        barred[2] = -torch.inf
        expected = reference(barred, generation.temperature, generation.top_k, generation.top_p)
    found = torch.bincount(drawn.tokens, minlength=6) / 200.0
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=0.011)
    policy = torch.log_softmax(logits.double() / (generation.temperature or 1.0), dim=-1)[0]
    torch.testing.assert_close(drawn.policy_logprobs.double(), policy[drawn.tokens], rtol=1e-5, atol=1e-4)
    wanted = expected.double().log()[drawn.tokens]
    torch.testing.assert_close(drawn.logprobs.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_can_only_stop_is_invalid(temperature):
    logits = torch.full((3, 5), -torch.inf)
    logits[:, 1], logits[[0, 2], 3] = 1.0, 0.0
    with pytest.raises(InvalidLogitsError) as error:
        sample(
            logits,
            torch.full((3,), 0.5, dtype=torch.float64),
            GenerationConfig(temperature=temperature),
            forbidden=np.ones(3, dtype=bool),
            stop_ids=(1,),
        )
    assert error.value.row == 1


def test_rounding_at_the_end_of_a_block_draws_no_improbable_token():
    torch.manual_seed(0)
    logits = torch.randn(4000, 256)
    logits[:, -1] = -90.0
    for uniform in (1 - 5e-8, 1 - 1e-8, 1 - 2**-53):
        drawn = sample(logits, torch.full((4000,), uniform, dtype=torch.float64), GenerationConfig())
        assert (drawn.logprobs > -30.0).all()


@pytest.mark.parametrize("vocab_size", [1, 3, 255, 256, 257, 1000])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.95}, {"top_k": 3}])
def test_the_ends_of_the_unit_interval_and_any_vocabulary_size(vocab_size, filters):
    torch.manual_seed(3)
    logits = torch.randn(2, vocab_size)
    logits[:, vocab_size // 2 :] -= 200.0  # probability 0 in float32
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    result = sample(logits, uniforms, GenerationConfig(**filters))
    assert torch.isfinite(result.logprobs).all()
    if vocab_size > 1:
        assert (result.tokens < vocab_size // 2).all()


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}])
def test_rounding_in_the_logits_does_not_change_tokens(filters):
    torch.manual_seed(4)
    logits = torch.randn(200, 500)
    logits[:, 100] = logits[:, 400]  # equal probabilities: an order by probability would be decided by noise
    uniforms = torch.rand(200, dtype=torch.float64)
    noisy = logits + torch.randn_like(logits) * 1e-7
    generation = GenerationConfig(**filters)
    assert torch.equal(sample(logits, uniforms, generation).tokens, sample(noisy, uniforms, generation).tokens)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_invalid_rows_are_found(bad):
    logits = torch.zeros(3, 50)
    logits[1, 17] = bad
    with pytest.raises(InvalidLogitsError, match="row 1 are not finite") as caught:
        sample(logits, torch.zeros(3, dtype=torch.float64), GenerationConfig())
    assert caught.value.row == 1


def test_low_precision_logits_are_sampled_in_float32():
    logits = torch.randn(4, 300).bfloat16()
    uniforms = torch.rand(4, dtype=torch.float64)
    low, full = (sample(x, uniforms, GenerationConfig(temperature=0.8)) for x in (logits, logits.float()))
    assert torch.equal(low.tokens, full.tokens)
    torch.testing.assert_close(low.logprobs, full.logprobs)

"""Measures of an evaluation, against definitions."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from realrl.sched.track.scores import mean_and_error, pass_at_k, score


@pytest.mark.parametrize(("n", "passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int, passed: int) -> None:
    responses = [i < passed for i in range(n)]
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(responses, k))
        assert math.isclose(pass_at_k(n, passed, k), sum(map(any, subsets)) / len(subsets), abs_tol=1e-12)


def test_the_error_of_a_mean_is_the_textbook_one() -> None:
    values = [0.0, 1.0, 0.5, 2.0]
    mean, error = mean_and_error(values)
    assert mean == statistics.fmean(values)
    assert error == pytest.approx(statistics.stdev(values) / math.sqrt(4))
    assert mean_and_error(values, [3.0] * 4) == pytest.approx((mean, error))
    assert mean_and_error([2.0]) == (2.0, None)
    assert mean_and_error([], []) == (0.0, None)


def test_the_error_of_a_ratio_is_that_of_its_linearisation() -> None:
    values, weights = [1.0, 2.0, 4.0], [1.0, 3.0, 2.0]
    mean, error = mean_and_error(values, weights)
    assert mean == pytest.approx(15.0 / 6.0)
    residuals = [w * (x - mean) / 2.0 for w, x in zip(weights, values, strict=True)]  # 2 is the mean weight
    assert error == pytest.approx(statistics.stdev(residuals) / math.sqrt(3))


def test_responses_to_one_prompt_count_as_one_sample() -> None:
    samples = [
        {
            "rewards": (1.0, 0.0),
            "truncated": (True, False),
            "response_tokens": (3.0, 5.0),
            "prompt": ("a", "a"),
            "prompt_tokens": (1.0, 1.0),
        },
        {
            "rewards": (0.5, 0.0),
            "truncated": (False, False),
            "response_tokens": (1.0, 1.0),
            "prompt": ("b", "b"),
            "prompt_tokens": (1.0, 1.0),
        },
    ]
    metrics = score(samples, pass_threshold=0.5)
    assert metrics["eval/reward/mean"] == pytest.approx(0.375)
    assert metrics["eval/reward/stderr"] == pytest.approx(statistics.stdev([0.5, 0.25]) / math.sqrt(2))
    assert metrics["eval/truncated/mean"] == 0.25
    assert metrics["eval/response_length/mean"] == 2.5
    assert (metrics["eval/pass@1"], metrics["eval/pass@2"]) == (0.25, 0.5)  # 0.5 is not more than 0.5
    assert metrics["eval/n_samples"] == 2.0
    assert not any("prompt" in name for name in metrics)


def test_judged_samples_are_weighted() -> None:
    metrics = score([{"eval_weight": (3.0,), "eval_loss": (1.0,)}, {"eval_weight": (1.0,), "eval_loss": (2.0,)}],
                    pass_threshold=0.5)  # fmt: skip
    assert metrics["eval/loss"] == 1.25
    assert metrics["eval/perplexity"] == pytest.approx(math.exp(1.25))
    assert metrics["eval/perplexity/stderr"] == pytest.approx(math.exp(1.25) * metrics["eval/loss/stderr"])
    pairs = score([{"eval_weight": (1.0,), "eval_loss": (1.0,), "eval_accuracy": (1.0,)}], pass_threshold=0.5)
    assert pairs == {"eval/loss": 1.0, "eval/accuracy": 1.0, "eval/n_samples": 1.0}
    assert score([], pass_threshold=0.5) == {"eval/n_samples": 0.0}

"""Metrics of an evaluation: means over samples, each with its standard error. Pure arithmetic, no tensors.

Samples are independent of each other: responses to one prompt are averaged first. The standard error of a mean over N
samples is sqrt(s^2 / N), with s^2 of N - 1 degrees of freedom. Where samples have weights (tokens), it is that of the
ratio of two sums: Cochran 1977, "Sampling techniques", equation 6.13. With one sample there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Values = tuple[float | bool | str, ...]
Columns = Mapping[str, Values]

WEIGHT, JUDGED = "eval_weight", "eval_"  # graph keys of the weight, and prefix of the metrics, of `evaluate`
MAX_EXPONENT = 700.0
_NAMES = {"rewards": "reward", "costs": "cost", "response_tokens": "response_length"}
_UNSCORED = ("prompt", "response", "prompt_tokens", "turns")


def score(samples: Sequence[Columns], *, pass_threshold: float) -> dict[str, float]:
    """Return the metrics of an evaluation, all under ``eval/``.

    Args:
        samples: columns of each sample, as in `realrl.sched.messages.SamplesRead`.
        pass_threshold: a response passes if its reward is more than this.

    Returns:
        Of responses: ``eval/<what>/mean`` of every number that they have (`reward`, `cost`, `response_length`,
        `truncated`, ...), and ``eval/pass@k`` for k = 1, 2, 4, ... and the number of responses. Of judged samples:
        ``eval/<metric>``, and `eval/perplexity` where all that is judged is a loss. For each of them the standard
        error, ``.../stderr``; and `eval/n_samples`.
    """
    if not samples:
        return {"eval/n_samples": 0.0}
    is_judged = WEIGHT in samples[0]
    metrics = _judged(samples) if is_judged else _responses(samples, pass_threshold)
    return {**metrics, "eval/n_samples": float(len(samples))}


def pass_at_k(n: int, n_passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k responses passes, where `n_passed` of n passed.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating large language models trained on code", equation 1.
    """
    return 1.0 - math.comb(n - n_passed, k) / math.comb(n, k)


def mean_and_error(values: Sequence[float], weights: Sequence[float] | None = None) -> tuple[float, float | None]:
    """Return the weighted mean sum(w x) / sum(w), and its standard error; None for a single value.

    Args:
        values: x, one per sample.
        weights: w; None for equal ones.
    """
    weights = [1.0] * len(values) if weights is None else weights
    total = math.fsum(weights)
    if total == 0.0:
        return 0.0, None
    mean = math.fsum(w * x for w, x in zip(weights, values, strict=True)) / total
    n = len(values)
    if n < 2:
        return mean, None
    squares = math.fsum((w * (x - mean)) ** 2 for w, x in zip(weights, values, strict=True))
    return mean, math.sqrt(n / (n - 1) * squares) / total


def _responses(samples: Sequence[Columns], threshold: float) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in samples[0]:
        if name not in _UNSCORED:
            means = [_mean(columns[name]) for columns in samples]
            metrics |= _named(f"eval/{_NAMES.get(name, name)}/mean", mean_and_error(means))
    if "rewards" not in samples[0]:
        return metrics
    rewards = [[float(value) for value in columns["rewards"]] for columns in samples]
    n_responses = min(map(len, rewards))
    for k in _powers_of_two(n_responses):
        passed = [pass_at_k(len(row), sum(value > threshold for value in row), k) for row in rewards]
        metrics |= _named(f"eval/pass@{k}", mean_and_error(passed))
    return metrics


def _judged(samples: Sequence[Columns]) -> dict[str, float]:
    weights = [float(columns[WEIGHT][0]) for columns in samples]
    names = [name for name in samples[0] if name.startswith(JUDGED) and name != WEIGHT]
    metrics: dict[str, float] = {}
    for name in names:
        values = [float(columns[name][0]) for columns in samples]
        metrics |= _named(f"eval/{name.removeprefix(JUDGED)}", mean_and_error(values, weights))
    if names == [JUDGED + "loss"]:
        perplexity = math.exp(min(metrics["eval/loss"], MAX_EXPONENT))
        metrics["eval/perplexity"] = perplexity
        if "eval/loss/stderr" in metrics:
            metrics["eval/perplexity/stderr"] = perplexity * metrics["eval/loss/stderr"]  # to first order
    return metrics


def _named(name: str, estimate: tuple[float, float | None]) -> dict[str, float]:
    mean, error = estimate
    return {name: mean} if error is None else {name: mean, f"{name.removesuffix('/mean')}/stderr": error}


def _mean(values: Values) -> float:
    return math.fsum(float(value) for value in values) / max(len(values), 1)


def _powers_of_two(n: int) -> list[int]:
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | ({n} if n else set()))

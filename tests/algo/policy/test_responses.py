"""Packed responses: every column against the rows of one response after another."""

from __future__ import annotations

import pytest
import torch

from realrl.algo.api import GenerationResult
from realrl.algo.policy.responses import BEHAVIOR, pack_responses
from realrl.data.sample import SequenceSample
from realrl.sched.messages import KeySchema, Per


def prompts_of(lengths):
    rows = [[torch.arange(100 * i, 100 * i + length)] for i, length in enumerate(lengths)]
    ids = [f"p{i}" for i in range(len(lengths))]
    return SequenceSample.from_lists(ids, {"prompt_ids": (KeySchema("int64", Per.TOKEN), rows)})


def generated(lengths, is_given):
    def columns(make):
        return [make(length) for length in lengths]

    given = columns(lambda length: torch.rand(length) < 0.4) if is_given else None
    truncated = [i % 3 == 0 for i in range(len(lengths))]
    return GenerationResult(
        columns(lambda length: torch.randint(5, (length,))),
        columns(torch.randn),
        columns(torch.randn),
        truncated,
        given,
    )


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(
    ("prompts", "responses"),
    [((3,), (2,)), ((1, 4, 2), (5, 1, 3)), ((2, 1), (1, 7, 2, 4)), ((4, 1, 1), (1, 1, 2, 9, 1, 3, 2, 2, 6))],
)
def test_rows_of_each_response(prompts, responses, is_given):
    torch.manual_seed(0)
    result = generated(responses, is_given)
    packed = pack_responses(prompts_of(prompts), result)
    n = len(responses) // len(prompts)
    flat = {key: [row for sample in packed.sequences(key) for row in sample] for key in packed.keys}
    assert [len(sample) for sample in packed.seqlens["input_ids"]] == [n] * len(prompts)
    for number, response in enumerate(result.responses):
        prompt = torch.arange(prompts[number // n]) + 100 * (number // n)
        given = result.given[number] if is_given else torch.zeros(len(response), dtype=torch.bool)
        assert flat["input_ids"][number].tolist() == [*prompt.tolist(), *response.tolist()]
        assert flat["prompt_mask"][number].tolist() == [*[True] * len(prompt), *given.tolist()]
        for key, column in (("old_logprobs", result.policy_logprobs), (BEHAVIOR, result.logprobs)):
            own = [0.0 if known else value for value, known in zip(column[number].tolist(), given, strict=True)]
            assert flat[key][number].tolist() == [*[0.0] * (len(prompt) - 1), *own]
        assert flat["truncated"][number].tolist() == [result.truncated[number]]


def test_columns_of_another_dtype_are_converted():
    """A sampler of the user may give int32 tokens and float64 log-probabilities."""
    result = GenerationResult(
        [torch.tensor([1, 2], dtype=torch.int32)], [torch.ones(2).double()], [torch.ones(2)], [True]
    )
    packed = pack_responses(prompts_of((2,)), result)
    assert {key: packed[key].dtype for key in ("input_ids", BEHAVIOR)} == {
        "input_ids": torch.int64,
        BEHAVIOR: torch.float32,
    }

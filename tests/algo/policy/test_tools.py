"""Tokens that a sampler puts into a response are a prompt to what follows: nothing is learned of them."""

from __future__ import annotations

import pytest
import torch

from realrl.algo.api import CallContext, GenerationResult, Model
from realrl.algo.packed import response_mask
from realrl.algo.policy.actor import PolicyActor
from realrl.config.algorithms import GenOptions
from realrl.config.policy_options import PolicyOptions
from realrl.data.sample import SequenceSample
from realrl.experiment.pieces import register_piece
from realrl.sched.messages import KeySchema, Per
from tests.helpers.fake_engine import Bigram, FakeEngine, fake_context, fake_model

PROMPTS = SequenceSample.from_lists(
    ["a", "b"],
    {"prompt_ids": (KeySchema("int64", Per.TOKEN), [[torch.tensor([1, 2])], [torch.tensor([3])]])},
)


@register_piece("sampler", "with_a_tool")
def with_a_tool(model: Model, prompts: SequenceSample, ctx: CallContext) -> GenerationResult:
    """Four tokens for each prompt, of which a tool said the second and the third."""
    logprobs = [torch.tensor([-1.0, -9.0, -9.0, -2.0])] * 2
    given = [torch.tensor([False, True, True, False])] * 2
    return GenerationResult([torch.tensor([4, 5, 6, 7])] * 2, logprobs, logprobs, [False, True], given)


@pytest.mark.parametrize("options", [PolicyOptions, GenOptions])
def test_what_a_tool_said_is_no_action(options: type[PolicyOptions] | type[GenOptions]) -> None:
    ctx = fake_context("actor_gen", [["a", "b"]], algorithm=options(sampler="with_a_tool"))
    batch = PolicyActor().generate(fake_model("actor", FakeEngine(Bigram(9))), PROMPTS, ctx)
    assert batch["input_ids"].tolist() == [1, 2, 4, 5, 6, 7, 3, 4, 5, 6, 7]
    no, yes = False, True
    assert batch["prompt_mask"].tolist() == [yes, yes, no, yes, yes, no, yes, no, yes, yes, no]
    assert batch["old_logprobs"].tolist() == [0, -1, 0, 0, -2, -1, 0, 0, -2]
    assert batch["behavior_logprobs"].tolist() == batch["old_logprobs"].tolist()
    assert response_mask(batch).tolist() == [no, yes, no, no, yes, yes, no, no, yes]
    assert batch["truncated"].tolist() == [no, yes]
